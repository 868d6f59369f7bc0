"""What workers and servers say to each other, and in which order: pure Python, read by everything.

`units` cuts states into what servers own, `sites` says which messages a worker sends for an op of a plan, and
`server` what a server does with what arrives. The verifier explores these, the
runtime runs them.
"""
