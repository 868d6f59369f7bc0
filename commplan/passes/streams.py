"""What can be updated bucket by bucket: a map on shards whose gradient arrives in several buckets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from commplan.ir.leaf_match import weights_of
from commplan.ir.plan import Ref, name_of
from commplan.ir.schedule import Collective, LocalSum, Map, Op, Pack, Part, Scale, Unpack
from commplan.ir.schedule import operands as operands_of
from commplan.ir.schedule import results as results_of
from commplan.passes.rewrite import Editor

Makers = Mapping[Ref, tuple[int, Op]]  # the op that makes a value, and its place


class Refusal(NamedTuple):
    """Why a map that waits for several buckets is not cut into pieces."""

    why: str


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
    """How a result of a map is gathered: the packs, the all-gathers or one broadcast from each owner, and the
    unpack that ends them."""

    packs: tuple[Pack, ...]
    moves: tuple[Collective, ...]
    end: Unpack

    @property
    def ops(self) -> tuple[Op, ...]:
        return (*self.packs, *self.moves, self.end)

    @property
    def owners(self) -> tuple[Collective, ...]:
        """A broadcast from each owner, the first of its rows first; none where all ranks own."""
        return tuple({op.root: op for op in self.moves if op.kind == "broadcast"}.values())


def makers_of(ops: Sequence[Op]) -> Makers:
    return {ref: (place, op) for place, op in enumerate(ops) for ref in results_of(op)}


def stream(editor: Editor, makers: Makers, op: Map) -> Stream | Refusal | None:
    """How the gradient of `op` arrives; None where it is not cut, or comes in one bucket."""
    fn = editor.schedule.fn(op.fn)
    if not fn.elementwise or op.random or op.per_record or op.lane != "device":
        return None
    for ref in op.operands:
        chain = _chain(makers, ref)
        buckets = _buckets(makers, chain) if chain else ()
        if sum(scatters for _, _, scatters in buckets) < 2:
            continue
        owner = _owners(editor, op, ref)
        if isinstance(owner, Refusal):
            return owner
        return Stream(ref, chain, tuple((buffer, parts) for buffer, parts, _ in buckets), owner)
    return None


def _chain(makers: Makers, ref: Ref) -> tuple[Unpack | Scale, ...]:
    """The unpack and the scalings that make `ref`, in order; none where something else does."""
    chain: list[Unpack | Scale] = []
    _, op = makers.get(ref, (0, None))
    while isinstance(op, Scale):
        chain.append(op)
        _, op = makers.get(op.operand, (0, None))
    return (op, *reversed(chain)) if isinstance(op, Unpack) and op.ways == 1 else ()


def _buckets(makers: Makers, chain: Sequence[Unpack | Scale]) -> list[tuple[Ref, tuple[Part, ...], bool]]:
    """The reduced buffers that the unpack of `chain` reads, in the order in which they are made, each with
    its parts, and whether it was scattered; none where one is no reduction, or a leaf comes in two runs."""
    (end,) = (op for op in chain if isinstance(op, Unpack))
    found: dict[Ref, list[Part]] = {}
    for part in end.parts:
        found.setdefault(part.value, []).append(part)
    if not all(ref in makers and isinstance(makers[ref][1], Collective | LocalSum) for ref in found):
        return []
    made = sorted(found, key=lambda ref: makers[ref][0])
    if any(len({part.leaf for part in parts}) < len(parts) for parts in found.values()):
        return []
    kinds = {ref: op.kind if isinstance(op := makers[ref][1], Collective) else "reduce" for ref in made}
    if not set(kinds.values()) <= {"reduce_scatter", "reduce", "all_reduce"}:
        return []
    return [(ref, tuple(found[ref]), kinds[ref] != "all_reduce") for ref in made]


def _owners(editor: Editor, op: Map, gradient: Ref) -> dict[Ref, tuple[int | None, ...]] | Refusal:
    """For each tree of `op` the leaves of the gradient that its leaves go with."""
    like = editor.values[gradient]
    found: dict[Ref, tuple[int | None, ...]] = {}
    for ref in (*op.operands, *op.results):
        value = editor.values[ref]
        if value.kind == "array" and not value.leaves[0].shape:
            continue  # a scalar beside the trees: every piece takes it as it is
        if value.placement.split != like.placement.split or value.kind != like.kind:
            return Refusal(f"`{name_of(ref)}` is {value.placement}, and the gradient {like.placement}")
        leaves = value.whole or value.leaves  # rows of a few owners: cut alike, and no more is known
        own = weights_of(leaves, like.whole or like.leaves)
        strange = next(
            (leaf for leaf, one in zip(leaves, own, strict=True) if one is None and leaf.shape), None
        )
        if strange is not None:
            shape = f"{strange.dtype}{list(strange.shape)}"
            return Refusal(f"leaf `{strange.path}` of `{name_of(ref)}`, {shape}, goes with no gradient's")
        found[ref] = own
    return found


def gathered(ops: Sequence[Op], ref: Ref) -> Gathered | None:
    """How `ref` is gathered into one value; None where it is not, or into several."""
    packs = tuple(op for op in ops if isinstance(op, Pack) and {part.value for part in op.parts} == {ref})
    buffers = {op.result for op in packs}
    moves = tuple(
        op
        for op in ops
        if isinstance(op, Collective) and op.kind in ("all_gather", "broadcast") and op.operand in buffers
    )
    buffers |= {op.result for op in moves}
    ends = [op for op in ops if isinstance(op, Unpack) and not buffers.isdisjoint(operands_of(op))]
    if not moves or len(ends) != 1 or not set(operands_of(ends[0])) <= buffers:
        return None
    inside = {*packs, *moves, ends[0]}
    if any(not buffers.isdisjoint(operands_of(op)) and op not in inside for op in ops):
        return None
    return Gathered(packs, moves, ends[0])
