"""bucket: replaces collectives on trees by collectives on contiguous buffers of bounded size.

The pass groups collectives that may share buffers, and chooses the bound of each group. `passes.packing`
emits the ops.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, ClassVar

import msgspec
from msgspec.structs import replace

from commplan.ir.collective_kinds import BLOCKED
from commplan.ir.plan import Ref, name_of
from commplan.ir.remark import Choice
from commplan.ir.schedule import Backend, Collective, Phase, Schedule
from commplan.ir.schedule import operands as operands_of
from commplan.ir.schedule import results as results_of
from commplan.ir.types import sized
from commplan.passes.base import Pass, PassContext, StageChoice, key_of
from commplan.passes.bin_packing import WHOLE, LeafBucket, LeafSlice
from commplan.passes.bucket import size_model
from commplan.passes.bucket.size_model import Size
from commplan.passes.packing import Order, items_of, pack_collectives
from commplan.passes.rewrite import Editor


class BucketPass(Pass, frozen=True):
    """Packs leaves into contiguous buckets.

    Their order is the order in which the backward pass makes them, or the forward pass needs them.

    A leaf larger than the limit gets a separate bucket. It stays whole up to 4 times the limit, since its
    pieces would be ready together and could not overlap. A larger leaf is split into equal pieces of at most
    twice the limit.

    Attributes:
        max: Maximum bytes of a bucket for stages without `{ bucket = .. }`. None for the size with the least
            exposed time on the topology (`commplan.passes.search`). Without a topology it is then 25 MiB, or
            more under JAX for a large tree that is reduced (`commplan.passes.bucket.size_model`).
        coalesce: Whether adjacent collectives with equal properties share buckets.
        pinned: Whether to pack only stages with `{ bucket = .. }`. For leaves that are sharded over mesh axes
            that the plan does not name, since packing would gather them first.
        in_process: Whether to pack only stages with `{ bucket = .. }`, `{ overlap = update }` or `via`. For
            ranks that are threads of one process: packing saves no message there, and each part of a buffer
            must be compiled. Without effect if `pinned` is set.
    """

    name: ClassVar[str] = "bucket"
    after: ClassVar[tuple[str, ...]] = ("share", "place")
    max: Annotated[int, msgspec.Meta(gt=0)] | None = None
    coalesce: bool = True
    pinned: bool = False
    in_process: bool = False

    @property
    def packs_by_default(self) -> bool:
        """Whether the pass packs leaves of stages without options for buffers."""
        return not (self.pinned or self.in_process)

    def phases(self, schedule: Schedule, context: PassContext, choices: list[Choice]) -> Iterable[Phase]:
        return [self._phase(schedule, phase, context, choices) for phase in schedule.phases]

    def _phase(self, schedule: Schedule, phase: Phase, context: PassContext, choices: list[Choice]) -> Phase:
        """Pack the groups of collectives of a phase."""
        order = context.order
        editor = Editor(schedule, phase)
        groups = _groups(editor, phase, context, coalesce=self.coalesce)
        if self.pinned:
            groups = [group for group in groups if group[0].hints.bucket is not None]
        elif self.in_process:
            choices += [_choice_not_packed(group) for group in groups if not _asks_for_buffers(group[0])]
            groups = [group for group in groups if _asks_for_buffers(group[0])]
        if not groups:
            return phase
        group_by_last_result = {group[-1].result: group for group in groups}
        packed_results = {op.result for group in groups for op in group}
        for op in phase.ops:
            if not isinstance(op, Collective) or op.result not in packed_results:
                editor.ops.append(op)
            elif op.result in group_by_last_result:
                group = group_by_last_result[op.result]
                items = items_of(editor, group, order)
                is_update = group[0].hints.overlap == "update" and group[0].hints.bucket is None
                # Split in halves only if the leaf sizes allow it.
                if is_update and self.max is None and not size_model.in_halves(items):
                    group = [replace(op, hints=replace(op.hints, overlap=None)) for op in group]
                size = self._size(schedule.backend, group, items, context.chosen(phase, group[0]))
                buckets = pack_collectives(editor, group, items, size.limit)
                choices.append(_choice(group, buckets, size, order))
        return editor.finish(editor.ops)

    def _size(
        self, backend: Backend, group: Sequence[Collective], items: Sequence[LeafSlice], chosen: StageChoice
    ) -> Size:
        """Return the limit of the stage, of the pass, of the search, or the default, in this order."""
        if group[0].hints.bucket is not None:
            return Size(group[0].hints.bucket, f"the stage's limit is {sized(group[0].hints.bucket)}")
        if self.max is not None:
            return Size(self.max, f"the limit of the pass is {sized(self.max)}")
        if chosen.bucket is not None and group[0].hints.overlap != "update":
            return Size(chosen.bucket, f"buckets of up to {sized(chosen.bucket)}, chosen with the algorithm")
        return size_model.size(backend, group[0], sum(op.nbytes for op in group), items)


def _groups(editor: Editor, phase: Phase, context: PassContext, *, coalesce: bool) -> list[list[Collective]]:
    """Group adjacent collectives that may share buffers.

    They agree in kind, axes, op, root, algorithm, hints, divisor and placement, and for blocked kinds in
    whether the operand is an array or a tree. They have no other collective between them, do not depend on
    each other, and are of one stage or of stages that the search did not set apart. Collectives on flat
    buffers are in no group.
    """
    groups: list[list[Collective]] = []
    tainted: set[Ref] = set()  # values that depend on the results of the current group
    current: tuple[object, ...] | None = None
    for op in phase.ops:
        depends = any(ref in tainted for ref in (*operands_of(op), *op.after))
        if not isinstance(op, Collective):
            if depends:
                tainted.update(results_of(op))
            continue
        if editor.values[op.operand].kind == "flat":
            current = None
            continue
        key = (*_key(editor, op), key_of(phase, op) if context.chosen(phase, op).separate else None)
        if coalesce and key == current and not depends:
            groups[-1].append(op)
        else:
            groups.append([op])
            tainted = set()
        tainted.add(op.result)
        current = key
    return groups


def _key(editor: Editor, op: Collective) -> tuple[object, ...]:
    """The properties that are equal for collectives that share buffers."""
    places = (editor.values[op.operand].placement, editor.values[op.result].placement)
    # Arrays and trees are split differently, so they do not share a scatter or gather.
    cut_as = editor.values[op.operand].kind if op.kind in BLOCKED else ""
    return (op.kind, op.axes, op.op, op.root, op.algorithm, op.hints, op.divisor, *places, cut_as)


def _asks_for_buffers(op: Collective) -> bool:
    """Whether the stage has `{ bucket = .. }`, `{ overlap = update }` or `via` (`op.pinned`)."""
    return op.hints.bucket is not None or op.hints.overlap == "update" or op.pinned


def _choice_not_packed(group: Sequence[Collective]) -> Choice:
    """The remark on a group that stays unpacked because its ranks share one process."""
    names = ", ".join(f"`{name_of(op.operand)}`" for op in group)
    text = f"{names}: each leaf separately, {sized(sum(op.nbytes for op in group))}"
    why = "the ranks share the memory of one process: packing would copy, and save no message"
    return Choice("bucket", text, why, group[0].span, ("in buckets, with `{ bucket = .. }`",))


def _choice(group: Sequence[Collective], buckets: Sequence[LeafBucket], size: Size, order: Order) -> Choice:
    """The remark on the buckets of a group of collectives."""
    names = ", ".join(f"`{name_of(op.operand)}`" for op in group)
    sent = [bucket for bucket in buckets if bucket.leaf_collective is not None]
    sizes = [bucket.nbytes for bucket in sent]
    text = f"{names}: {len(sent)} bucket{'s' * (len(sent) != 1)}, {sized(sum(sizes))}"
    if sizes:
        text += f", largest {sized(max(sizes))}"
    why, limit = f"{size.why}; one dtype a bucket; ", size.limit
    if group[0].op is None:
        why += "first leaf first, as the forward pass needs them"
    elif any(name_of(op.operand) in order for op in group):
        why += "in the specified order of the backward pass"
    else:
        why += "last leaf first, as a backward pass makes them"
    pieces = sum(bucket.is_piece for bucket in sent)
    large = sum(bucket.nbytes > limit and not bucket.is_piece for bucket in sent)
    if large:
        single = large == 1
        why += f"; {large} {'leaf' if single else 'leaves'} larger than {sized(limit)} "
        why += f"{'has a separate bucket' if single else 'have separate buckets'}, whole: "
        why += f"{'its' if single else 'their'} pieces would be ready together, so none could overlap"
    if pieces:
        why += f"; {pieces} buckets are equal pieces of leaves larger than {sized(WHOLE * limit)}"
    return Choice("bucket", text, why, group[0].span)
