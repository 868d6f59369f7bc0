"""Reductions and weights of layers one after another: where a whole step would overlap nothing.

`sharded` runs layers of whose weights each rank keeps a shard, `exchange` gathers and scatters the weights
of one, `vjp` is the derivative of a layer whose weights are not kept (together `run.layers`);
`backward_reduce` reduces a gradient inside the backward pass (`run.tap`).
"""
