"""The protocol between workers and servers, in pure Python.

`units` divides states among servers, `sites` lists the messages of a worker for each op of a plan, and
`server` is the state machine of a server. The verifier explores them, and the runtime executes them.
"""
