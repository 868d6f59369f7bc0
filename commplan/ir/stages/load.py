from typing import Literal

from commplan.diagnostics import Span
from commplan.ir.hints import NO_HINTS, Hints
from commplan.ir.roles import Ref
from commplan.ir.stages.base import BaseStage


class Load(BaseStage, frozen=True, tag="load"):
    """`result [, count] = load source batch N ...`; `batch` has one number, or one per member."""

    READS = ()
    WRITES = ("result", "count")

    result: Ref
    source: str
    batch: tuple[int, ...]
    visit: Literal["exactly_once", "at_least_once", "at_most_once"]
    seed: int
    span: Span
    count: Ref | None = None
    clock: str | None = None  # the ensemble of `batch [..] over MEMBER`
    split: tuple[str, ...] = ()
    per: tuple[str, ...] = ()
    tail: Literal["pad", "short", "drop"] = "pad"
    hints: Hints = NO_HINTS
