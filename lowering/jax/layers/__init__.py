"""Reductions and weights layer by layer, for steps in which collectives of whole trees would overlap nothing.

- `sharded` runs layers whose weights are sharded over ranks; `exchange` gathers and scatters the weights of a
  layer; `vjp` is the derivative of a layer whose gathered weights are not stored. Together: `run.layers`.
- `backward_reduce` reduces a gradient inside the backward pass: `run.tap`.
"""
