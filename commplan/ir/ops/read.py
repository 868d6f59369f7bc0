from collections.abc import Container, Mapping
from typing import Literal

from commplan.diagnostics import Span
from commplan.ir.hints import Hints
from commplan.ir.ops.base import BaseOp, Ranks, Work
from commplan.ir.roles import Ref
from commplan.ir.symbolic import steps
from commplan.ir.symbolic.interpretation import Interpretation
from commplan.ir.values import Value


class Read(BaseOp, frozen=True, tag="read", gc=False):
    """Read a batch of records of a source. Lane: host read."""

    READS = ()
    WRITES = ("result", "count")

    result: Ref
    source: str
    batch: tuple[int, ...]
    visit: Literal["exactly_once", "at_least_once", "at_most_once"]
    seed: int
    span: Span
    count: Ref | None = None
    clock: str | None = None
    split: tuple[str, ...] = ()
    per: tuple[str, ...] = ()
    tail: Literal["pad", "short", "drop"] = "pad"
    hints: Hints = Hints()
    after: tuple[Ref, ...] = ()
    lane: str = "host_read"

    def meaning(self, env: Interpretation) -> None:
        said = (self.batch, self.visit, self.seed, self.tail, self.hints.on_error, self.hints.on_failure)
        steps.loaded(env, self.result, self.count, self.source, said, self.split, self.per, self.clock)

    def detail(self, values: Mapping[Ref, Value]) -> str:
        return f"{self.source}, visit {self.visit}, tail {self.tail}"

    def runs_ahead(self, known: Container[Ref]) -> bool:
        return True

    def work(self, nbytes: Mapping[Ref, int], ranks: Ranks) -> Work:
        return Work("call", f"source `{self.source}`", 0, name=self.source)
