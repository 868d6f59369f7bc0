"""Collective algorithms as chunk programs, each defined once for all backends and analyses."""
