"""The op `map`: applies a function of the user, or a built-in one."""

from collections.abc import Container, Mapping

from commplan.ir.ops.base import BaseOp, Ranks, Work
from commplan.ir.refs import Ref, name_of
from commplan.ir.roles import Execution, Meaning, Structure
from commplan.ir.stages.builtins import Builtin
from commplan.ir.stages.map import MapFields
from commplan.ir.symbolic.deferred import Interpretation
from commplan.ir.transfer import Results, ValueTypes, Violations, broken, shown, value_like
from commplan.ir.types import ArrayType, AxisKind, sized
from commplan.ir.values import Leaf, Value


class Map(MapFields, BaseOp, frozen=True, tag="map", gc=False):
    """Apply a function. `per_record` on the device means `vmap` over the leading dimension.

    Attributes:
        random: Whether the function takes a source of random numbers. They differ between the members of the
            ensembles `per`.
        stream: The index of a random call among those of its function in the phase, from 1, in the order of
            the plan; 0 if the function is not random.
        lane: `device` or `host_compute`, the processor of the function.
    """

    APPLIED_HINTS = ("on_error",)

    random: Structure[bool] = False
    stream: Meaning[int] = 0
    after: Execution[tuple[Ref, ...]] = ()
    lane: Structure[str] = "device"

    def check(self, types: ValueTypes) -> Violations:
        fn = types.fns.get(self.fn)
        if fn is None:
            yield "CP0730", f"there is no function `{self.fn}`"
            return
        for noun, count, expected in (
            ("operands", len(self.operands), len(fn.operands)),
            ("results", len(self.results), len(fn.results)),
        ):
            if count != expected:
                yield "CP0731", f"`{self.fn}` has {expected} {noun}, {count} are written"
                return
        if self.lane != ("host_compute" if fn.where == "host" else "device") or self.random != fn.random:
            yield "CP0735", f"`{self.fn}` is a {fn.where} function, but runs on lane {self.lane}"
        is_valid_stream = self.stream >= 1 if self.random else self.stream == 0
        if not is_valid_stream:
            negation = "" if self.random else "not "
            yield "CP0735", f"`{self.fn}` is {negation}random, its stream is {self.stream}"
        yield from types.check_axes(self.per, AxisKind.ENSEMBLE)
        yield from types.check_terms(self.operands)
        kinds = zip((*self.operands, *self.results), (*fn.operands, *fn.results), strict=True)
        for index, (ref, kind) in enumerate(kinds):
            value = types.values[ref]
            by_record = self.per_record and (value.kind == "records" or index >= len(self.operands))
            if not isinstance(kind, ArrayType):
                continue  # trees are bound from outside
            if len(value.leaves) != 1 or value.leaves[0].dtype != kind.dtype:
                yield "CP0731", f"`{ref}` is {shown(value.leaves)}, but `{self.fn}` takes {kind}"
            elif by_record and value.leaves[0].shape[1:] != kind.shape:
                yield "CP0731", f"records of `{ref}` are {shown(value.leaves)}, not {kind}"
        if fn.body is not None:
            yield from self._check_builtin(fn.body, types)

    def _check_builtin(self, body: Builtin, types: ValueTypes) -> Violations:
        """Check that the operands fit the built-in function `body`, and that the results are its own."""
        values = [types.values[ref] for ref in self.operands]
        leaves = [self._elements(value) if value.kind == "records" else value.leaves for value in values]
        misfit = body.misfit(list(zip(map(name_of, self.operands), leaves, strict=True)))
        yield from broken("CP0731", misfit)
        for ref, expected in zip(self.results, body.results(leaves), strict=True) if not misfit else ():
            actual = types.values[ref]
            if (self._elements(actual) if self.per_record else actual.leaves) != expected:
                yield "CP0731", f"`{ref}` is {shown(actual.leaves)}, `{self.fn}` makes {shown(expected)}"

    def _elements(self, value: Value) -> tuple[Leaf, ...]:
        """The leaves of one record of `value`, if the op runs record by record."""
        if not self.per_record:
            return value.leaves
        return tuple(Leaf(leaf.path, leaf.shape[1:], leaf.dtype) for leaf in value.leaves)

    def random_stream(self, env: Interpretation) -> int:
        """As in `MapFields`."""
        return self.stream

    def transfer(self, types: ValueTypes) -> Results:
        """Kinds and leaves of results are declared; their placement is that of all operands, and `per`."""
        merged = types.join(types.values[ref].placement for ref in self.operands)
        placement = types.per(merged, self.per) if self.per else merged
        return tuple(value_like(types.values[ref], ref, placement) for ref in self.results)

    def detail(self, values: Mapping[Ref, Value]) -> str:
        text = f"{self.fn}, record by record" if self.per_record else self.fn
        cache, leaves = self.hints.cache, [leaf for ref in self.results for leaf in values[ref].leaves]
        each = sum(leaf.nbytes // max(1, leaf.shape[0]) for leaf in leaves if leaf.shape)
        if cache is None or not each:
            return text
        capacity = f"{cache.nbytes // each:,} records of {sized(each)} kept in"
        return f"{text}, up to {capacity} {'a file' if cache.path else 'the memory'} of each host"

    def runs_ahead(self, available: Container[Ref]) -> bool:
        is_input_work = self.lane == "host_compute" or self.per_record
        return is_input_work and all(ref in available for ref in self.operands)

    def work(self, nbytes: Mapping[Ref, int], ranks: Ranks) -> Work:
        return Work("call", f"function `{self.fn}`", 0, name=self.fn)
