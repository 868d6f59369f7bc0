"""Matches updates that can run bucket by bucket: maps on shards whose gradient arrives in several buckets.

`fuse_update` splits the maps for which `stream` finds a match, and the gathers of their results (`gathered`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from commplan.ir.analysis.def_use import DefUse
from commplan.ir.analysis.optimizer_leaf_match import weights_of
from commplan.ir.grouping import grouped
from commplan.ir.plan import Ref, name_of
from commplan.ir.schedule import Collective, LocalSum, Map, Op, Pack, Part, Scale, Unpack
from commplan.ir.schedule import operands as operands_of
from commplan.passes.rewrite import Editor


class Stream(NamedTuple):
    """The buckets that contain the gradient of a map.

    Attributes:
        operand: The gradient, an operand of the map.
        chain: The unpack of its buckets, then the scalings of the unpacked value in order.
        buckets: The buffers in the order of reduction, each with its parts of leaves of the gradient.
        owner: For every operand or result of the map except single scalars: the index of the gradient leaf
            that corresponds to each of its leaves, or None for a scalar leaf without one.
    """

    operand: Ref
    chain: tuple[Unpack | Scale, ...]
    buckets: tuple[tuple[Ref, tuple[Part, ...]], ...]
    owner: Mapping[Ref, tuple[int | None, ...]]

    @property
    def unpack(self) -> Unpack:
        """The first op of `chain`."""
        return next(op for op in self.chain if isinstance(op, Unpack))

    @property
    def scales(self) -> tuple[Scale, ...]:
        """The other ops of `chain`."""
        return tuple(op for op in self.chain if isinstance(op, Scale))


class Gathered(NamedTuple):
    """The ops that gather a result of a map.

    Attributes:
        ops: The packs, the collectives in order, and the unpack.
        like: The first collective.
        end: The unpack.
    """

    ops: tuple[Op, ...]
    like: Collective
    end: Unpack

    @property
    def owners(self) -> tuple[Collective, ...]:
        """One broadcast of each owner, in the order of rows; empty if all ranks are owners."""
        moves = (op for op in self.ops if isinstance(op, Collective) and op.kind == "broadcast")
        return tuple({op.root: op for op in moves}.values())


def stream(editor: Editor, uses: DefUse[Op], op: Map) -> Stream | str | None:
    """Match the gradient of `op`, one of its operands.

    Args:
        editor: The phase.
        uses: The definitions and uses of its ops.
        op: The map.

    Returns:
        The match. None if `op` is not an elementwise map on the device, or no operand arrives in several
        buckets of shards. The reason as text if an operand does, but the map cannot be split.
    """
    fn = editor.schedule.fn(op.fn)
    if not fn.elementwise or op.random or op.per_record or op.lane != "device":
        return None
    for ref in op.operands:
        chain = _chain(uses, ref)
        buckets = _buckets(uses, chain) if chain else ()
        if sum(scatters for _, _, scatters in buckets) < 2:
            continue
        owner = _owners(editor, op, ref)
        if isinstance(owner, str):
            return owner
        return Stream(ref, chain, tuple((buffer, parts) for buffer, parts, _ in buckets), owner)
    return None


def _chain(uses: DefUse[Op], ref: Ref) -> tuple[Unpack | Scale, ...]:
    """The unpack and the scalings that define `ref`, in order; empty if another op defines it."""
    chain: list[Unpack | Scale] = []
    op = uses.maker(ref)
    while isinstance(op, Scale):
        chain.append(op)
        op = uses.maker(op.operand)
    return (op, *reversed(chain)) if isinstance(op, Unpack) and op.ways == 1 else ()


def _buckets(uses: DefUse[Op], chain: Sequence[Unpack | Scale]) -> list[tuple[Ref, tuple[Part, ...], bool]]:
    """The reduced buffers read by `chain`, in order, with their parts and whether they are scattered.

    Empty if a buffer is not reduced or if a leaf has two runs in one buffer.
    """
    (end,) = (op for op in chain if isinstance(op, Unpack))
    parts_of = grouped(end.parts, lambda part: part.value)
    if not all(isinstance(uses.maker(ref), Collective | LocalSum) for ref in parts_of):
        return []
    order = sorted(parts_of, key=lambda ref: uses.indices[ref])
    if any(len({part.leaf for part in parts}) < len(parts) for parts in parts_of.values()):
        return []
    kinds = {ref: op.kind if isinstance(op := uses.maker(ref), Collective) else "reduce" for ref in order}
    if not set(kinds.values()) <= {"reduce_scatter", "reduce", "all_reduce"}:
        return []
    return [(ref, tuple(parts_of[ref]), kinds[ref] != "all_reduce") for ref in order]


def _owners(editor: Editor, op: Map, gradient: Ref) -> dict[Ref, tuple[int | None, ...]] | str:
    """`Stream.owner` for the map `op`, or the reason as text why a leaf matches no leaf of the gradient."""
    like = editor.values[gradient]
    owners: dict[Ref, tuple[int | None, ...]] = {}
    for ref in (*op.operands, *op.results):
        value = editor.values[ref]
        if value.kind == "array" and not value.leaves[0].shape:
            continue  # every piece uses a scalar operand unchanged
        if value.placement.split != like.placement.split or value.kind != like.kind:
            return f"`{name_of(ref)}` is {value.placement}, and the gradient {like.placement}"
        leaves = value.uncut  # the rows of a few owners are split in the same way
        gradient_leaves = weights_of(leaves, like.uncut)
        unmatched = next(
            (
                leaf
                for leaf, weight in zip(leaves, gradient_leaves, strict=True)
                if weight is None and leaf.shape
            ),
            None,
        )
        if unmatched is not None:
            shape = f"{unmatched.dtype}{list(unmatched.shape)}"
            return f"leaf `{unmatched.path}` of `{name_of(ref)}`, {shape}, matches no gradient"
        owners[ref] = gradient_leaves
    return owners


def gathered(uses: DefUse[Op], ref: Ref) -> Gathered | None:
    """Match the ops that gather `ref` into one value.

    None if there are none, or if other ops read the packed or gathered buffers, too.
    """
    readers = uses.readers(ref)
    packs = tuple(op for op in readers if isinstance(op, Pack) and {part.value for part in op.parts} == {ref})
    after = [op for pack in packs for op in uses.readers(pack.result)]
    moves = [op for op in after if isinstance(op, Collective) and op.kind in ("all_gather", "broadcast")]
    moves.sort(key=lambda op: uses.indices[op.result])
    buffers = {op.result for op in (*packs, *moves)}
    inside = set(map(id, moves))
    ends = {id(op): op for buffer in buffers for op in uses.readers(buffer) if id(op) not in inside}
    end = next(iter(ends.values()), None)
    if not moves or len(ends) > 1 or not isinstance(end, Unpack) or not set(operands_of(end)) <= buffers:
        return None
    return Gathered((*packs, *moves, end), moves[0], end)
