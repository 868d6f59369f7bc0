"""Arithmetic of the input pipeline: record order, division of work, transfers between hosts, and costs.

The prover, the cost model and the runtime call the same functions.
"""
