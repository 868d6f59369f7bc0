"""What values hold while a phase is carried out on symbols: blocks for every leaf, made by the meanings of
ops and stages (`ir.ops`, `ir.stages`)."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType
from typing import NamedTuple

from commplan.ir.analysis.optimizer_leaf_match import LeafMatch
from commplan.ir.axes import coordinates
from commplan.ir.refs import Ref, base_name, name_of
from commplan.ir.shard_shapes import row_size
from commplan.ir.symbolic import blocks, moves
from commplan.ir.symbolic.blocks import Block, Builder, LeafShape, Rows
from commplan.ir.symbolic.terms import (
    Algebra,
    Argument,
    Chain,
    Contribution,
    Symbol,
    Symbols,
    Term,
    UnsayableError,
    at,
    rank,
)
from commplan.ir.symbolic.values import (
    SymbolicValue,
    arguments_of,
    has_arrays,
    leaf_shape,
    placed,
    rows_of,
    scalar_of,
    uniform_if_whole,
)
from commplan.ir.types import DType
from commplan.ir.values import Leaf, Part, Value

Paths = tuple[tuple[str, ...], ...]


class _Call(NamedTuple):
    """See `Interpretation.call`."""

    name: str
    given: Sequence[SymbolicValue]
    drawn: Sequence[Argument]


class Interpretation:
    """The values of one phase so far.

    values: those that ops make, by name. matches: of every function in `elementwise`, by the paths of what
    goes in and comes out, the leaves of operands that each leaf of a result is made of. random: where each
    random function is called, on the host or the device. declared: the values of the plan. written_out: what
    is carried out are the ops alone, and no longer the types that a pass is still to send and add in.
    """

    def __init__(
        self,
        algebra: Algebra,
        values: Mapping[Ref, Value],
        matches: Mapping[tuple[str, Paths], LeafMatch],
        elementwise: frozenset[str] = frozenset(),
        random: Mapping[str, str] = MappingProxyType({}),
        declared: Mapping[Ref, Value] = MappingProxyType({}),
        *,
        written_out: bool = False,
    ) -> None:
        self.algebra, self.values, self.matches = algebra, values, matches
        self.elementwise, self.random, self.declared = elementwise, random, declared
        self.written_out = written_out
        self.draws: Counter[str] = Counter()
        self.held: dict[Ref, SymbolicValue] = {}
        self.undefined: list[str] = []
        self._current: dict[str, Ref] = {}

    def of(self, ref: Ref) -> SymbolicValue:
        return self.held[ref]

    def each(self, refs: Sequence[Ref]) -> list[SymbolicValue]:
        return [self.held[ref] for ref in refs]

    def check_current(self, ref: Ref) -> None:
        """`ref`, a state on a server, is asked for: a server has only what it was told last."""
        known = self._current.get(name_of(ref), ref)
        if known != ref:
            raise UnsayableError(f"`{ref}` is asked for when its server has `{known}`")

    def set_current(self, ref: Ref) -> None:
        """A server has `ref` now."""
        self._current[name_of(ref)] = ref

    def put(self, ref: Ref, held: SymbolicValue) -> None:
        self.held[ref] = held

    def rename(self, ref: Ref, held: SymbolicValue, symbols: Symbols) -> None:
        """`ref` is what is `held` with symbols replaced."""
        self.held[ref] = held.renamed(self.algebra, self.values[ref], symbols)

    def sizes(self, axes: Sequence[str]) -> list[int]:
        return [self.algebra.sizes[axis] for axis in axes]

    def root(self, axes: Sequence[str], number: int) -> Symbols:
        """The coordinates of rank `number`, counted row-major over `axes`, as a substitution."""
        sizes = self.algebra.sizes
        return {rank(a): at(place) for a, place in coordinates(number, axes, sizes).items() if sizes[a] > 1}

    def row(self, axes: Sequence[str], owners: Sequence[int] = ()) -> tuple[int, list[tuple[int, Symbol]]]:
        """Into how many rows a leaf is cut among the ranks along `axes`, or among `owners` of them alone,
        and the digits of the number of this rank's row."""
        if not owners:
            return math.prod(self.sizes(axes)), [(self.algebra.sizes[axis], rank(axis)) for axis in axes]
        return len(owners), [(len(owners), self.algebra.owner(axes, owners))]

    def own_elements(
        self, name: str, value: Value, own: Sequence[str], split: Sequence[str], owner: Symbol | None = None
    ) -> SymbolicValue:
        """`value`, called `name`, of which every element is itself; ranks along `own` have others, and along
        `split` a row each, one cut after another. owner: who alone has it."""
        chain: Chain = ()
        for axis in split:
            size = self.algebra.sizes[axis]
            chain = blocks.cut(chain, size, ((size, rank(axis)),))
        return SymbolicValue(value, (chain, self.algebra.value(name, own, owner)))

    def scalar(self, ref: Ref) -> Term:
        """The term of a scalar value."""
        return scalar_of(self.held[ref], 0)

    # Functions

    def call(
        self,
        fn: str,
        given: Sequence[SymbolicValue],
        results: Sequence[Ref],
        marks: Sequence[object] = (),
        *,
        by_record: bool = False,
        served: bool = False,
        drawn: Sequence[Argument] = (),
    ) -> None:
        """`results` are what `fn` makes of what is `given`. marks: whatever else makes two calls different.
        by_record: it is called for each record. served: by a server, which makes more of it. drawn: what a
        random function depends on beside its operands."""
        leaves = (*(held.value.leaves for held in given), *(self.values[ref].leaves for ref in results))
        paths: Paths = tuple(tuple(leaf.path for leaf in each) for each in leaves)
        known = fn in self.elementwise and not by_record and not served
        match = self.matches.get((fn, paths)) if known else None
        for ref in results:
            self._check_declared(fn, self.values[ref], whole=match is None)
        called = " ".join(map(str, (fn, *marks)))
        for number, ref in enumerate(results):
            call = _Call(f"{called}#{number}" if number else called, given, drawn)
            value = self.values[ref]
            held = None if match is None else self._elementwise(call, value, match, number)
            if by_record:
                held = self._by_record(call, value)
            self.held[ref] = held or self._opaque(call, value)

    def _check_declared(self, fn: str, value: Value, *, whole: bool) -> None:
        """What `fn` makes is the plan's value of that name, or parts of it; whole: all of it."""
        declared = self.declared.get(base_name(value.id))
        if declared is None:
            raise UnsayableError(f"`{value.id}` is made by `{fn}`, and no value of the plan")
        own, planned = (
            (each.kind, [(leaf.path, leaf.dtype, leaf.shape if whole else ()) for leaf in each.leaves])
            for each in (value, declared)
        )
        if own != planned:
            raise UnsayableError(f"`{value.id}` has other leaves than what `{fn}` makes of it in the plan")

    def _declared_leaf(self, value: Value, index: int) -> tuple[Leaf, Leaf]:
        """One rank's part of a leaf as the plan declares it, and the whole leaf."""
        declared = self.declared[base_name(value.id)]
        return declared.leaves[index], declared.uncut[index]

    def _opaque(self, call: _Call, value: Value) -> SymbolicValue:
        """Every element of the result depends on all of every operand."""
        arguments = [*call.drawn]
        for number, held in enumerate(call.given):
            arguments += arguments_of(number, held)
        return SymbolicValue(value, ((), self.algebra.call(call.name, arguments)))

    def _by_record(self, call: _Call, value: Value) -> SymbolicValue:
        """Every record of the result depends on the same record of the operands that are records, and on all
        of the others."""
        given, arguments = call.given, [*call.drawn]
        chains: set[Chain] = set()
        for number, held in enumerate(given):
            if held.value.kind != "records":
                arguments += arguments_of(number, held)
            elif held.uniform is None:
                raise UnsayableError(f"the records of `{held.value.id}` are those of several loads")
            else:
                chains.add(held.uniform[0])
                arguments.append(Argument(held.uniform[1], number))
        loaded = [leaf for held in given if held.value.kind == "records" for leaf in held.value.leaves]
        if len({leaf.shape[:1] for leaf in (*loaded, *value.leaves)}) > 1 or len(chains) > 1:
            raise UnsayableError("different records are put together")
        term = self.algebra.call(f"{call.name} by record", arguments)
        return SymbolicValue(value, (chains.pop() if chains else (), term))

    def _elementwise(self, call: _Call, value: Value, match: LeafMatch, number: int) -> SymbolicValue | None:
        """Every element of the result depends on the same element of the leaves that go with its own, and on
        scalars."""
        name, given, groups = call.name, call.given, match.groups[number]
        for leaf, uncut, group in zip(value.leaves, value.uncut, groups, strict=True):
            for operand, index in group or ():
                other = given[operand].value
                if (other.leaves[index].shape, other.uncut[index].shape) != (leaf.shape, uncut.shape):
                    shape = list(leaf.shape)
                    raise UnsayableError(f"leaf `{leaf.path}` is {shape}, what it is made of is not")
        scalars = [*call.drawn]
        for operand, index in match.scalars:
            scalars.append(Argument(scalar_of(given[operand], index), operand, index))
        chains = {held.uniform and held.uniform[0] for held in given if has_arrays(held)}
        if match.straight and len(chains) == 1:
            held = self._straight(call, value, match, scalars)
            if held is not None:
                return held
        leaves: list[Block] = []
        for index, (leaf, group) in enumerate(zip(value.leaves, groups, strict=True)):
            if not leaf.size:
                leaves.append(blocks.EMPTY)
            elif group is None:
                return None
            elif group:
                partners = [(operand, other, given[operand].blocks[other]) for operand, other in group]
                leaves.append(self._zipped(name, value, index, partners, scalars))
            else:
                if (leaf, value.uncut[index]) != self._declared_leaf(value, index):
                    raise UnsayableError(f"leaf `{leaf.path}` has another shape than in the plan")
                shape = leaf_shape(value, index, ())
                leaves.append(blocks.whole(shape, leaf.size, (), self.algebra.call(name, scalars)))
        return uniform_if_whole(value, leaves)

    def _straight(
        self, call: _Call, value: Value, match: LeafMatch, scalars: list[Argument]
    ) -> SymbolicValue | None:
        """All leaves at once."""
        alone = {operand for operand, _ in match.scalars}
        arguments: list[Argument] = []
        chain: Chain = ()
        for operand, held in enumerate(call.given):
            if operand in alone:
                continue
            if held.uniform is None:
                return None
            arguments.append(Argument(held.uniform[1], operand))
            if has_arrays(held):
                chain = held.uniform[0]  # that of all
        return SymbolicValue(value, (chain, self.algebra.call(call.name, [*arguments, *scalars])))

    def _zipped(
        self,
        name: str,
        value: Value,
        index: int,
        partners: Sequence[tuple[int, int, Block]],
        scalars: list[Argument],
    ) -> Block:
        builder, leaf = Builder(), value.leaves[index]
        columns = [block for _, _, block in partners]
        if any(block.rows for block in columns):
            raise UnsayableError(f"leaf `{leaf.path}` of an operand is rows of several ranks")
        for begin, end, runs in blocks.aligned(columns):
            arguments: list[Argument] = []
            places: set[tuple[Chain, int, LeafShape]] = set()
            for (operand, other, block), run in zip(partners, runs, strict=True):
                if run is None:
                    arguments.append(Argument(self.algebra.zero, operand, None if other == index else other))
                    continue
                chain, term = block.slots[run.slot]
                if term is None or not isinstance(run.leaf, LeafShape) or run.leaf.number != other:
                    raise UnsayableError(f"leaf `{leaf.path}` of an operand holds elements of another leaf")
                places.add((chain, run.column + begin - run.at, run.leaf._replace(number=index)))
                arguments.append(Argument(term, operand, None if other == index else other))
            if len(places) > 1:
                columns = ", ".join(str(column) for _, column, _ in sorted(places, key=repr))
                raise UnsayableError(f"leaf `{leaf.path}`: parts from {columns} on are put together")
            if places:
                chain, column, shape = places.pop()
                term = self.algebra.call(name, [*arguments, *scalars])
                builder.put(begin, end - begin, shape, column, chain, term)
        return builder.block((), leaf.size)

    # Collectives

    def summed(
        self,
        operand: SymbolicValue,
        value: Value,
        axes: Sequence[str],
        function: Callable[[Term, DType], Term],
    ) -> SymbolicValue:
        """What ranks along `axes` hold at the same place is put together by `function`."""
        if operand.uniform is not None:
            moves.check_rows((operand.uniform[0],), axes)
            return operand.like(value, function)
        cached = functools.cache(function)
        leaves = [
            moves.summed(self.algebra, block, axes, lambda term, dtype=leaf.dtype: cached(term, dtype))
            for block, leaf in zip(operand.blocks, operand.value.leaves, strict=True)
        ]
        return uniform_if_whole(value, leaves)

    def gathered(self, operand: SymbolicValue, value: Value, axes: Sequence[str]) -> SymbolicValue:
        """The rows of all ranks along `axes` of every leaf; a scalar as the first rank has it."""
        if operand.uniform is not None and value.kind != "flat":
            chain, term = operand.uniform
            last = blocks.cut((), *self.row(axes))
            if not any(term.varies(axis) for axis in axes) and chain[len(chain) - len(last) :] == last:
                return SymbolicValue(value, (chain[: len(chain) - len(last)], term))
        first, is_leaf = self.root(axes, 0), value.kind != "flat"
        leaves = [
            moves.gathered(self.algebra, block, axes, leaf.size, leaf=is_leaf)
            if leaf.shape
            else blocks.renamed(self.algebra, block, first)
            for block, leaf in zip(operand.blocks, value.leaves, strict=True)
        ]
        return uniform_if_whole(value, leaves)

    def swapped(self, operand: SymbolicValue, value: Value, axes: Sequence[str]) -> SymbolicValue:
        """All-to-all: each element is what it was, at another place of its leaf and on another rank. Where
        that is, is not followed: it is the same function of the element and of the block in which it comes.

        A flat buffer has a row of every leaf in each of its rows.
        """
        several = [axis for axis in axes if self.algebra.sizes[axis] > 1]
        if not several:
            return operand.renamed(self.algebra, value, {})
        ways, flat = math.prod(self.sizes(several)), value.kind == "flat"
        own_rows = blocks.cut((), ways, ((ways, blocks.row(0)),))
        for index, block in enumerate(operand.blocks):
            if flat and block.rows != ((ways, None),):
                raise UnsayableError(f"a buffer without {ways} rows of its own is swapped")
            for run in block.runs:
                chain = block.slots[run.slot][0]
                own = run.column == run.at and isinstance(run.leaf, LeafShape) and run.leaf.number == index
                if chain[-1:] != own_rows if flat else chain or not own:
                    raise UnsayableError("what is swapped is not cut into the blocks of its leaves")
        symbols = {rank(axis): ("from", axis) for axis in several}
        block = Argument(self.algebra.value("the block in which it comes", several), 1)

        def moved(term: Term, _: DType) -> Term:
            parts: list[Contribution] = []
            for part in term.parts:
                bare = self.algebra.term([part._replace(trace=(), coefficient=Fraction(1))])
                bound = Argument(self.algebra.substitute(bare, symbols), 0)
                (called,) = self.algebra.call(f"swap over {', '.join(several)}", (bound, block)).parts
                parts.append(called._replace(trace=part.trace, coefficient=part.coefficient))
            return self.algebra.term(parts)

        return operand.like(value, moved)

    def combined(
        self, operands: Sequence[SymbolicValue], value: Value, function: Callable[[Sequence[Term]], Term]
    ) -> SymbolicValue:
        """Trees put together element by element."""
        uniform = [held.uniform for held in operands if held.uniform is not None]
        chains = {chain for chain, _ in uniform}
        if len(uniform) == len(operands) and len(chains) == 1:
            return SymbolicValue(value, (chains.pop(), function([term for _, term in uniform])))
        columns = zip(*(held.blocks for held in operands), strict=True)
        leaves = [blocks.combined(self.algebra, column, function) for column in columns]
        return uniform_if_whole(value, leaves)

    # Buffers

    def packed(self, parts: Sequence[Part], ways: int, value: Value) -> SymbolicValue:
        """A flat buffer of `ways` rows from `parts` of leaves."""
        builder = Builder()
        known: dict[tuple[Ref, int], Block] = {}
        rows: Rows = ()
        for part in parts:
            held, leaf, column = self.held[part.value], part.leaf, part.start
            block = known.get((part.value, leaf), held.blocks[leaf])
            if ways == 1:
                block, column = blocks.row_of(self.algebra, block, column, part.size)
            elif (part.value, leaf) not in known:
                width = row_size(held.value.kind, held.value.leaves[leaf], ways)
                block = blocks.in_rows(block, ways, width, rows_of(held.value, leaf))
                known[part.value, leaf] = block
                rows = _same_rows(rows, block.rows)
            builder.take(block, column, part.size, part.offset)
        rows = rows or (((ways, None),) if ways > 1 else ())
        return SymbolicValue(value, None, [builder.block(rows, value.leaves[0].size // ways)])

    def unpacked(self, parts: Sequence[Part], ways: int, value: Value) -> SymbolicValue:
        """The leaves of `value` from `parts` of buffers of `ways` rows."""
        builders = [Builder() for _ in value.leaves]
        rows: list[Rows] = [() for _ in value.leaves]
        for part in parts:
            (buffer,), column = self.held[part.value].blocks, part.offset
            if ways == 1:
                buffer, column = blocks.row_of(self.algebra, buffer, column, part.size)
            else:
                buffer = blocks.in_rows(buffer, ways, buffer.size // ways)
                rows[part.leaf] = _same_rows(rows[part.leaf], buffer.rows)
            builders[part.leaf].take(buffer, column, part.size, part.start)
        leaves: list[Block] = []
        for index, leaf in enumerate(value.leaves):
            block = builders[index].block(rows[index], row_size(value.kind, leaf, ways))
            leaves.append(placed(blocks.collapsed(block, leaf.size, leaf=True)))
        return uniform_if_whole(value, leaves)

    def sliced(
        self, operand: SymbolicValue, value: Value, ways: int, digits: Sequence[tuple[int, Symbol]]
    ) -> SymbolicValue:
        """The row with these digits of every leaf that is no scalar, cut into `ways`."""
        if operand.uniform is not None and (value.whole or value.kind == "records"):
            chain, term = operand.uniform
            return SymbolicValue(value, (blocks.cut(chain, ways, digits), term))
        kept = [symbol for count, symbol in digits if count > 1]
        symbols = {blocks.row(index): symbol for index, symbol in enumerate(kept)}

        def part(index: int, block: Block, leaf: Leaf) -> Block:
            if not leaf.shape or ways == 1:
                return block
            width = row_size(operand.value.kind, leaf, ways)
            rows = blocks.in_rows(block, ways, width, rows_of(operand.value, index))
            split = blocks.leading(rows, [count for count, _ in digits])
            return blocks.renamed(self.algebra, split, symbols)._replace(rows=())

        leaves = operand.value.leaves
        return uniform_if_whole(value, list(map(part, range(len(leaves)), operand.blocks, leaves)))


def _same_rows(first: Rows, second: Rows) -> Rows:
    if first and second and first != second:
        raise UnsayableError("rows of different ranks are put side by side")
    return first or second
