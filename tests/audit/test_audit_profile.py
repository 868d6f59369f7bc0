"""The profile for XLA's scheduler, and the report of the ops that it moves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import pytest
from test_audit_estimate import GROUPS, HEAD, OVERLAPPED

import commplan
from commplan.cli import main
from commplan.diagnostics import CommplanError
from commplan.lowering.audit import Machine, StepText, audit, audit_text
from commplan.lowering.gpu.estimate import estimate
from commplan.lowering.gpu.profile import EXCHANGE_WEIGHT, profile, shifts

MACHINE = Machine(flops=10_000, memory=10_000, bus=1_000, start=1)
# The all-reduce is complete before the product of `OVERLAPPED` is issued.
AWAITED_FIRST = re.sub(r"(  %product = .*\n)(  %done = .*\n)", r"\2\1", OVERLAPPED)
LOOP = f"""\
{HEAD}
%body (s: (s32[], f32[1000])) -> (s32[], f32[1000]) {{
  %s = (s32[], f32[1000]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[1000]{{0}} get-tuple-element(%s), index=1
  %reduced = f32[1000]{{0}} all-reduce(%x), {GROUPS}
  ROOT %t = (s32[], f32[1000]{{0}}) tuple(%i, %reduced)
}}

%condition (s.1: (s32[], f32[1000])) -> pred[] {{
  %s.1 = (s32[], f32[1000]{{0}}) parameter(0)
  ROOT %less = pred[] constant(false)
}}

ENTRY %main (p: (s32[], f32[1000])) -> (s32[], f32[1000]) {{
  %p = (s32[], f32[1000]{{0}}) parameter(0)
  ROOT %while.1 = (s32[], f32[1000]{{0}}) while(%p), condition=%condition, body=%body, \
backend_config={{"known_trip_count":{{"n":"6"}}}}
}}
"""


def costs(text: str) -> dict[str, float]:
    lines = profile(text, MACHINE).decode().splitlines()
    pairs = (re.fullmatch(r'costs \{ name: "(\S+)" cost_us: ([\d.]+) \}', line) for line in lines)
    return {match[1]: float(match[2]) for match in pairs if match is not None}


def test_each_instruction_takes_what_the_estimate_says() -> None:
    # 20,000 operations; 6,000 bytes over the bus, after a start of a second; 8,000 bytes of memory.
    assert costs(OVERLAPPED) == {"product": 2e6, "start": 7e6, "copy": 0.8e6}


def test_instructions_have_the_names_that_the_scheduler_saw() -> None:
    """XLA renames a collective that it makes synchronous after it has scheduled it."""
    renamed = re.sub(
        r"%reduced = .*", r'\g<0>, metadata={scheduling_name="all-reduce-start.3"}', LOOP, count=1
    )
    assert costs(renamed) == {"all-reduce-start.3": 7e6, "while.1": 42e6, "s.1": 0, "less": 0}
    (collective,) = audit_text(renamed).collectives
    assert (collective.name, collective.start == collective.done) == ("all-reduce-start.3", True)


def test_an_exchange_is_said_to_take_more() -> None:
    seconds = costs(OVERLAPPED)["start"] / 1e6 - MACHINE.start
    exchanged = costs(OVERLAPPED.replace("all-reduce", "all-to-all"))["start"]
    assert exchanged == pytest.approx(1e6 * EXCHANGE_WEIGHT * (MACHINE.start + seconds / 2))


def test_a_loop_takes_its_body_as_often_as_it_goes_round() -> None:
    assert costs(LOOP) == {"reduced": 7e6, "while.1": 42e6, "s.1": 0, "less": 0}


def test_what_moves_is_what_other_products_run_under() -> None:
    before, after = audit_text(AWAITED_FIRST), audit_text(OVERLAPPED)
    times = estimate(before, MACHINE), estimate(after, MACHINE)
    (shift,) = shifts(before, after, times)
    assert (shift.started, shift.awaited, shift.moved) == ((0, 0), (0, 1), True)
    assert shift.exposed == (pytest.approx(7), pytest.approx(5))
    (same,) = shifts(before, before, (times[0], times[0]))
    assert not same.moved


def reduced() -> Any:
    return commplan.loads(
        "plan reduced\naxis data = 4\ninput x : f32[1000] partial data\n"
        "each step {\n    x = reduce x over data by sum\n    output x\n}\n"
    ).compile()


def test_an_audit_shows_both_and_holds_both_to_the_plan() -> None:
    def named(text: str) -> str:
        scope = ', metadata={op_name="jit(step)/commplan/step/line5/psum"}'
        return text.replace("to_apply=%sum\n", f"to_apply=%sum{scope}\n", 1)

    schedule, before, after = reduced().schedule, named(AWAITED_FIRST), named(OVERLAPPED)
    result = audit(schedule, StepText(before, before, "gpu", after), machine=MACHINE)
    assert result.ok and result.profiled is not None
    assert (
        "with a profile of these times (PGLE) it waits 5 s instead of 7 s, in a step of 7.8 s "
        "instead of 9.8 s; 1 of 1 collective moved"
    ) in str(result)
    assert re.search(
        r"step +5 +all_reduce\(sum\) f32\[1000\] over 1 x 4 ranks +0 products +0 -> 1 products +7 s -> 5 s",
        str(result),
    )
    assert result.data()["profiled"]["moved"][0]["awaited"] == (0, 1)
    still = audit(schedule, StepText(before, before, "gpu", before), machine=MACHINE)
    assert "none of 1 collective moved" in str(still)
    swapped = [text.replace("all-reduce", "all-to-all") for text in (before, after)]
    weighed = audit(schedule, StepText(swapped[0], swapped[0], "gpu", swapped[1]), machine=MACHINE)
    assert "with a profile of these times, 2 times as long for an exchange (PGLE) " in str(weighed)
    without = after.replace("all-reduce-start(%x)", "copy(%x)").replace("all-reduce-done", "copy")
    without_collective = audit(schedule, StepText(before, before, "gpu", without), machine=MACHINE)
    assert not without_collective.differences and not without_collective.ok
    assert "only with the profile:" in str(without_collective)


def test_cpus_take_no_profile(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    program = reduced()
    for options in ({}, {"machine": "h100:1x4"}):
        with pytest.raises(CommplanError, match="CP1156"):
            program.audit(jax.jit(lambda x: x), 1.0, pgle=True, **options)
    file = tmp_path / "reduced.plan"
    file.write_text("plan reduced\n")
    assert main(["audit", str(file), "--pgle"]) == 1
    assert "error[CP1156]: --pgle needs target GPUs" in capsys.readouterr().err
