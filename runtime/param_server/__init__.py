"""The server process of a parameter server: it stores states, adds gradients, updates states and answers
requests.

- `commplan.protocol` defines the messages, and the state machine of a server.
- `driver` carries out its effects on the arrays of `store`; `routing` maps tags to units.
- `serve` is the loop of the process, and `mailbox` its messages over MPI.
- `checkpoint` writes each changed state before it is answered. Sums of unfinished updates are not written.
"""
