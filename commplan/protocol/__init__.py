"""The protocol between workers and servers, in pure Python.

`units` divides states among servers, `sites` lists the messages of a worker for each op of a plan, and
`server` is the state machine of a server. `build_sites` makes the sites of a schedule, and `chunks` divides
buffers. The verifier explores the protocol, and the runtime executes it.
"""
