"""The op `share`: distributes a loaded value between processes."""

from collections.abc import Container, Mapping

from commplan.diagnostics import Span
from commplan.ir.hints import NO_HINTS, Hints
from commplan.ir.ops.base import BaseOp, Ranks, Work
from commplan.ir.refs import Ref, name_of
from commplan.ir.remark import Design
from commplan.ir.roles import Cost, Execution, Meaning, Presentation
from commplan.ir.stages import rules
from commplan.ir.symbolic.deferred import Interpretation, steps
from commplan.ir.transfer import Results, ValueTypes, Violations, broken, value_like
from commplan.ir.types import AxisKind, Over
from commplan.ir.values import Value


class Share(BaseOp, frozen=True, tag="share", gc=False):
    """Distribute a loaded value, which is the same for all members of ensembles, between processes.

    Attributes:
        axes: The ensembles.
        design: How processes obtain the value:

            - `duplicate`: each process computes it.
            - `all_shared`: each process computes a part of it, and all gather the parts.
            - `single_broadcast`, `multi_broadcast`: one or several processes compute it and send it.
        readers: The number of processes that compute the value; None for other designs than broadcasts, or
            for the default.
        hints: The options; none unless `pinned`.
        pinned: Whether the plan chose the design and its options.
    """

    APPLIED_HINTS = ("on_failure",)

    result: Meaning[Ref]
    operand: Meaning[Ref]
    axes: Execution[Over]
    design: Execution[Design]
    span: Presentation[Span]
    readers: Execution[int | None] = None
    hints: Meaning[Hints] = NO_HINTS
    after: Execution[tuple[Ref, ...]] = ()
    lane: Cost[str] = "host_compute"
    pinned: Meaning[bool] = False

    def check(self, types: ValueTypes) -> Violations:
        operand = types.values[self.operand]
        name = name_of(self.operand)
        yield from broken("CP0731", rules.shareable_operand(name, records=operand.kind == "records"))
        wrong = [*types.check_axes(self.axes, AxisKind.ENSEMBLE)]
        yield from wrong
        if self.hints != NO_HINTS and not self.pinned:
            yield "CP0735", f"`{name}` is shared with options, and the plan does not share it"
        varying = [axis for axis in self.axes if operand.placement.varies(axis)]
        yield from broken("CP0734", rules.same_for_members(name, varying))
        if not wrong:
            yield from broken(
                "CP0735", rules.reader_or_owner_count("readers", self.readers, self.axes, types.ranks)
            )

    def transfer(self, types: ValueTypes) -> Results:
        return (value_like(types.values[self.operand], self.result),)

    def meaning(self, env: Interpretation) -> None:
        if not self.pinned:
            env.rename(self.result, env.get(self.operand), {})
        else:
            steps.mark_shared(
                env, self.result, self.operand, self.axes, self.design, self.readers, self.hints
            )

    def detail(self, values: Mapping[Ref, Value]) -> str:
        readers = f", {self.readers} readers" if self.readers else ""
        return f"{self.design} over {', '.join(self.axes)}{readers}"

    def runs_ahead(self, available: Container[Ref]) -> bool:
        return self.operand in available

    def work(self, nbytes: Mapping[Ref, int], ranks: Ranks) -> Work:
        """The gathering of all parts, or a broadcast of the value; nothing for `duplicate`."""
        title, size = f"sharing `{self.result}` by {self.design}", nbytes.get(self.result, 0)
        match self.design:
            case "duplicate":
                return Work("copy", title, 0)
            case "all_shared":
                return Work("all_gather", title, size / ranks(self.axes), self.axes)
            case _:
                return Work("broadcast", title, size, self.axes)
