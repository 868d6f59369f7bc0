"""Which algorithm to take where nobody knows the machine: by size alone.

Under JAX it is the backend's own, always. Under MPI the table below: what `commplan calibrate` measured on
four hosts that are joined by one switch of 200 Mbit/s, under Open MPI 5. Up to the sizes where it is taken,
`native` is as fast as any program; beyond, rings are the fastest. In between, programs of fewer rounds were
about as good, and are taken because there may be more hosts.
"""

from __future__ import annotations

from typing import NamedTuple

from commplan.ir.schedule import Backend, CollectiveKind

KIB, MIB = 1024, 1024**2


class Rule(NamedTuple):
    """Up to so many bytes of the whole (None: any number) this algorithm, in messages of `chunk` bytes; None
    leaves their size to the engine."""

    upto: int | None
    algorithm: str
    chunk: int | None = None


NATIVE = (Rule(None, "native"),)
MPI: dict[CollectiveKind, tuple[Rule, ...]] = {
    "all_reduce": (Rule(16 * KIB, "native"), Rule(256 * KIB, "halving_doubling"), Rule(None, "ring")),
    "reduce_scatter": (Rule(16 * KIB, "native"), Rule(None, "ring")),
    "all_gather": (Rule(16 * KIB, "native"), Rule(None, "ring")),
    "broadcast": (Rule(4 * KIB, "native"), Rule(64 * KIB, "double_tree"), Rule(None, "ring")),
    "reduce": (Rule(4 * KIB, "native"), Rule(64 * KIB, "double_tree"), Rule(None, "ring")),
}


def rule(backend: Backend, kind: CollectiveKind, whole: int) -> Rule:
    """What is taken for `whole` bytes, the size of the buffer that all ranks together make."""
    rows = MPI.get(kind, NATIVE) if backend == "mpi" else NATIVE
    return next(row for row in rows if row.upto is None or whole <= row.upto)
