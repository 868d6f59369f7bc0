"""What a function makes has the leaves that its declaration says: values without any are refused."""

from __future__ import annotations

import msgspec

import commplan
from commplan.verify import verify


def test_decoded_records_without_leaves_are_refused() -> None:
    """Both the records that a member decodes and those that it shares: neither contradicts the other."""
    schedule = (
        commplan.load("examples/plans/ensemble_shared.plan")
        .compile(passes="share{design=all_shared}")
        .schedule
    )
    (phase,) = schedule.phases
    decoded = {"pixels.0/own", "pixels.0"}
    assert decoded <= {value.id for value in phase.values} and not verify(schedule)
    values = tuple(
        msgspec.structs.replace(value, leaves=()) if value.id in decoded else value for value in phase.values
    )
    edited = msgspec.structs.replace(phase, values=values)
    problems = verify(msgspec.structs.replace(schedule, phases=(edited,)))
    assert {problem.code for problem in problems} == {"CP0731"}
