"""Functions that follow one another: called on a record after the other, with nothing copied in between."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import commplan
from commplan.diagnostics import CommplanError
from commplan.runtime.input.iterator import PhaseBatches

PLAN = """
plan chain
ensemble member = 2
source numbers : i64
fn widen(i64) -> i64[4] on host
fn double(i64[4]) -> i64[4] on host
fn total(i64[4]) -> i64 on host
each step {{
    raw    = load numbers batch 24 visit exactly_once seed 3 {hints}
    wide   = map widen(raw)
    twice  = map double(wide)
    totals = map total(twice)
    output totals
}}
"""
Numbers = npt.NDArray[np.int64]


class Program:
    """Each function returns the same memory at every call; `calls` lists the calls in order."""

    def __init__(self, bad: int = -1) -> None:
        self.calls: list[str] = []
        self._bad, self._wide, self._twice = bad, np.empty(4, np.int64), np.empty(4, np.int64)

    def widen(self, number: int) -> Numbers:
        self.calls.append("widen")
        if number == self._bad:
            raise ValueError("too wide")
        self._wide[...] = number
        return self._wide

    def double(self, wide: Numbers) -> Numbers:
        self.calls.append("double")
        assert not wide.flags.writeable
        np.multiply(wide, 2, out=self._twice)
        return self._twice

    def total(self, twice: Numbers) -> np.int64:
        self.calls.append("total")
        return np.int64(twice.sum())


def batches(program: Program, hints: str = "{ cores = 1 }") -> PhaseBatches:
    schedule = commplan.loads(PLAN.format(hints=hints)).compile().schedule
    functions: dict[str, Any] = {"widen": program.widen, "double": program.double, "total": program.total}
    return PhaseBatches(schedule, "step", {"numbers": np.arange(24)}, functions)


def test_nothing_is_kept_between_them() -> None:
    program = Program()
    with batches(program) as feed:
        (batch,) = feed
        (totals,), (ids,) = batch.values.values(), batch.records.values()
        assert totals.reshape(-1, 24)[0].tolist() == (8 * ids.reshape(-1, 24)[0]).tolist()
        assert program.calls == ["widen", "double", "total"] * 24
        lines = {line.what: line for line in feed.summary().lines}
        assert [lines[f"map {name}"].records for name in ("widen", "double", "total")] == [24, 24, 24]
        assert [lines[f"map {name}"].nbytes for name in ("widen", "double", "total")] == [768, 768, 192]
        assert all(line.cpu_s > 0 for line in lines.values())


def test_a_record_that_fails_is_the_first_function_s() -> None:
    with batches(Program(bad=5)) as feed, pytest.raises(CommplanError, match="record 5") as error:
        list(feed)
    assert "`widen`" in str(error.value) and error.value.diagnostics[0].code == "CP0906"


def test_a_record_that_is_skipped_is_counted_where_it_failed() -> None:
    with batches(Program(bad=5), "{ cores = 1, on_error = skip }") as feed:
        (batch,) = feed
        (totals,) = batch.values.values()
        assert 40 not in totals.reshape(-1, 24)[0].tolist()
        lines = {line.what: line for line in feed.summary().lines}
        assert [lines[f"map {name}"].skipped for name in ("widen", "double", "total")] == [1, 0, 0]
        assert [lines[f"map {name}"].records for name in ("widen", "double", "total")] == [23, 23, 23]


SHARED_MEMORY = """
plan twice
source numbers : i64
fn halves(i64) -> i64[4], i64[4] on host
fn copied(i64[4]) -> i64[4] on host
fn difference(i64[4], i64[4]) -> i64[4] on host
each step {
    raw, n      = load numbers batch 4 visit exactly_once seed 7
    left, right = map halves(raw)
    a           = map copied(left)
    b           = map copied(right)
    apart       = map difference(a, b)
    once        = map copied(left)
    again       = map copied(once)
    output raw, apart, again
}
"""


@pytest.mark.parametrize("names", [1, 2])
def test_memory_that_a_function_returns_each_time_is_shown_by_one_value_at_a_time(names: int) -> None:
    memory = np.empty(4, np.int64)

    def copied(values: Numbers) -> Numbers:
        memory.fill(0)
        np.add(memory, values, out=memory)
        return memory

    functions: dict[str, Any] = {
        "halves": lambda number: (np.full(4, number), np.full(4, -number)),
        "copied": copied,
        "difference": lambda first, second: first - second,
    }
    text = SHARED_MEMORY
    if names > 1:  # the same function under another one
        functions["other"] = copied
        text = text.replace("fn copied", "fn other(i64[4]) -> i64[4] on host\nfn copied", 1)
        text = text.replace("b           = map copied", "b           = map other")
        text = text.replace("again       = map copied", "again       = map other")
    schedule = commplan.loads(text).compile().schedule
    with PhaseBatches(schedule, "step", {"numbers": np.arange(4)}, functions) as feed:
        (batch,) = feed
        values = {each.name: batch.values[each.value] for each in schedule.phase("step").outputs}
    assert values["apart"][:, 0].tolist() == (2 * values["raw"]).tolist()
    assert values["again"][:, 0].tolist() == values["raw"].tolist()
