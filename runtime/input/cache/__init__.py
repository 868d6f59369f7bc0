"""Caches for the results of deterministic host functions, by record, shared by the processes of a host."""
