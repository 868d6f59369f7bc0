"""Collectives under JAX, inside a shard_map.

- `lax_backend` lowers a collective to `jax.lax`.
- `native` has XLA's own collectives, and `subgroups` those within parts of an axis.
- `hierarchical` runs a collective level by level; `programs` runs chunk programs as permutes.
- `variadic` avoids packing on GPUs; `order` orders collectives; `bitcast` moves floats as integers.
"""
