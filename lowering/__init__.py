"""From a schedule to what runs: `jax` and `mpi` lower it, `audit` reads what XLA made of it. `programs` says
which chunk program a collective is, for all of them.
"""
