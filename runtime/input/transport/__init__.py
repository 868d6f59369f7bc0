"""Transfers of rows between hosts: their plans, and how JAX and MPI carry them out."""
