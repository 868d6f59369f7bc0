"""What a function makes has the leaves that its declaration says: a value without any is refused."""

from __future__ import annotations

import msgspec
import pytest

import commplan
from commplan.ir import schedule as ir
from commplan.verify import verify

PLAN = """plan decoding

ensemble member = 2
axis     data   = 2

source images : bytes
fn decode(bytes) -> u8[4] on host
fn scale(u8[4]) -> f32[4] on device

each step {
    raw    = load images batch 8 visit exactly_once seed 1
    pixels = map decode(raw)
    batch  = map scale(pixels)
    output batch
}
"""


@pytest.mark.parametrize("fn", ["decode", "scale"])
def test_a_result_without_leaves_is_refused(fn: str) -> None:
    schedule = commplan.loads(PLAN).compile().schedule
    phase = schedule.phases[0]
    results = {ref for op in phase.ops if isinstance(op, ir.Map) and op.fn == fn for ref in op.results}
    assert results and not verify(schedule)
    values = tuple(
        msgspec.structs.replace(value, leaves=()) if value.id in results else value for value in phase.values
    )
    edited = msgspec.structs.replace(phase, values=values)
    problems = verify(msgspec.structs.replace(schedule, phases=(edited,)))
    assert "CP0731" in {problem.code for problem in problems}
