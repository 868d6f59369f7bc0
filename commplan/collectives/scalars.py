"""Scalars beside leaves that are scattered: they are not cut, but reduced whole."""

from __future__ import annotations

from commplan.collectives import registry
from commplan.ir.plan import Algorithm


def scalar_algorithm(algorithm: Algorithm) -> Algorithm:
    """What reduces the scalars beside leaves that `algorithm` scatters: it too, where it carries out an
    all-reduce; else the backend's own.

    >>> str(scalar_algorithm(Algorithm("ring"))), str(scalar_algorithm(Algorithm("bruck")))
    ('ring', 'native')
    """
    names = {how.name for _, how in algorithm.levels} or {algorithm.name}
    able = all(name == "native" or registry.supports(name, "all_reduce") for name in names)
    return algorithm if able else Algorithm("native")
