"""Processes of `mpirun`, and the ranks of `bench.soak`."""
