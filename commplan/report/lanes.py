"""Reduce the number of events on lanes by merging equal neighbors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby

import msgspec

from commplan.ir.types import timed
from commplan.report.document import EventLane, LaneEvent

SHOWN = 3000  # most events of one timeline
LANES = 48  # most lanes of one timeline


def condensed(lanes: Sequence[EventLane], shown: int = SHOWN) -> tuple[tuple[EventLane, ...], str]:
    """Reduce `lanes` to `LANES` lanes with about `shown` events.

    Neighbors on a lane with equal name, line and algorithm are merged, in groups of up to ceil(total / shown)
    events. If that is not sufficient, only the longest events remain.

    Returns:
        The lanes, and a note on omitted and merged events, empty if there are none.
    """
    selected = lanes[:LANES]
    total = sum(len(lane.events) for lane in selected)
    remarks = [f"{len(lanes) - LANES:,} of {len(lanes):,} lanes are not shown"] if len(lanes) > LANES else []
    if total > shown:
        size = math.ceil(total / shown)
        selected = [_replaced(lane, _grouped(lane.events, size)) for lane in selected]
        remarks.append(f"{total:,} events are combined in groups of up to {size:,} neighbors")
        grouped = sum(len(lane.events) for lane in selected)
        if grouped > shown:
            longest = sorted((e.seconds for lane in selected for e in lane.events), reverse=True)[shown - 1]
            selected = [
                _replaced(lane, (e for e in lane.events if e.seconds >= longest)) for lane in selected
            ]
            omitted = grouped - sum(len(lane.events) for lane in selected)
            remarks.append(f"{omitted:,} of {grouped:,} are shorter than {timed(longest)} and not shown")
    return tuple(selected), "; ".join(remarks)


def _replaced(lane: EventLane, events: Iterable[LaneEvent]) -> EventLane:
    """`lane` with other events."""
    return msgspec.structs.replace(lane, events=tuple(events))


def _grouped(events: Sequence[LaneEvent], size: int) -> Iterable[LaneEvent]:
    """Merge up to `size` equal neighbors."""
    for _, neighbors in groupby(events, lambda event: (event.name, event.line, event.algorithm)):
        equal = list(neighbors)
        for first in range(0, len(equal), size):
            yield _merged(equal[first : first + size])


def _merged(events: Sequence[LaneEvent]) -> LaneEvent:
    """One event for `events`, from the first start to the last end.

    Fields of recorded events, such as `waited`, are those of the first one.
    """
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
