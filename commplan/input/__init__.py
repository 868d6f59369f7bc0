"""Input that members share, as arithmetic: what stands where, who makes which rows, what moves.

The prover, the cost model and the runtime all read the same functions.
"""
