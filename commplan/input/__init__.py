"""Input that members share, as arithmetic: which record stands where, who makes which rows, what moves between hosts.

The prover, the cost model and the runtime all read the same functions.
"""
