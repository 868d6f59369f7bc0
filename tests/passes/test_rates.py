"""rates: the round, the buffer and the lag are computed, stored with the load's line, and printed."""

from __future__ import annotations

from pathlib import Path

import pytest

import commplan
from commplan.cli import main
from commplan.ir.remark import Choice
from commplan.ir.schedule import Schedule
from commplan.ir.serialization.text import parse_schedule, print_schedule

PLANS = Path(__file__).parents[2] / "examples" / "plans"
OTHER = """plan clocks

ensemble member = 2
axis     data   = 2

source images : bytes
source texts  : i32[8]
fn decode(bytes) -> u8[4, 4] on host
fn mirror(u8[4, 4]) -> u8[4, 4] on host random

each step {
    raw    = load images batch [4, 6] over member split data visit exactly_once seed 5 { prefetch = 3 }
    pixels = map decode(raw)
    own    = map mirror(pixels) per member
    output own
}

phase words {
    x = load texts batch [10, 4] over member per member visit at_least_once seed 5
    output x
}
"""


def chosen(schedule: Schedule) -> list[Choice]:
    return [choice for choice in schedule.choices if choice.by == "rates"]


def test_the_round_the_buffer_and_the_lag_are_recorded(tmp_path: Path) -> None:
    path = tmp_path / "clocks.plan"
    path.write_text(OTHER)
    schedule = commplan.load(path).compile().schedule
    step, words = chosen(schedule)
    assert (
        step.what
        == "`raw` of step by the clocks of `member`: a round of 12 records (3 steps of batch 4, 2 of 6)"
    )
    # 4 * 6 + 4 - 2 records of 16 bytes: the operand of `mirror`, the last value that is the same for all
    # members.
    assert step.why.startswith("at most 26 records are kept (416 B), in units of 2, 3 batches ahead; ")
    assert "4 records apart at most, and none gets more than 26 ahead" in step.why
    assert step.span is not None
    assert step.span.line == 12
    assert words.what.endswith("a round of 20 records (2 steps of batch 10, 5 of 4)")
    assert words.why.startswith(
        "at most 32 records are kept, in units of 2, 2 batches ahead"
    )  # each has its own order
    assert parse_schedule(print_schedule(schedule)) == schedule


def test_members_with_one_clock_have_no_rates() -> None:
    schedule = commplan.load(PLANS / "ensemble_shared.plan").compile().schedule
    assert chosen(schedule) == []
    assert ",rates," in schedule.pipeline


def test_the_pass_may_be_left_out() -> None:
    schedule = commplan.load(PLANS / "ensemble_rates.plan").compile(passes="share").schedule
    assert chosen(schedule) == []


def test_explain_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(PLANS / "ensemble_rates.plan")]) == 0
    text = capsys.readouterr().out
    assert (
        "rates chose `raw` of step by the clocks of `member`: a round of 64 records (2 steps of batch 32"
        in text
    )
    assert "at most 192 records are kept (2.25 MiB), in units of 32, 2 batches ahead" in text
    assert "members that keep pace are 32 records apart at most" in text
