"""Explains compiled plans, for `commplan explain`, `commplan simulate` and `commplan report`.

`report` has one section per line of the plan; `stages` and `servers` describe single stages and server
states; `graph` draws the plan graph. Only the command line and the public API import this package. A new
stage defines its own text (`ir.ops`), so it needs no change here.
"""
