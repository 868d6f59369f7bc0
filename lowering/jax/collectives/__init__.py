"""Collectives under JAX, inside a shard_map.

`lax_backend` takes one to `jax.lax`, `native` has XLA's own, `hierarchical` level by level, `subgroups`
within parts of an axis, `variadic` on several arrays as they are, `programs` by the permutes of a chunk
program; `order` makes one wait for another, `bitcast` carries floats as integers.
"""
