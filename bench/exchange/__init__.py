"""Shared code of the benches of parameter exchange and elastic averaging."""
