"""Lowers schedules to programs: `jax` for meshes, `mpi` for ranks, `numpy` for one process.

`programs` selects the chunk program of a collective for all backends. `audit` compares a compiled step with
its schedule.
"""
