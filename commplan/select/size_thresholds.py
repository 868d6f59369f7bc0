"""Selects an algorithm without a topology, by size alone.

Under JAX it is always the backend's own. Under MPI it is the table below, measured with `commplan calibrate`
on four hosts connected by a switch with 200 Mbit/s, under Open MPI 5. Up to the sizes at which it is
selected, `native` is as fast as any program; for large sizes rings are the fastest. In between, programs with
fewer rounds were about as fast, and are selected because there may be more hosts.
"""

from __future__ import annotations

from typing import NamedTuple

from commplan.ir.schedule import Backend, CollectiveKind

KIB = 1024  # bytes


class Rule(NamedTuple):
    """Selects an algorithm for buffers up to a size.

    Attributes:
        upto: The largest size of the whole buffer in bytes, inclusive; None for any size.
        algorithm: The name of the algorithm.
        chunk: Bytes of a message; None if the engine selects the size.
    """

    upto: int | None
    algorithm: str
    chunk: int | None = None


# The rules of a kind, by ascending size; the first one that fits is used.
NATIVE = (Rule(None, "native"),)
MPI: dict[CollectiveKind, tuple[Rule, ...]] = {
    "all_reduce": (Rule(16 * KIB, "native"), Rule(256 * KIB, "halving_doubling"), Rule(None, "ring")),
    "reduce_scatter": (Rule(16 * KIB, "native"), Rule(None, "ring")),
    "all_gather": (Rule(16 * KIB, "native"), Rule(None, "ring")),
    "broadcast": (Rule(4 * KIB, "native"), Rule(64 * KIB, "double_tree"), Rule(None, "ring")),
    "reduce": (Rule(4 * KIB, "native"), Rule(64 * KIB, "double_tree"), Rule(None, "ring")),
}


def rule(backend: Backend, kind: CollectiveKind, whole: int) -> Rule:
    """The rule for a collective whose whole buffer has `whole` bytes."""
    rows = MPI.get(kind, NATIVE) if backend == "mpi" else NATIVE
    return next(row for row in rows if row.upto is None or whole <= row.upto)
