"""The op `read`: reads a batch of records."""

from collections.abc import Container, Mapping

from commplan.ir.ops.base import BaseOp, Ranks, Work
from commplan.ir.refs import Ref
from commplan.ir.roles import Cost, Execution
from commplan.ir.stages import rules
from commplan.ir.stages.load import LoadFields
from commplan.ir.transfer import Results, ValueTypes, Violations, broken
from commplan.ir.types import ArrayType, AxisKind, DType, Placement
from commplan.ir.values import Leaf, Value


class Read(LoadFields, BaseOp, frozen=True, tag="read", gc=False):
    """Read a batch of records of a source. The fields are those of the stage `load`."""

    APPLIED_HINTS = ("on_error", "on_failure")

    after: Execution[tuple[Ref, ...]] = ()
    lane: Cost[str] = "host_read"

    def check(self, types: ValueTypes) -> Violations:
        if self.source not in types.sources:
            yield "CP0730", f"there is no source `{self.source}`"
        yield from broken("CP0735", rules.dropped_tail(self.visit, self.tail))
        yield from broken("CP0735", rules.short_tail(self.tail, self.split))
        wrong = [*types.check_axes(self.split), *types.check_axes(self.per, AxisKind.ENSEMBLE)]
        wrong += types.check_axes((self.clock,) if self.clock is not None else (), AxisKind.ENSEMBLE)
        yield from wrong
        if not self.batch or min(self.batch) < 1:
            yield "CP0735", f"a batch of {list(self.batch)} records cannot be read"
        elif not wrong:
            yield from self._check_records(types, types.ranks(self.split))

    def _check_records(self, types: ValueTypes, ways: int) -> Violations:
        """Check that the batch can be split among `ways` ranks, and that the result has a rank's records."""
        yield from broken("CP0735", rules.even_batch(self.batch, self.split, types.ranks))
        yield from broken("CP0735", rules.member_batches(self.batch, self.clock, types.ranks))
        local = max(self.batch) // ways
        if any(leaf.shape[:1] != (local,) for leaf in types.values[self.result].leaves):
            yield "CP0731", f"`{self.result}` does not hold {local} records on each rank"

    def transfer(self, types: ValueTypes) -> Results:
        """The leaves of a tree of records are declared.

        If members have different batches, all have the shape of the largest one.
        """
        record, leaves = types.sources[self.source].type, types.values[self.result].leaves
        if isinstance(record, ArrayType):
            shape = (max(self.batch) // types.ranks(self.split), *record.shape)
            leaves = (Leaf("", shape, record.dtype),)
        per = (*self.per, *((self.clock,) if self.clock else ()))
        records = Value(self.result, "records", leaves, Placement(types.ordered(per), split=self.split))
        if self.count is None:
            return (records,)
        placement = Placement(types.ordered((*per, *self.split)))
        return (records, Value(self.count, "array", (Leaf("", (), DType.I32),), placement))

    def detail(self, values: Mapping[Ref, Value]) -> str:
        ahead = self.hints.device_prefetch
        on_devices = f", {ahead} ahead on the devices" if ahead else ""
        return f"{self.source}, visit {self.visit}, tail {self.tail}{on_devices}"

    def runs_ahead(self, available: Container[Ref]) -> bool:
        return True

    def work(self, nbytes: Mapping[Ref, int], ranks: Ranks) -> Work:
        return Work("call", f"source `{self.source}`", 0, name=self.source)
