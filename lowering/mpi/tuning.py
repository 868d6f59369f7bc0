"""What a collective over MPI is, and how it is cut for the engine: program, slices, size of messages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from commplan.collectives.layout import message
from commplan.collectives.program import IN_BLOCKS, ChunkProgram, Send
from commplan.diagnostics import fail
from commplan.ir.plan import Algorithm
from commplan.ir.schedule import Form, ReduceOp, Spread
from commplan.lowering import programs
from commplan.lowering.mpi.job.groups import Groups

Kind = Literal[
    "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "scatter", "gather",
    "shift", "swap",
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)  # in the order of the engine's enum; it has none of the last two
NATIVE = Algorithm("native")
WINDOW = 4  # messages between two ranks that are in flight one way
COUNTED = 2**31 - 1  # MPI counts what goes to each rank in 32 bits


@dataclass(frozen=True)
class Spec:
    """One collective.

    kind: one of `collectives.program.KINDS`, or `all_to_all` (MPI's own only). axes: over which; None: all.
    root: counted row-major over `axes`. algorithm: `native` is MPI's own. chunk: bytes of a message; None:
    what suits the size. levels: how a single axis is spread over the topology, innermost first, where the
    levels of `hierarchical` are those. form: see `commplan.ir.schedule.Form`; of `start` and `finish` it is
    `split` always. where: the plan's line, for errors. opens: the phase that begins with it, for the record.
    """

    kind: Kind
    axes: tuple[str, ...] | None = None
    op: ReduceOp = "sum"
    root: int = 0
    algorithm: Algorithm = NATIVE
    chunk: int | None = None
    levels: tuple[Spread, ...] = ()
    form: Form = "call"
    where: str = ""
    opens: str = ""


@dataclass(frozen=True)
class EngineChoice:
    """program: for the ranks along the axes. piece: bytes of a message."""

    program: ChunkProgram
    piece: int


def choice(spec: Spec, groups: Groups, size: int, itemsize: int) -> EngineChoice | None:
    """How `spec` is carried out for slots of `size` elements; None: MPI's own collective.

    Blocks of 2 GiB and more take a ring (of a swap pairwise exchange) in place of MPI's own. Raises what
    `lowering.programs.program_of` raises, and CP0831 for such blocks in an all-to-all.
    """
    nbytes, kind = size * itemsize, spec.kind
    if kind == "shift":
        return EngineChoice(_shift(groups.ways(spec.axes or ()), spec.root), message(nbytes, spec.chunk))
    if spec.algorithm.name == NATIVE.name or kind == "all_to_all":
        in_blocks = kind in IN_BLOCKS or kind == "all_to_all"  # all others are handed to MPI in parts
        if not in_blocks or nbytes // groups.ways(spec.axes or ()) <= COUNTED:
            return None
        if kind == "all_to_all":
            fail("CP0831", f"all_to_all of {nbytes} bytes", f"at most {COUNTED} bytes may go to each rank")
        spec = replace(spec, algorithm=Algorithm("pairwise" if kind == "swap" else "ring"))
    axes = spec.axes or ()
    own = programs.levels(spec.algorithm, axes, groups.sizes, dict.fromkeys(axes, spec.levels))
    own = tuple(_without_native(level, kind) for level in own)
    program = programs.program_named(
        spec.algorithm.name, kind, groups.ways(axes), spec.root, nbytes, spec.chunk, own
    )
    return EngineChoice(program, message(nbytes / program.chunks, spec.chunk))


def _without_native(level: programs.ProgramLevel, kind: Kind) -> programs.ProgramLevel:
    """A level with a program where it is left to the backend: only so do the phases of a hierarchy overlap.

    hierarchical(gpu, node = chain)  -->  hierarchical(gpu = ring, node = chain)
    """
    usual = "binomial_tree" if kind in ("broadcast", "reduce") else "ring"
    return level._replace(algorithm=usual) if level.algorithm == NATIVE.name else level


def _shift(ranks: int, distance: int) -> ChunkProgram:
    """One round in which each rank sends all it has to the one `distance` further, and takes what comes. Of
    its slots it is an all-reduce: every rank begins and ends with all of them."""
    src = np.arange(ranks, dtype=np.int64)
    ones, rounds = np.ones_like(src), ()
    if distance % ranks:
        rounds = ((Send(src, (src + distance) % ranks, 0 * src, ones, False),),)
    return ChunkProgram("shift", "all_reduce", ranks, 1, rounds)
