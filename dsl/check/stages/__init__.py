"""Checks of stages: operands, placements of results, and bindings. Similar stages share a module."""
