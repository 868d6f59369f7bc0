"""What can be updated bucket by bucket: a map on shards whose gradient arrives in several buckets."""

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
    """How the gradient of a map arrives.

    operand: the gradient. chain: the unpack of its buckets and the scalings after it. buckets: the buffers
    in the order in which they are reduced, each with its parts of leaves. owner: for every tree that the map
    takes or makes, the leaf of the gradient that each of its leaves goes with; None for a scalar of its own.
    """

    operand: Ref
    chain: tuple[Unpack | Scale, ...]
    buckets: tuple[tuple[Ref, tuple[Part, ...]], ...]
    owner: Mapping[Ref, tuple[int | None, ...]]

    @property
    def scales(self) -> tuple[Scale, ...]:
        return tuple(op for op in self.chain if isinstance(op, Scale))


class Gathered(NamedTuple):
    """How a result of a map is gathered: the packs and the all-gathers, or one broadcast from each owner, the
    first of these moves, and the unpack that ends them. owners: a broadcast from each, the first of its rows
    first; none where all ranks own."""

    ops: tuple[Op, ...]
    like: Collective
    end: Unpack

    @property
    def owners(self) -> tuple[Collective, ...]:
        moves = (op for op in self.ops if isinstance(op, Collective) and op.kind == "broadcast")
        return tuple({op.root: op for op in moves}.values())


def stream(editor: Editor, uses: DefUse[Op], op: Map) -> Stream | str | None:
    """How the gradient of `op` arrives; None where it is not cut, or comes in one bucket. In words, why a map
    that waits for several buckets is not cut into pieces."""
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
    """The unpack and the scalings that make `ref`, in order; none where something else does."""
    chain: list[Unpack | Scale] = []
    op = uses.maker(ref)
    while isinstance(op, Scale):
        chain.append(op)
        op = uses.maker(op.operand)
    return (op, *reversed(chain)) if isinstance(op, Unpack) and op.ways == 1 else ()


def _buckets(uses: DefUse[Op], chain: Sequence[Unpack | Scale]) -> list[tuple[Ref, tuple[Part, ...], bool]]:
    """The reduced buffers that the unpack of `chain` reads, in the order in which they are made, each with
    its parts, and whether it was scattered; none where one is no reduction, or a leaf comes in two runs."""
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
    """For each tree of `op` the leaves of the gradient that its leaves go with."""
    like = editor.values[gradient]
    owners: dict[Ref, tuple[int | None, ...]] = {}
    for ref in (*op.operands, *op.results):
        value = editor.values[ref]
        if value.kind == "array" and not value.leaves[0].shape:
            continue  # a scalar beside the trees: every piece takes it as it is
        if value.placement.split != like.placement.split or value.kind != like.kind:
            return f"`{name_of(ref)}` is {value.placement}, and the gradient {like.placement}"
        leaves = value.uncut  # rows of a few owners: cut alike, and no more is known
        own = weights_of(leaves, like.uncut)
        strange = next(
            (leaf for leaf, weight in zip(leaves, own, strict=True) if weight is None and leaf.shape), None
        )
        if strange is not None:
            shape = f"{strange.dtype}{list(strange.shape)}"
            return f"leaf `{strange.path}` of `{name_of(ref)}`, {shape}, goes with no gradient's"
        owners[ref] = own
    return owners


def gathered(uses: DefUse[Op], ref: Ref) -> Gathered | None:
    """How `ref` is gathered into one value; None where it is not, or into several."""
    readers = uses.readers(ref)
    packs = tuple(op for op in readers if isinstance(op, Pack) and {part.value for part in op.parts} == {ref})
    after = [op for pack in packs for op in uses.readers(pack.result)]
    moves = [op for op in after if isinstance(op, Collective) and op.kind in ("all_gather", "broadcast")]
    moves.sort(key=lambda op: uses.indices[op.result])
    buffers, inside = {op.result for op in (*packs, *moves)}, set(map(id, moves))
    ends = {id(op): op for buffer in buffers for op in uses.readers(buffer) if id(op) not in inside}
    end = next(iter(ends.values()), None)
    if not moves or len(ends) > 1 or not isinstance(end, Unpack) or not set(operands_of(end)) <= buffers:
        return None
    return Gathered((*packs, *moves, end), moves[0], end)
