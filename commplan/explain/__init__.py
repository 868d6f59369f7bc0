"""What a plan became, in words and pictures, for `commplan explain` and `commplan simulate`.

`report` has one section per line of the plan; `stages` and `servers` say single stages and server states in
words; `graph` draws the plan graph. Imported by the command and the public face alone; a new stage says its
line itself (`ir.ops`), so that nothing is added here for it.
"""
