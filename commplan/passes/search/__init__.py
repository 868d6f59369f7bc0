"""Search bucket sizes and algorithms of a phase together, with `predict` as the objective.

`units` finds the open choices, `candidates` lists the alternatives, `trials` runs the passes with some of
them, and `search` decides.
"""
