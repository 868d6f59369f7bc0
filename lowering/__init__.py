"""Lowers schedules to programs: `jax` for meshes, `mpi` for ranks, `numpy` for one process.

`programs` selects the chunk program of a collective for all backends. `hlo` reads compiled steps, `gpu`
estimates their time, and `audit` compares them with their schedule.
"""
