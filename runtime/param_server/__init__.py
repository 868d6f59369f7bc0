"""What a server process does while training runs: it keeps states, sums, updates and answers.

`commplan.protocol` says which messages there are and what a server does with them; `driver` carries that
out on the arrays of `store`, `serve` brings it what arrives through a `mailbox`, `routing` says which unit
lies where. `checkpoint` writes the states (not the sums of an unfinished update) after each change and
before its answer.
"""
