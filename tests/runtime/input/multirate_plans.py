"""Members with independent clocks: plans, the batches of each member alone, and drivers."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from input_plans import FUNCTIONS, images, schedule

from commplan.diagnostics import CommplanError
from commplan.ir.schedule import Schedule
from commplan.runtime.input.host_batch import HostBatch
from commplan.runtime.input.iterator import PhaseBatches
from commplan.runtime.input.multirate.clocked import ClockedBatches, ClockedPhase, member_batches
from commplan.runtime.input.multirate.schedule import clock_plan

BODY = """
    raw, n = load images batch {batches} over member {rest}
    pixels, labels = map decode(raw)
    batch = map flip(pixels) per member
    output batch, labels, pixels, n
"""
PLAIN = """
    raw, n = load images batch {batches} over member {rest}
    pixels, labels = map decode(raw)
    output labels, pixels, n
"""
ONCE = "visit exactly_once seed 5"


def rates(
    batches: Sequence[int], visit: str = ONCE, *, body: str = BODY, axes: str = "", **more: Any
) -> Schedule:
    """A plan whose members have these batches."""
    text = body.format(batches=list(batches), rest=visit)
    return schedule(text, f"ensemble member = {len(batches)}\n{axes}", **more)


@contextmanager
def members(
    program: Schedule,
    source: object,
    *,
    functions: dict[str, Callable[..., Any]] | None = None,
    states: Sequence[dict[str, int] | None] | None = None,
    **more: Any,
) -> Generator[list[ClockedBatches | PhaseBatches]]:
    """The batches of all members of `program`, in one process."""
    clocks = ClockedPhase(clock_plan(program, "step"), {"images": source}, {**FUNCTIONS, **(functions or {})})
    count = program.axis("member").size
    with ExitStack() as stack:
        yield [
            stack.enter_context(member_batches(clocks, m, state=states[m] if states else None, **more))
            for m in range(count)
        ]


def alone(program: Schedule, member: int, records: int, **more: Any) -> PhaseBatches:
    """The batches of a member that reads everything itself."""
    source = more.pop("source", images(records))
    functions = {**FUNCTIONS, **more.pop("functions", {})}
    local = {"member": (member,), **more.pop("local", {})}
    member_plan = clock_plan(program, "step").member(member, alone=True)
    return PhaseBatches(member_plan, "step", {"images": source}, functions, local=local, **more)


def same(first: HostBatch, second: HostBatch) -> None:
    """The same batch, to the last bit."""
    assert (first.epoch, first.step) == (second.epoch, second.step)
    assert first.values.keys() == second.values.keys()
    for ref, array in first.values.items():
        np.testing.assert_array_equal(array, second.values[ref], err_msg=ref)
        assert array.dtype == second.values[ref].dtype
    mine = [ids.ravel().tolist() for ids in first.records.values()]
    assert mine == [ids.ravel().tolist() for ids in second.records.values()]
    assert list(first.seeds.values()) == list(second.seeds.values())


def in_turn(
    feeds: Sequence[ClockedBatches | PhaseBatches], receive: Callable[[int, HostBatch], None]
) -> None:
    """Drive all feeds to the end of their epochs in one thread, the slowest first."""
    for feed in feeds:
        iter(feed)
    live = dict(enumerate(feeds))
    while live:
        member = min(live, key=lambda m: (live[m].state()["step"] / live[m].steps, m))
        batch = next(live[member], None)
        if batch is None:
            del live[member]
        else:
            receive(member, batch)


def code(error: Any) -> str:
    raised: CommplanError = error.value
    return raised.diagnostics[0].code
