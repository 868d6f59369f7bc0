"""Collective algorithms, one module each.

A module defines functions from the number of ranks to chunk programs. `commplan.collectives.registry`
discovers the modules; no other package imports them.
"""
