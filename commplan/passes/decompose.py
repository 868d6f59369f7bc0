"""decompose: chooses between flat and hierarchical algorithms, and lowers hierarchies level by level.

A hierarchy becomes one collective for each level, unless it is one operation of the backend.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import ClassVar

from msgspec.structs import replace

from commplan.collectives.program import KINDS
from commplan.ir.axes import coordinates
from commplan.ir.collective_kinds import BLOCKED, NATIVE_KINDS, REDUCING
from commplan.ir.plan import Algorithm, Arg, Ref
from commplan.ir.remark import Alternative, Choice
from commplan.ir.schedule import Collective, CollectiveKind, Op, Phase, Schedule, network_lane
from commplan.passes.base import Pass, PassContext
from commplan.passes.packing import rewrite_flat
from commplan.passes.rewrite import Editor, padded, round_up, trimmed
from commplan.select.algorithm_search import Candidate, Chooser, is_worthwhile, rounded, tie_break
from commplan.select.options import has_wire_options, is_one_operation

Levels = tuple[tuple[str, Algorithm], ...]  # axis and algorithm, innermost first


class DecomposePass(Pass, frozen=True):
    """Decides between flat and hierarchical, and carries hierarchies out level by level."""

    name: ClassVar[str] = "decompose"
    after: ClassVar[tuple[str, ...]] = ("share", "place", "bucket", "fuse_update")

    def phases(self, schedule: Schedule, context: PassContext, choices: list[Choice]) -> Iterable[Phase]:
        chooser = Chooser(
            schedule, context.costs, context.topology, context.candidates, explains=context.explains
        )

        def is_flat(op: Collective) -> bool:
            return bool(op.algorithm.levels) and not _stays(op, schedule)

        for phase in schedule.phases:
            layers = _choose_hierarchies(chooser, _apply_choices(phase, context), choices)
            yield rewrite_flat(schedule, layers, context.order, is_flat, _expand, choices)


def _apply_choices(phase: Phase, context: PassContext) -> Phase:
    """Set the algorithms and message sizes that the search chose for stages.

    all_reduce(node, gpu)  -->  all_reduce(node, gpu) via hierarchical(gpu, node), in messages of 64 KiB
    """
    if not context.choices:
        return phase

    def chosen_options(op: Op) -> Op:
        """`op` with the choice for its stage, unless the plan specifies the options."""
        if not isinstance(op, Collective):
            return op
        chosen = context.chosen(phase, op)
        if chosen.chunk is not None and op.hints.chunk is None:
            op = replace(op, hints=replace(op.hints, chunk=chosen.chunk))
        if chosen.algorithm is None or op.pinned or op.algorithm.levels:
            return op
        return replace(op, algorithm=chosen.algorithm, pinned=not chosen.algorithm.levels)

    return replace(phase, ops=tuple(map(chosen_options, phase.ops)))


def _choose_hierarchies(chooser: Chooser, phase: Phase, choices: list[Choice]) -> Phase:
    """Use hierarchies if they are predicted to be faster.

        all_reduce(node, gpu)  -->  all_reduce(node, gpu) via hierarchical(gpu, node)

    The algorithm of each level stays open for `select`, if the backend has a native one. Equal collectives
    share a decision. Without a topology nothing changes.
    """
    if chooser.costs is None:
        return phase
    algorithms: dict[tuple[object, ...], Algorithm] = {}
    ops: list[Op] = []
    for op in phase.ops:
        if not isinstance(op, Collective) or op.pinned or op.algorithm.levels or op.kind not in KINDS:
            ops.append(op)
            continue
        key = (op.kind, op.axes, op.nbytes, op.op, op.hints, op.root, op.stages)
        if key not in algorithms:
            algorithms[key] = _best(chooser, op, choices)
        ops.append(replace(op, algorithm=algorithms[key]))
    return replace(phase, ops=tuple(ops))


def _best(chooser: Chooser, op: Collective, choices: list[Choice]) -> Algorithm:
    """The best hierarchy if it is worthwhile compared to the best flat algorithm, else the algorithm of `op`.

    Appends the decision for a hierarchy to `choices`.
    """
    flat_candidates, hierarchies = chooser.flat(op), chooser.hierarchies(op)
    if not flat_candidates or not hierarchies:
        return op.algorithm
    single, layered = tie_break(flat_candidates), tie_break(hierarchies)
    keys = tuple(Arg(key) for key, _ in layered.algorithm.levels)
    left_open = Algorithm("hierarchical", keys)
    # Backends have no native level of a rooted sum, so its algorithms are chosen here.
    written = left_open if op.kind in NATIVE_KINDS else layered.algorithm
    if has_wire_options(op) and any(arg.value not in op.axes for arg in keys):
        return op.algorithm  # collectives with a narrow wire dtype run axis by axis
    if has_wire_options(op) and op.kind == "all_reduce" and op.op == "sum":
        levels = [(key,) for key, _ in layered.algorithm.levels]
        flat_seconds = chooser.in_wire(op, [op.axes])
        layered_seconds = chooser.in_wire(op, levels)
        if flat_seconds is None or layered_seconds is None:
            return op.algorithm
        single = single._replace(seconds=flat_seconds)
        layered = layered._replace(seconds=layered_seconds)
    if not is_worthwhile(layered, single):
        return op.algorithm  # `select` lists the rejected alternatives
    choices.append(_chosen(op, single, layered, written))
    return written


def _chosen(op: Collective, single: Candidate, layered: Candidate, written: Algorithm) -> Choice:
    """The record of the decision for `layered`, which the schedule has as `written`, against `single`."""
    levels = ", ".join(key for key, _ in written.levels)
    text = f"`{op.result}`: level by level ({levels})"
    why = "each level moves only the data that the inner level did not reduce"
    name = f"one {op.kind} over {', '.join(op.axes)}, via {single.algorithm}"
    alternative = Alternative(name, rounded(single.seconds))
    return Choice(
        "decompose", text, why, op.span, (), rounded(layered.seconds), single.source, (alternative,)
    )


def _stays(op: Collective, schedule: Schedule) -> bool:
    """Whether a hierarchy stays one op.

    If not, it is expanded: to one op per level, or for a single level to an op with the level's algorithm.
    """
    scattered = op.kind in BLOCKED
    if op.kind == "reduce" or (len(op.axes) > 1 and scattered and not _by_axis(op)):
        return True  # separate levels would leave noncontiguous pieces
    return len(op.algorithm.levels) > 1 and is_one_operation(op.kind, op.algorithm, schedule.backend, op)


def _expand(editor: Editor, op: Collective, padding_allowed: bool, choices: list[Choice]) -> None:
    """Emit the replacement of `op`, and append the decision if the plan specifies the hierarchy.

    Args:
        editor: Receives the ops.
        op: A collective with a hierarchical algorithm, on a flat buffer.
        padding_allowed: Whether readers tolerate padding after the result.
        choices: Receives the decision.
    """
    steps = op.algorithm.levels
    if len(steps) == 1:
        is_named = op.algorithm.args[0].key is not None
        editor.ops.append(replace(op, algorithm=steps[0][1], pinned=is_named))
        return
    sums = op.op == "sum" and not _by_axis(op)
    text = _sum(editor, op, steps, padding_allowed) if sums else _one_by_one(editor, op)
    if op.pinned:
        why = f"the plan has `via {op.algorithm}`"
        choices.append(Choice("decompose", f"`{op.result}`: {text}", why, op.span))


def _sum(editor: Editor, op: Collective, steps: Levels, padding_allowed: bool) -> str:
    """Reduce level by level, and return a description.

        all_reduce(gpu, node)  -->  reduce_scatter(gpu); all_reduce(node); all_gather(gpu)

    The buffer is padded to whole shards. Outer levels move only a shard.
    """
    inner, (outer, outermost) = steps[:-1], steps[-1]
    # The pass `wire` divides the buffer of the outermost all-reduce among its ranks, too.
    multiple = math.prod(editor.size((axis,)) for axis, _ in (steps if has_wire_options(op) else inner))
    size = round_up(editor.leaf(op.operand).size, multiple)
    is_padded = size != editor.leaf(op.operand).size
    current = padded(editor, op.operand, size)
    divisors = _divisors(editor, op, steps)
    for axis, algorithm in inner:
        current = _step(editor, op, current, axis, algorithm, "reduce_scatter", divisor=divisors[axis])
    current = _step(editor, op, current, outer, outermost, "all_reduce", divisor=divisors[outer])
    for index in range(len(inner) - 1, -1, -1):
        direct = index == 0 and (padding_allowed or not is_padded)
        current = _step(editor, op, current, *inner[index], "all_gather", last=direct)
    if current != op.result:
        trimmed(editor, current, op)
    return ", ".join(
        [f"reduce_scatter {axis}" for axis, _ in inner]
        + [f"all_reduce {outer}"]
        + [f"all_gather {axis}" for axis, _ in inner[::-1]]
    )


def _divisors(editor: Editor, op: Collective, steps: Levels) -> dict[str, int]:
    """By axis: the divisor of a mean at this level; 1 for no division.

    If wire options change the dtype, each level divides by its number of ranks. Otherwise, the outermost
    level divides its sum. In f16, where sums overflow, the first level divides its terms.
    """
    axes = [axis for axis, _ in steps]
    if op.divisor == 1:
        return dict.fromkeys(axes, 1)
    dtype = editor.leaf(op.operand).dtype
    first = op.hints.divides_first(dtype)
    if op.hints.changes(dtype) and not first:
        return {axis: editor.size((axis,)) for axis in axes}
    return dict.fromkeys(axes, 1) | {axes[0] if first else axes[-1]: op.divisor}


def _by_axis(op: Collective) -> bool:
    """Whether `op` scatters or gathers with its axes as levels, in order and innermost first.

    Each level then leaves a contiguous run of the buffer.
    """
    keys = tuple(key for key, _ in op.algorithm.levels)
    return op.kind in BLOCKED and keys == op.axes


def _one_by_one(editor: Editor, op: Collective) -> str:
    """Run one collective for each axis, and return a description.

        all_reduce max(gpu, node)  -->  all_reduce max(gpu); all_reduce max(node)
        reduce_scatter(gpu, node)  -->  reduce_scatter(gpu); reduce_scatter(node)
        all_gather(gpu, node)      -->  all_gather(node); all_gather(gpu)
        broadcast(gpu, node) from r  -->  broadcast(node) from r's node; broadcast(gpu) from r's place

    No backend has a reduce-scatter of a maximum, so every level moves all bytes. Outer levels of a scatter or
    gather move a part. A broadcast starts at the outermost level, after which every inner group has a root.
    """
    steps = op.algorithm.levels[:: -1 if op.kind in ("all_gather", "broadcast") else 1]
    sizes = editor.schedule.mesh_sizes
    roots = coordinates(op.root or 0, op.axes, sizes) if op.kind == "broadcast" else dict[str, int]()
    divisors = _divisors(editor, op, steps)
    current = op.operand
    for index, (axis, algorithm) in enumerate(steps):
        last = index == len(steps) - 1
        root = roots.get(axis)
        divisor = divisors[axis]
        current = _step(editor, op, current, axis, algorithm, op.kind, last=last, root=root, divisor=divisor)
    return ", ".join(
        f"{op.kind} {axis}" + (f" from {roots[axis]}" if axis in roots else "") for axis, _ in steps
    )


def _step(
    editor: Editor,
    op: Collective,
    operand: Ref,
    axis: str,
    algorithm: Algorithm,
    kind: CollectiveKind,
    *,
    last: bool = False,
    root: int | None = None,
    divisor: int = 1,
) -> Ref:
    """Emit the collective of one level of `op`.

    Args:
        editor: Receives the op.
        op: The hierarchical collective.
        operand: The buffer that the previous level has left.
        axis: The axis of the level.
        algorithm: The algorithm of the level.
        kind: The kind of the level's collective.
        last: Whether it defines the result of `op`.
        root: The root along `axis`; None for kinds without a root.
        divisor: The divisor of the level's sum.

    Returns:
        The result.
    """
    return editor.move(
        op, operand, None if last else f"{op.result}/{kind}_{axis}", kind=kind, axes=(axis,), root=root,
        op=op.op if kind in REDUCING else None, algorithm=algorithm, form=None,
        lane=network_lane(editor.schedule.axes, (axis,)), divisor=divisor,
        pinned=any(arg.key == axis for arg in op.algorithm.args),
    )  # fmt: skip
