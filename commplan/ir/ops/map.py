from collections.abc import Container, Mapping

from commplan.diagnostics import Span
from commplan.ir.hints import Hints
from commplan.ir.ops.base import BaseOp, Ranks, Work
from commplan.ir.roles import Ref
from commplan.ir.symbolic import steps
from commplan.ir.symbolic.interpretation import Interpretation
from commplan.ir.values import Value


class Map(BaseOp, frozen=True, tag="map", gc=False):
    """Apply a bound function. `per_record` on the device means `vmap` over the leading dimension.

    `per`: the ensembles between whose members a random function differs. `hints.overlap`: it is an update
    that may run in pieces, each beside the sums that others wait for.
    """

    READS = ("operands",)
    WRITES = ("results",)

    results: tuple[Ref, ...]
    fn: str
    operands: tuple[Ref, ...]
    span: Span
    per: tuple[str, ...] = ()
    per_record: bool = False
    random: bool = False
    hints: Hints = Hints()
    after: tuple[Ref, ...] = ()
    lane: str = "device"  # or host_compute

    def meaning(self, env: Interpretation) -> None:
        marks = steps.marks(self.results, self.per, random=self.random)
        env.call(self.fn, env.each(self.operands), self.results, marks, by_record=self.per_record)

    def detail(self, values: Mapping[Ref, Value]) -> str:
        return f"{self.fn}, record by record" if self.per_record else self.fn

    def runs_ahead(self, known: Container[Ref]) -> bool:
        alone = self.lane == "host_compute" or self.per_record
        return alone and all(ref in known for ref in self.operands)

    def work(self, nbytes: Mapping[Ref, int], ranks: Ranks) -> Work:
        return Work("call", f"function `{self.fn}`", 0, name=self.fn)
