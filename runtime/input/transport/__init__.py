"""Rows between hosts: what each sends and receives, and how JAX and MPI carry it out."""
