"""The op `collective`: one collective over axes, such as an all-reduce."""

from collections.abc import Mapping
from typing import Literal

import msgspec

from commplan.diagnostics import Span, with_article
from commplan.ir.collective_kinds import REDUCING, TOWARDS_SOME
from commplan.ir.hints import NO_HINTS, Algorithm, Hints
from commplan.ir.ops.base import BaseOp, Ranks, Work
from commplan.ir.refs import Ref
from commplan.ir.roles import Cost, Execution, Meaning, Presentation, Structure
from commplan.ir.shard_shapes import cut_all
from commplan.ir.stages import rules
from commplan.ir.symbolic.deferred import Interpretation, SymbolicValue, moves, steps, values
from commplan.ir.transfer import Results, ValueTypes, Violations, broken, value_like
from commplan.ir.types import DType, Over
from commplan.ir.values import Value

# The kind of collective; see `Collective`.
CollectiveKind = Literal[
    "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "shift", "swap"
]  # fmt: skip
# The operator of a reduction. A mean is a sum with a divisor.
ReduceOp = Literal["sum", "max", "min"]
# How a backend runs a chunk program: one backend operation per round (`lax.ppermute`, `mpi4jax.sendrecv`),
# one call for the whole program, or one call that starts it and one that waits for it.
Form = Literal["rounds", "call", "split"]


class Collective(BaseOp, frozen=True, tag="collective", gc=False):
    """One collective over `axes`, applied to each leaf.

    Kinds, with n ranks along `axes`:

    - all_reduce: the reduction of all operands, with the shape of the operand.
    - reduce_scatter: this rank's row of the reduction; a flat [n*k] becomes [k]. Trees and arrays are cut as
      by `Slice`.
    - all_gather: the concatenation of all operands in rank order; a flat [k] becomes [n*k]. The padding of
      trees and arrays is dropped.
    - all_to_all: flat [n*k] -> [n*k]; row i goes to rank i.
    - broadcast: the operand of `root`.
    - reduce: the reduction on `root`, zeros on other ranks.
    - shift: the operand of the rank `root` places before along the axis, modulo n.
    - swap: an all_to_all of values that differ per rank, by rows of the leading dimension or of a flat
      buffer.

    Attributes:
        kind: The kind of collective.
        axes: The axes. Ranks are row-major over them, the first one major.
        dtype: The type of the widest leaf.
        nbytes: The bytes of one rank's operand.
        op: The operator of a kind that reduces; None for other kinds.
        root: The root, or the distance of a shift, 0 to n - 1; None for other kinds.
        algorithm: `native`, a chunk program of `commplan.collectives`, or `hierarchical` with one program per
            level. The keys of its levels are axes of `axes`, or for a single axis the levels of the topology
            that it spans (`Axis.levels`).
        hints: The options. `chunk` is the message size in bytes.
        form: How the backend runs a chunk program; None for its default.
        divisor: The number that a sum is divided by before it is sent on; 1 for no division. Backends do not
            divide: the pass `wire` expands it, and packs leaves that `hints.integers` applies to separately.
        stages: The stages of the plan that the collective carries out, each by its result.
        pinned: Whether passes keep the algorithm, because the plan names it or a pass has decided on it.
    """

    APPLIED_HINTS = ("wire", "codec", "accumulate", "integers")

    kind: Meaning[CollectiveKind]
    result: Meaning[Ref]
    operand: Meaning[Ref]
    axes: Meaning[Over]
    dtype: Structure[DType]
    nbytes: Structure[int]
    span: Presentation[Span]
    op: Meaning[ReduceOp | None] = None
    root: Meaning[int | None] = None
    algorithm: Execution[Algorithm] = Algorithm("native")
    hints: Meaning[Hints] = Hints()
    after: Execution[tuple[Ref, ...]] = ()
    lane: Cost[str] = "network"
    form: Execution[Form | None] = None
    divisor: Meaning[int] = 1
    stages: Execution[tuple[Ref, ...]] = ()
    pinned: Cost[bool] = False

    def check(self, types: ValueTypes) -> Violations:
        if not self.axes:
            yield "CP0734", "a collective over no axis"
            return
        wrong = [*types.check_axes(self.axes)]
        yield from wrong
        if wrong:
            return
        if self.kind in ("shift", "swap") and len(self.axes) > 1:
            yield "CP0734", f"{with_article(self.kind)} has a single axis"
            return
        yield from self._check_arguments(types)
        yield from self._check_leaves(types)
        yield from self._check_placement(types.values[self.operand])

    def _check_arguments(self, types: ValueTypes) -> Violations:
        """Check the options, the operator, the root and the divisor."""
        if any(size is not None and size < 1 for size in (self.hints.chunk, self.hints.bucket)):
            yield "CP0735", "a message and a bucket have at least one byte"
        if (self.kind in REDUCING) != (self.op is not None):
            yield "CP0735", f"{self.kind} and op {self.op} cannot be combined"
        if (self.kind in TOWARDS_SOME) != (self.root is not None):
            yield "CP0735", f"{self.kind} and root {self.root} cannot be combined"
        elif self.root is not None:
            yield from broken("CP0735", rules.root_in_range(self.root, self.axes, types.ranks))
        if self.divisor < 1 or (self.divisor > 1 and self.op != "sum"):
            yield "CP0735", f"{self.kind} {self.op or ''} divides by {self.divisor}"

    def _check_leaves(self, types: ValueTypes) -> Violations:
        """Check the types of the operand's leaves, and that the kind can divide their shapes among ranks."""
        ranks, operand = types.ranks(self.axes), types.values[self.operand]
        averaged = "mean" if self.divisor > 1 else self.op or ""
        yield from broken(
            "CP0735", rules.reducible_leaves(averaged, operand.leaves, self.operand, self.hints)
        )
        if self.nbytes != operand.nbytes:
            yield "CP0732", f"`{self.operand}` has {operand.nbytes} bytes, not {self.nbytes}"
        dtypes = {leaf.dtype for leaf in operand.leaves} or {self.dtype}
        if self.dtype not in dtypes or self.dtype.nbytes != max(dtype.nbytes for dtype in dtypes):
            yield "CP0732", f"{self.dtype} is not the widest type of `{self.operand}`"
        if self.kind == "all_to_all" and operand.kind != "flat":
            yield "CP0731", f"`{self.operand}` is {operand.kind}: an all_to_all moves flat buffers"
        size = operand.leaves[0].size if operand.kind == "flat" else 0
        if self.kind == "swap" and any((*leaf.shape, 1)[0] % ranks for leaf in operand.leaves):
            yield "CP0731", f"a leading dimension of `{self.operand}` is no {ranks} equal blocks"
        if self.kind in ("reduce_scatter", "all_to_all") and size % ranks:
            yield "CP0731", f"{size} elements of `{self.operand}` are no {ranks} equal rows"

    def _check_placement(self, operand: Value) -> Violations:
        """Check that ranks hold different data, in an order that the kind can combine."""
        placement = operand.placement
        cut = [axis for axis in self.axes if axis in placement.split]
        for axis in self.axes:
            if not placement.varies(axis):
                yield "CP0734", f"`{self.operand}` is the same over `{axis}` already"
            elif self.kind != "all_gather" and axis in (*cut, *placement.stacked):
                message = f"is {placement}: there are no terms or copies along `{axis}`"
                yield "CP0734", f"`{self.operand}` {message}"
        ordered = placement.split[-len(self.axes) :] == self.axes
        if self.kind == "all_gather" and (cut or operand.kind != "flat") and not ordered:
            yield "CP0734", f"`{self.operand}` is {placement}: the last cut is gathered first"

    def transfer(self, types: ValueTypes) -> Results:
        operand, result = types.values[self.operand], self.result
        placement = operand.placement.without(self.axes)
        match self.kind:
            case "reduce_scatter":
                return (types.part(operand, result, self.axes),)
            case "all_gather" if operand.kind in ("flat", "records"):
                ways = types.ranks(self.axes)
                leaves = tuple(leaf.rows(ways) for leaf in operand.leaves)
                kind = "flat" if operand.kind == "flat" else types.values[result].kind
                return (Value(result, kind, leaves, placement),)
            case "all_gather":
                ways = [types.sizes[axis] for axis in placement.split]
                leaves = cut_all(operand.kind, operand.whole, ways)
                whole = operand.whole if placement.split else ()
                return (Value(result, operand.kind, leaves, placement, whole),)
            case "shift" | "swap":
                placement = operand.placement
            case "reduce":
                placement = types.per(placement, self.axes)
            case "all_to_all":
                stacked = (*placement.stacked, *self.axes)
                placement = msgspec.structs.replace(placement, stacked=stacked)
            case "all_reduce" | "broadcast":
                pass
        return (value_like(operand, result, placement),)

    def meaning(self, env: Interpretation) -> None:
        operand, value = env.get(self.operand), env.values[self.result]
        divisor, hints = self.divisor, self.hints
        if env.written_out:  # backends do not divide, cast, or reduce leaves in different ways
            divisor, hints = 1, NO_HINTS
        if self.op is not None:
            sends_sum = self.kind == "all_reduce"
            how = steps.ReductionSpec(self.op, self.axes, hints, sends_sum=sends_sum, divisor=divisor)
            operand = steps.reduced(env, operand, operand.value, how)
        elif self.kind != "all_to_all":
            is_gather = self.kind == "all_gather"
            operand = steps.moved(env, operand, hints, self.axes, sends_scalars=not is_gather)
        env.put(self.result, self._moved(env, operand, value))

    def _moved(self, env: Interpretation, operand: SymbolicValue, value: Value) -> SymbolicValue:
        """Move elements between ranks, after the reduction."""
        algebra, flat = env.algebra, value.kind == "flat"
        match self.kind:
            case "reduce_scatter" if flat:
                return operand.each(value, lambda block: moves.scattered(algebra, block, self.axes))
            case "reduce_scatter":
                return env.sliced(operand, value, *env.row(self.axes))
            case "all_gather":
                return env.gathered(operand, value, self.axes)
            case "swap":
                return env.swapped(operand, value, self.axes)
            case "all_to_all":
                return operand.each(value, lambda block: moves.exchanged(algebra, block, self.axes))
            case "shift":
                return operand.renamed(algebra, value, algebra.shift(self.axes, self.root or 0))
            case "broadcast":
                return operand.renamed(algebra, value, env.root(self.axes, self.root or 0))
            case "reduce":
                where = [(symbol, place[1]) for symbol, place in env.root(self.axes, self.root or 0).items()]
                return operand.like(value, lambda term, _: algebra.only(term, where))
            case "all_reduce":
                return values.SymbolicValue(value, operand.uniform, () if operand.uniform else operand.blocks)

    @property
    def title(self) -> str:
        return self.kind

    def detail(self, values: Mapping[Ref, Value]) -> str:
        op = "mean" if self.divisor > 1 else self.op
        return f"{op + ' ' if op else ''}{self.dtype} over {', '.join(self.axes)}, {self.algorithm}"

    @property
    def is_split(self) -> bool:
        return self.form == "split"

    def staged(self, nbytes: Mapping[Ref, int]) -> int:
        """A chunk program has a receive buffer: a round brings at most one message into each slot."""
        return 0 if self.algorithm.name == "native" else max(nbytes[self.operand], nbytes[self.result])

    def buffers(self, nbytes: Mapping[Ref, int]) -> int:
        return nbytes[self.operand] + nbytes[self.result] + self.staged(nbytes)

    def work(self, nbytes: Mapping[Ref, int], ranks: Ranks) -> Work:
        how, root = self.algorithm, self.root or 0
        title, chunk = f"{self.kind} via {how}", self.hints.chunk
        return Work(self.kind, title, self.nbytes, self.axes, how, chunk, root, self.form)
