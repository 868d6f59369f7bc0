"""Phases as JAX functions of one rank's arrays, for every backend.

`phase` lowers a phase, `ops` an op, `collectives` a collective to `jax.lax`, `programs` a chunk program to
permutes, `hierarchical` levels; `packing` is buckets; `backward_reduce` is `run.tap`; `sharded_layers`,
`layer_vjp` and `layer_exchange` are `run.layers`; `functions` calls the user's; `backend` is what another
backend has to offer; `_compat` is all that depends on JAX's version.
"""
