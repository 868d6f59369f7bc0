"""Symbolic execution of a phase: the blocks of every leaf, computed by the semantics of ops and stages."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from commplan.ir.analysis.optimizer_leaf_match import LeafMatch
from commplan.ir.axes import coordinates
from commplan.ir.refs import Ref, base_name, name_of
from commplan.ir.shard_shapes import row_size
from commplan.ir.symbolic import blocks, moves
from commplan.ir.symbolic.blocks import Block, BlockBuilder, LeafShape, Rows
from commplan.ir.symbolic.symbols import Chain, Symbol, Symbols, at, rank
from commplan.ir.symbolic.terms import Algebra, Argument, Contribution, InexpressibleError, Term
from commplan.ir.symbolic.values import (
    SymbolicValue,
    arguments_of,
    has_arrays,
    leaf_shape,
    rows_of,
    scalar_of,
    uncut_constant_rows,
    uniform_if_whole,
)
from commplan.ir.types import DType
from commplan.ir.values import Leaf, Part, Value

if TYPE_CHECKING:
    from commplan.ir.stages.builtins import Builtin

# The paths of the leaves of each operand and result of a call.
Paths = tuple[tuple[str, ...], ...]
# The index of an operand, the index of a leaf in it, and the content of that leaf.
_Partner = tuple[int, int, Block]


class _Call(NamedTuple):
    """The arguments of `Interpretation.call` for one result.

    Attributes:
        name: A name for the function, the result and the marks.
        operands: The operands.
        random_arguments: Random inputs of the function.
        coefficients: Those of the operands, if the result is their exact linear combination; else None.
    """

    name: str
    operands: Sequence[SymbolicValue]
    random_arguments: Sequence[Argument]
    coefficients: Sequence[Fraction] | None = None


class Interpretation:
    """The values of a phase during symbolic execution.

    Args:
        algebra: The algebra that makes terms.
        values: The values that ops make, by name.
        matches: For each elementwise function and the leaf paths of its operands and results, the operand
            leaves that each result leaf depends on.
        elementwise: The elementwise functions.
        random: For each random function, `host` or `device`.
        declared: The values of the plan.
        builtins: The built-in functions among the elementwise ones.
        expanded: For each result of a built-in function, whether it is a linear combination of its operands
            in the plan; else it is an opaque call. The interpretation of the plan adds them.
        written_out: Whether casts and divisions are explicit ops, so that collectives imply none.

    Attributes:
        draws: The number of calls of each random function so far.
        symbolic: The content of the values so far.
        undefined: Errors of ops with an inexpressible result, which `verify.equivalence` adds.
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
        builtins: Mapping[str, Builtin] = MappingProxyType({}),
        expanded: dict[Ref, bool] | None = None,
        written_out: bool = False,
    ) -> None:
        self.algebra, self.values, self.matches = algebra, values, matches
        self.elementwise, self.random, self.declared = elementwise, random, declared
        self.builtins, self.expanded = builtins, {} if expanded is None else expanded
        self.written_out = written_out
        self.draws: Counter[str] = Counter()
        self.symbolic: dict[Ref, SymbolicValue] = {}
        self.undefined: list[str] = []
        self._current: dict[str, Ref] = {}

    def get(self, ref: Ref) -> SymbolicValue:
        return self.symbolic[ref]

    def each(self, refs: Sequence[Ref]) -> list[SymbolicValue]:
        return [self.symbolic[ref] for ref in refs]

    def check_current(self, ref: Ref) -> None:
        """Check that `ref`, a state read from a server, is the state's current version."""
        current = self._current.get(name_of(ref), ref)
        if current != ref:
            raise InexpressibleError(f"`{ref}` is requested when its server has `{current}`")

    def set_current(self, ref: Ref) -> None:
        """Make `ref` the current version of its state on a server."""
        self._current[name_of(ref)] = ref

    def put(self, ref: Ref, value: SymbolicValue) -> None:
        """Define `ref` as `value`."""
        self.symbolic[ref] = value

    def rename(self, ref: Ref, operand: SymbolicValue, symbols: Symbols) -> None:
        """Define `ref` as `operand` with symbols replaced."""
        self.symbolic[ref] = operand.renamed(self.algebra, self.values[ref], symbols)

    def sizes(self, axes: Sequence[str]) -> list[int]:
        return [self.algebra.sizes[axis] for axis in axes]

    def root(self, axes: Sequence[str], number: int) -> Symbols:
        """The coordinates of rank `number`, row-major over `axes`, as a substitution."""
        sizes = self.algebra.sizes
        return {rank(a): at(place) for a, place in coordinates(number, axes, sizes).items() if sizes[a] > 1}

    def row(self, axes: Sequence[str], owners: Sequence[int] = ()) -> tuple[int, list[tuple[int, Symbol]]]:
        """The number of rows into which a leaf is cut, and the digits of this rank's row index.

        Rows are assigned to the ranks along `axes`, or to the `owners` among them only.
        """
        if not owners:
            return math.prod(self.sizes(axes)), [(self.algebra.sizes[axis], rank(axis)) for axis in axes]
        return len(owners), [(len(owners), self.algebra.owner(axes, owners))]

    def fresh_elements(
        self,
        name: str,
        value: Value,
        varying: Sequence[str],
        split: Sequence[str],
        owner: Symbol | None = None,
    ) -> SymbolicValue:
        """`value` with new, independent elements called `name`.

        Elements differ between ranks along `varying`. Along `split`, each rank has a row, one cut after
        another. `owner` is as in `Algebra.value`.
        """
        chain: Chain = ()
        for axis in split:
            size = self.algebra.sizes[axis]
            chain = blocks.cut(chain, size, ((size, rank(axis)),))
        return SymbolicValue(value, (chain, self.algebra.value(name, varying, owner)))

    def scalar(self, ref: Ref) -> Term:
        """The term of a scalar value."""
        return scalar_of(self.symbolic[ref], 0)

    # Functions

    def call(
        self,
        fn: str,
        operands: Sequence[SymbolicValue],
        results: Sequence[Ref],
        marks: Sequence[object] = (),
        *,
        by_record: bool = False,
        on_server: bool = False,
        random_arguments: Sequence[Argument] = (),
    ) -> None:
        """Define `results` as the results of calling `fn`.

        Args:
            fn: The function.
            operands: Its operands.
            results: The values to define.
            marks: Anything else that distinguishes two calls.
            by_record: Whether the function is called once per record.
            on_server: Whether a server calls it, with inputs from other workers too.
            random_arguments: Random inputs of the function.
        """
        values = [*(operand.value for operand in operands), *(self.values[ref] for ref in results)]
        paths: Paths = tuple(tuple(leaf.path for leaf in value.leaves) for value in values)
        is_elementwise = fn in self.elementwise and not by_record and not on_server
        match = self.matches.get((fn, paths)) if is_elementwise else None
        for ref in results:
            self._check_declared(fn, self.values[ref], whole=match is None)
        label = " ".join(map(str, (fn, *marks)))
        for number, ref in enumerate(results):
            coefficients = None if match is None else self._coefficients(fn, operands, number, ref)
            call = _Call(f"{label}#{number}" if number else label, operands, random_arguments, coefficients)
            value = self.values[ref]
            result = None if match is None else self._elementwise(call, value, match, number)
            if by_record:
                result = self._by_record(call, value)
            self.symbolic[ref] = result or self._opaque(call, value)

    def _check_declared(self, fn: str, value: Value, *, whole: bool) -> None:
        """Check that a result of `fn` has the leaves in the plan, or parts of them unless `whole`."""
        declared = self.declared.get(base_name(value.id))
        if declared is None:
            raise InexpressibleError(f"`{value.id}` is made by `{fn}`, but is not a value of the plan")
        actual, expected = (
            (each.kind, [(leaf.path, leaf.dtype, leaf.shape if whole else ()) for leaf in each.leaves])
            for each in (value, declared)
        )
        if actual != expected:
            raise InexpressibleError(f"`{value.id}` has other leaves than the result of `{fn}` in the plan")

    def _declared_leaf(self, value: Value, index: int) -> tuple[Leaf, Leaf]:
        """One rank's part of a leaf as the plan declares it, and the whole leaf."""
        declared = self.declared[base_name(value.id)]
        return declared.leaves[index], declared.uncut[index]

    def _coefficients(
        self, fn: str, operands: Sequence[SymbolicValue], number: int, ref: Ref
    ) -> Sequence[Fraction] | None:
        """The coefficients of the operands in result `number`, if it is their linear combination.

        It is if all of them are exact in the plan. Rounded terms are not combined, since those of one element
        would cancel: `x - bf16(x)` is not zero.
        """
        body = self.builtins.get(fn)
        if body is None or not body.linear:
            return None
        coefficients = body.coefficients()[number]
        exact = all(x.is_exact for x, factor in zip(operands, coefficients, strict=True) if factor)
        expanded = self.expanded.setdefault(base_name(ref), exact)
        return coefficients if expanded and exact else None

    def _made(self, call: _Call, arguments: Sequence[Argument]) -> Term:
        """The result of a call for some elements."""
        if call.coefficients is None:
            return self.algebra.call(call.name, arguments)
        return self.algebra.add(
            [self.algebra.scaled(each.term, call.coefficients[each.operand]) for each in arguments]
        )

    def _opaque(self, call: _Call, value: Value) -> SymbolicValue:
        """Every element of the result depends on all elements of all operands."""
        arguments = [*call.random_arguments]
        for number, operand in enumerate(call.operands):
            arguments += arguments_of(number, operand)
        return SymbolicValue(value, ((), self.algebra.call(call.name, arguments)))

    def _by_record(self, call: _Call, value: Value) -> SymbolicValue:
        """Every record of the result depends on the same record of each operand, and on whole operands."""
        operands, arguments = call.operands, [*call.random_arguments]
        chains: set[Chain] = set()
        for number, operand in enumerate(operands):
            if operand.value.kind != "records":
                arguments += arguments_of(number, operand)
            elif operand.uniform is None:
                raise InexpressibleError(f"the records of `{operand.value.id}` are those of several loads")
            else:
                chains.add(operand.uniform[0])
                arguments.append(Argument(operand.uniform[1], number))
        records = [operand.value for operand in operands if operand.value.kind == "records"]
        batches = {leaf.shape[:1] for batched in (*records, value) for leaf in batched.leaves}
        if len(batches) > 1 or len(chains) > 1:
            raise InexpressibleError("different records are combined")
        term = self.algebra.call(f"{call.name} by record", arguments)
        return SymbolicValue(value, (chains.pop() if chains else (), term))

    def _elementwise(self, call: _Call, value: Value, match: LeafMatch, number: int) -> SymbolicValue | None:
        """Every element of the result depends on the same element of the matching leaves, and on scalars."""
        operands, groups = call.operands, match.groups[number]
        for leaf, uncut, group in zip(value.leaves, value.uncut, groups, strict=True):
            for operand, index in group or ():
                other = operands[operand].value
                if (other.leaves[index].shape, other.uncut[index].shape) != (leaf.shape, uncut.shape):
                    shape = list(leaf.shape)
                    raise InexpressibleError(f"leaf `{leaf.path}` is {shape}, its operands are not")
        scalars = [*call.random_arguments]
        for operand, index in match.scalars:
            scalars.append(Argument(scalar_of(operands[operand], index), operand, index))
        chains = {operand.uniform and operand.uniform[0] for operand in operands if has_arrays(operand)}
        if match.straight and len(chains) == 1:
            result = self._straight(call, value, match, scalars)
            if result is not None:
                return result
        leaves: list[Block] = []
        for index, (leaf, group) in enumerate(zip(value.leaves, groups, strict=True)):
            if not leaf.size:
                leaves.append(blocks.EMPTY)
            elif group is None:
                return None
            elif group:
                partners = [(operand, other, operands[operand].blocks[other]) for operand, other in group]
                leaves.append(self._zipped(call, value, index, partners, scalars))
            else:
                if (leaf, value.uncut[index]) != self._declared_leaf(value, index):
                    raise InexpressibleError(f"leaf `{leaf.path}` has another shape than in the plan")
                shape = leaf_shape(value, index, ())
                leaves.append(blocks.whole(shape, leaf.size, (), self._made(call, scalars)))
        return uniform_if_whole(value, leaves)

    def _straight(
        self, call: _Call, value: Value, match: LeafMatch, scalars: list[Argument]
    ) -> SymbolicValue | None:
        """Compute all leaves at once, if operands are uniform."""
        scalar_operands = {number for number, _ in match.scalars}
        arguments: list[Argument] = []
        chain: Chain = ()
        for number, operand in enumerate(call.operands):
            if number in scalar_operands:
                continue
            if operand.uniform is None:
                return None
            arguments.append(Argument(operand.uniform[1], number))
            if has_arrays(operand):
                chain = operand.uniform[0]  # the chain of all operands
        return SymbolicValue(value, (chain, self._made(call, [*arguments, *scalars])))

    def _zipped(
        self, call: _Call, value: Value, index: int, partners: Sequence[_Partner], scalars: list[Argument]
    ) -> Block:
        """Leaf `index` of the result, whose elements depend on those of `partners` in the same place."""
        builder, leaf = BlockBuilder(), value.leaves[index]
        name = f"leaf `{leaf.path}`"
        partner_blocks = [block for _, _, block in partners]
        if any(block.rows for block in partner_blocks):
            raise InexpressibleError(f"{name} of an operand is rows of several ranks")
        for begin, end, runs in blocks.aligned(partner_blocks):
            arguments: list[Argument] = []
            places: set[tuple[Chain, int, LeafShape]] = set()
            for (operand, other, block), run in zip(partners, runs, strict=True):
                if run is None:
                    arguments.append(Argument(self.algebra.zero, operand, None if other == index else other))
                    continue
                chain, term = block.slots[run.slot]
                if term is None or not isinstance(run.leaf, LeafShape) or run.leaf.number != other:
                    raise InexpressibleError(f"{name} of an operand holds elements of another leaf")
                places.add((chain, run.column + begin - run.at, run.leaf._replace(number=index)))
                arguments.append(Argument(term, operand, None if other == index else other))
            if len(places) > 1:
                starts = ", ".join(str(column) for _, column, _ in sorted(places, key=repr))
                raise InexpressibleError(f"{name}: parts from {starts} on are combined")
            if places:
                chain, column, shape = places.pop()
                term = self._made(call, [*arguments, *scalars])
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
        """Combine the elements that ranks along `axes` hold in the same place with `function`."""
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
        """Gather the rows of all ranks along `axes` of every leaf; scalars are taken from the first rank."""
        if operand.uniform is not None and value.kind != "flat":
            chain, term = operand.uniform
            last = blocks.cut((), *self.row(axes))
            if not any(term.varies(axis) for axis in axes) and chain[len(chain) - len(last) :] == last:
                return SymbolicValue(value, (chain[: len(chain) - len(last)], term))
        first, is_leaf = self.root(axes, 0), value.kind != "flat"
        leaves = [
            moves.gathered(self.algebra, block, axes, leaf.size if is_leaf else None)
            if leaf.shape
            else blocks.renamed(self.algebra, block, first)
            for block, leaf in zip(operand.blocks, value.leaves, strict=True)
        ]
        return uniform_if_whole(value, leaves)

    def swapped(self, operand: SymbolicValue, value: Value, axes: Sequence[str]) -> SymbolicValue:
        """All-to-all: every element moves to another place of its leaf, on another rank.

        The new place is not tracked: it is an opaque function of the element and of the block that it arrives
        in. Each row of a flat buffer holds a row of every leaf.
        """
        several = [axis for axis in axes if self.algebra.sizes[axis] > 1]
        if not several:
            return operand.renamed(self.algebra, value, {})
        ways, flat = math.prod(self.sizes(several)), value.kind == "flat"
        rank_rows = blocks.cut((), ways, ((ways, blocks.row(0)),))
        for index, block in enumerate(operand.blocks):
            if flat and block.rows != ((ways, None),):
                raise InexpressibleError(f"a swapped buffer does not have {ways} rows")
            for run in block.runs:
                leaf, chain = run.leaf, block.slots[run.slot][0]
                is_in_place = run.column == run.at and isinstance(leaf, LeafShape) and leaf.number == index
                is_in_blocks = chain[-1:] == rank_rows if flat else not chain and is_in_place
                if not is_in_blocks:
                    raise InexpressibleError("a swapped value is not cut into the blocks of its leaves")
        symbols = {rank(axis): ("from", axis) for axis in several}
        block = Argument(self.algebra.value("the index of its block", several), 1)

        def moved(term: Term, _: DType) -> Term:
            parts: list[Contribution] = []
            for part in term.parts:
                bare = self.algebra.term([part._replace(trace=(), coefficient=Fraction(1))])
                bound = Argument(self.algebra.substitute(bare, symbols), 0)
                (swapped,) = self.algebra.call(f"swap over {', '.join(several)}", (bound, block)).parts
                parts.append(swapped._replace(trace=part.trace, coefficient=part.coefficient))
            return self.algebra.term(parts)

        return operand.like(value, moved)

    def combined(
        self, operands: Sequence[SymbolicValue], value: Value, function: Callable[[Sequence[Term]], Term]
    ) -> SymbolicValue:
        """Combine trees elementwise."""
        uniform = [operand.uniform for operand in operands if operand.uniform is not None]
        chains = {chain for chain, _ in uniform}
        if len(uniform) == len(operands) and len(chains) == 1:
            return SymbolicValue(value, (chains.pop(), function([term for _, term in uniform])))
        columns = zip(*(operand.blocks for operand in operands), strict=True)
        leaves = [blocks.combined(self.algebra, column, function) for column in columns]
        return uniform_if_whole(value, leaves)

    # Buffers

    def packed(self, parts: Sequence[Part], ways: int, value: Value) -> SymbolicValue:
        """Build a flat buffer of `ways` rows from `parts` of leaves."""
        builder = BlockBuilder()
        viewed: dict[tuple[Ref, int], Block] = {}
        rows: Rows = ()
        for part in parts:
            operand, leaf, column = self.symbolic[part.value], part.leaf, part.start
            block = viewed.get((part.value, leaf), operand.blocks[leaf])
            if ways == 1:
                block, column = blocks.row_of(self.algebra, block, column, part.size)
            elif (part.value, leaf) not in viewed:
                width = row_size(operand.value.kind, operand.value.leaves[leaf], ways)
                block = blocks.in_rows(block, ways, width, rows_of(operand.value, leaf))
                viewed[part.value, leaf] = block
                rows = _same_rows(rows, block.rows)
            builder.take(block, column, part.size, part.offset)
        rows = rows or (((ways, None),) if ways > 1 else ())
        return SymbolicValue(value, None, [builder.block(rows, value.leaves[0].size // ways)])

    def unpacked(self, parts: Sequence[Part], ways: int, value: Value) -> SymbolicValue:
        """Build the leaves of `value` from `parts` of buffers of `ways` rows."""
        builders = [BlockBuilder() for _ in value.leaves]
        rows: list[Rows] = [() for _ in value.leaves]
        for part in parts:
            (buffer,), column = self.symbolic[part.value].blocks, part.offset
            if ways == 1:
                buffer, column = blocks.row_of(self.algebra, buffer, column, part.size)
            else:
                buffer = blocks.in_rows(buffer, ways, buffer.size // ways)
                rows[part.leaf] = _same_rows(rows[part.leaf], buffer.rows)
            builders[part.leaf].take(buffer, column, part.size, part.start)
        leaves: list[Block] = []
        for index, leaf in enumerate(value.leaves):
            block = builders[index].block(rows[index], row_size(value.kind, leaf, ways))
            leaves.append(uncut_constant_rows(blocks.collapsed(block, leaf.size, leaf=True)))
        return uniform_if_whole(value, leaves)

    def sliced(
        self, operand: SymbolicValue, value: Value, ways: int, digits: Sequence[tuple[int, Symbol]]
    ) -> SymbolicValue:
        """The row with these digits of every leaf, cut into `ways` rows; scalars are kept."""
        if operand.uniform is not None and (value.whole or value.kind == "records"):
            chain, term = operand.uniform
            return SymbolicValue(value, (blocks.cut(chain, ways, digits), term))
        used = [symbol for count, symbol in digits if count > 1]
        symbols = {blocks.row(index): symbol for index, symbol in enumerate(used)}

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
        raise InexpressibleError("rows of different ranks are put side by side")
    return first or second
