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
    batches: Sequence[int], rest: str = ONCE, *, body: str = BODY, axes: str = "", **more: Any
) -> Schedule:
    """A plan whose members have these batches."""
    text = body.format(batches=list(batches), rest=rest)
    return schedule(text, f"ensemble member = {len(batches)}\n{axes}", **more)


@contextmanager
def members(
    made: Schedule,
    source: object,
    *,
    functions: dict[str, Callable[..., Any]] | None = None,
    states: Sequence[dict[str, int] | None] | None = None,
    **more: Any,
) -> Generator[list[ClockedBatches | PhaseBatches]]:
    """The batches of all members of `made`, in one process."""
    clocks = ClockedPhase(clock_plan(made, "step"), {"images": source}, {**FUNCTIONS, **(functions or {})})
    count = made.axis("member").size
    with ExitStack() as stack:
        yield [
            stack.enter_context(member_batches(clocks, m, state=states[m] if states else None, **more))
            for m in range(count)
        ]


def alone(made: Schedule, member: int, records: int, **more: Any) -> PhaseBatches:
    """The batches of a member that reads everything itself."""
    source = more.pop("source", images(records))
    functions = {**FUNCTIONS, **more.pop("functions", {})}
    local = {"member": (member,), **more.pop("local", {})}
    own = clock_plan(made, "step").member(member, alone=True)
    return PhaseBatches(own, "step", {"images": source}, functions, local=local, **more)


def same(one: HostBatch, two: HostBatch) -> None:
    """The same batch, to the last bit."""
    assert (one.epoch, one.step) == (two.epoch, two.step)
    assert one.values.keys() == two.values.keys()
    for ref, array in one.values.items():
        np.testing.assert_array_equal(array, two.values[ref], err_msg=ref)
        assert array.dtype == two.values[ref].dtype
    mine = [ids.ravel().tolist() for ids in one.records.values()]
    assert mine == [ids.ravel().tolist() for ids in two.records.values()]
    assert list(one.seeds.values()) == list(two.seeds.values())


def in_turn(feeds: Sequence[ClockedBatches | PhaseBatches], seen: Callable[[int, HostBatch], None]) -> None:
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
            seen(member, batch)


def code(error: Any) -> str:
    raised: CommplanError = error.value
    return raised.diagnostics[0].code
