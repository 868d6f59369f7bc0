"""Events on lanes, few enough for a page: neighbours that do the same become one event."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby

import msgspec

from commplan.ir.types import timed
from commplan.report.document import Event, Lane

SHOWN = 3000  # events of one timeline
LANES = 48


def condensed(lanes: Sequence[Lane], shown: int = SHOWN) -> tuple[tuple[Lane, ...], str]:
    """`lanes` with at most about `shown` events, and what was left out, in words.

    Neighbours on a lane with the same name, line and algorithm are put together, in groups no larger than it
    takes. Where that is not enough, the longest stay.
    """
    kept = lanes[:LANES]
    total = sum(len(lane.events) for lane in kept)
    remarks = [f"{len(lanes) - LANES:,} of {len(lanes):,} lanes are not shown"] if len(lanes) > LANES else []
    if total > shown:
        size = math.ceil(total / shown)
        kept = [_replaced(lane, _grouped(lane.events, size)) for lane in kept]
        remarks.append(f"{total:,} events stand together in groups of up to {size:,} neighbours")
        grouped = sum(len(lane.events) for lane in kept)
        if grouped > shown:
            longest = sorted((e.seconds for lane in kept for e in lane.events), reverse=True)[shown - 1]
            kept = [_replaced(lane, (e for e in lane.events if e.seconds >= longest)) for lane in kept]
            left = grouped - sum(len(lane.events) for lane in kept)
            remarks.append(f"{left:,} of {grouped:,} are shorter than {timed(longest)} and not shown")
    return tuple(kept), "; ".join(remarks)


def _replaced(lane: Lane, events: Iterable[Event]) -> Lane:
    return msgspec.structs.replace(lane, events=tuple(events))


def _grouped(events: Sequence[Event], size: int) -> Iterable[Event]:
    for _, same in groupby(events, lambda event: (event.name, event.line, event.algorithm)):
        run = list(same)
        for first in range(0, len(run), size):
            yield _together(run[first : first + size])


def _together(events: Sequence[Event]) -> Event:
    if len(events) == 1:
        return events[0]
    first, end = events[0], max(event.start + event.seconds for event in events)
    nbytes: dict[str, float] = {}
    for event in events:
        for level, size in event.nbytes.items():
            nbytes[level] = nbytes.get(level, 0.0) + size
    return msgspec.structs.replace(
        first,
        seconds=end - first.start,
        count=sum(event.count for event in events),
        busy=sum(event.busy for event in events),
        alone=sum(event.alone for event in events),
        bound=sum(event.bound for event in events),
        result=f"{first.result} to {events[-1].result}",
        nbytes=nbytes,
    )
