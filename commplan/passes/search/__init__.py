"""The search that chooses sizes of buckets and algorithms of a phase together, by what `predict` returns.

`units` finds what there is to choose, `candidates` lists the alternatives, `trials` runs the passes with some
of them, and `search` decides which.
"""
