"""The parameters of a collective over MPI, and the choice of its program and message size."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from commplan.collectives.layout import message
from commplan.collectives.program import IN_BLOCKS, ChunkProgram, Send
from commplan.collectives.program import Kind as ProgramKind
from commplan.diagnostics import fail
from commplan.ir.collective_kinds import PROPERTIES
from commplan.ir.plan import Algorithm
from commplan.ir.schedule import CollectiveKind, Form, ReduceOp, Spread
from commplan.lowering import programs
from commplan.lowering.mpi.job.groups import Groups

Kind = CollectiveKind | ProgramKind
KINDS = cast("tuple[Kind, ...]", tuple(PROPERTIES))  # begins in the order of the engine's enum `Collective`
NATIVE = Algorithm("native")  # MPI's own
WINDOW = 4  # messages in flight from one rank to another
MOST_COUNT = 2**31 - 1  # the largest block in bytes: MPI counts are 32-bit integers


@dataclass(frozen=True)
class Spec:
    """The parameters of one collective.

    Attributes:
        kind: A kind of `collectives.program.KINDS`, `all_to_all` (only as MPI's own), or `shift`.
        axes: The axes; None for all.
        op: The reduction; ignored by kinds that do not reduce.
        root: The root's index along `axes`, row-major; for a `shift`, the distance.
        algorithm: The algorithm; `native` is MPI's own.
        chunk: Bytes of a message; None for a default that depends on the size.
        levels: The levels of the topology that a single axis spans, innermost first, for `hierarchical`.
            Empty if there are several axes or no topology.
        form: See `commplan.ir.schedule.Form`. `Channel.start` ignores it.
        line: The line of the plan, for errors and message tags; 0 without a plan.
        file: The file of the plan, for errors; empty if unknown.
        opens: The phase that begins with this collective, for flight records; otherwise empty.
    """

    kind: Kind
    axes: tuple[str, ...] | None = None
    op: ReduceOp = "sum"
    root: int = 0
    algorithm: Algorithm = NATIVE
    chunk: int | None = None
    levels: tuple[Spread, ...] = ()
    form: Form = "call"
    line: int = 0
    file: str = ""
    opens: str = ""


@dataclass(frozen=True)
class ProgramChoice:
    """The program that runs a collective.

    Attributes:
        program: The program of the ranks along the axes.
        piece: The maximum number of bytes per message.
    """

    program: ChunkProgram
    piece: int


def choose_program(spec: Spec, groups: Groups, size: int, itemsize: int) -> ProgramChoice | None:
    """The program of a collective; None for MPI's own collective.

    MPI's own collectives cannot count blocks of 2 GiB or more. If a collective has such blocks, it is
    replaced by a ring, and a swap by a pairwise exchange.

    Args:
        spec: The collective. Its `axes` are not None.
        groups: The ranks.
        size: The number of elements of the whole buffer: of the result if operands are concatenated, else of
            the operand.
        itemsize: Bytes per element.

    Raises:
        CommplanError: CP0831 for blocks of 2 GiB or more in an all-to-all; and the errors of `program_of`.
    """
    nbytes, kind = size * itemsize, spec.kind
    axes = spec.axes or ()
    ways = groups.ways(axes)
    if kind == "shift":
        return ProgramChoice(_shift(ways, spec.root), message(nbytes, spec.chunk))
    if spec.algorithm.name == NATIVE.name or kind == "all_to_all":
        is_in_blocks = kind in IN_BLOCKS or kind == "all_to_all"  # others are passed to MPI in parts
        if not is_in_blocks or nbytes // ways <= MOST_COUNT:
            return None
        if kind == "all_to_all":
            problem = f"all_to_all of {nbytes} bytes is too large"
            fail("CP0831", problem, f"at most {MOST_COUNT} bytes can be sent to each rank")
        spec = replace(spec, algorithm=Algorithm("pairwise" if kind == "swap" else "ring"))
    levels = programs.hierarchy_of(spec.algorithm, axes, groups.sizes, dict.fromkeys(axes, spec.levels))
    levels = tuple(_without_native(level, kind) for level in levels)
    program = programs.program_named(spec.algorithm.name, kind, ways, spec.root, nbytes, spec.chunk, levels)
    return ProgramChoice(program, message(nbytes / program.chunks, spec.chunk))


def _without_native(level: programs.HierarchyLevel, kind: Kind) -> programs.HierarchyLevel:
    """Replace a native level by a program: only then do the phases of a hierarchy overlap.

    hierarchical(gpu, node = chain)  -->  hierarchical(gpu = ring, node = chain)
    """
    default = "binomial_tree" if kind in ("broadcast", "reduce") else "ring"
    return level._replace(algorithm=default) if level.algorithm == NATIVE.name else level


def _shift(ranks: int, distance: int) -> ChunkProgram:
    """One round in which each rank sends its buffer to the rank `distance` further, cyclically.

    It has no rounds if the distance is a multiple of `ranks`. Its kind is `all_reduce`, because every rank
    begins and ends with a whole buffer.
    """
    src = np.arange(ranks, dtype=np.int64)
    ones, rounds = np.ones_like(src), ()
    if distance % ranks:
        rounds = ((Send(src, (src + distance) % ranks, 0 * src, ones, False),),)
    return ChunkProgram("shift", "all_reduce", ranks, 1, rounds)
