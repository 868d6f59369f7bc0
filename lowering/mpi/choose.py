"""How a collective is cut for the engine: program, slices, size and number of messages."""

from __future__ import annotations

import dataclasses

import msgspec

from commplan.collectives.layout import message
from commplan.collectives.program import BLOCKED, Program
from commplan.diagnostics import Span, fail
from commplan.ir.plan import Algorithm, Arg, Hints
from commplan.ir.schedule import Collective
from commplan.ir.types import DType
from commplan.lowering import programs
from commplan.lowering.mpi.groups import Groups
from commplan.lowering.mpi.spec import Kind, Spec

WINDOW = 4
COUNTED = 2**31 - 1  # MPI counts what goes to each rank in 32 bits
_NOWHERE = Span(1, 1, 1, 1)


@dataclasses.dataclass(frozen=True)
class Choice:
    """program: for the ranks along the axes. piece: bytes of a message. window: messages between two ranks
    that are in flight one way."""

    program: Program
    piece: int
    window: int


def choice(spec: Spec, groups: Groups, size: int, itemsize: int) -> Choice | None:
    """How `spec` is carried out for slots of `size` elements; None: MPI's own collective.

    Blocks of 2 GiB and more take a ring in place of MPI's own. Raises what `lowering.programs.program_of`
    raises, and CP0831 for such blocks in an all-to-all.
    """
    nbytes = size * itemsize
    if spec.algorithm.name == programs.NATIVE or spec.kind == "all_to_all":
        blocked = spec.kind in BLOCKED or spec.kind == "all_to_all"  # all others are handed to MPI in parts
        if not blocked or nbytes // groups.ways(spec.axes or ()) <= COUNTED:
            return None
        if spec.kind == "all_to_all":
            fail("CP0831", f"all_to_all of {nbytes} bytes", f"at most {COUNTED} bytes may go to each rank")
        spec = dataclasses.replace(spec, algorithm=Algorithm("ring"))
    program = _program(spec, groups, nbytes)
    return Choice(program, message(nbytes / program.chunks, spec.chunk), WINDOW)


def _program(spec: Spec, groups: Groups, nbytes: int) -> Program:
    axes = spec.axes or ()
    kind = spec.kind
    if kind in ("scatter", "gather"):  # no stage of a plan, so no collective of a schedule
        return programs.program_named(
            spec.algorithm.name, kind, groups.ways(axes), spec.root, nbytes, spec.chunk
        )
    op = Collective(
        kind=kind,
        result="y.0",
        operand="x.0",
        axes=axes,
        dtype=DType.F32,
        nbytes=nbytes,
        span=_NOWHERE,
        root=spec.root,
        algorithm=_without_native(spec.algorithm, kind),
        hints=Hints(chunk=spec.chunk),
    )
    spread = {axes[0]: spec.levels} if len(axes) == 1 else {}
    program = programs.program_of(op, groups.sizes, spread, nbytes)
    assert program is not None  # no level is native
    return program


def _without_native(algorithm: Algorithm, kind: Kind) -> Algorithm:
    """`hierarchical` with programs where it leaves levels to the backend: only so do its phases overlap.

    hierarchical(gpu, node = chain)  -->  hierarchical(gpu = ring, node = chain)
    """
    usual = "binomial_tree" if kind in ("broadcast", "reduce") else "ring"
    levels = ((level, how.name) for level, how in algorithm.levels)
    args = tuple(Arg(usual if how == programs.NATIVE else how, level) for level, how in levels)
    return msgspec.structs.replace(algorithm, args=args) if args else algorithm
