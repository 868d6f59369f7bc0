"""What passes decide, kept in the schedule for `explain`."""

from __future__ import annotations

from typing import Literal

import msgspec

from commplan.diagnostics import Span

Design = Literal["duplicate", "all_shared", "single_broadcast", "multi_broadcast"]


class Alternative(msgspec.Struct, frozen=True, gc=False):
    """What a pass might have taken instead. `seconds` is its predicted time, None where nothing tells;
    `why` is what else speaks against it."""

    what: str
    seconds: float | None = None
    why: str = ""


class SharingCost(msgspec.Struct, frozen=True, gc=False):
    """What a design of sharing is predicted to cost, see `commplan.input.costs`.

    cut: where members part, in words. cpu: CPU seconds per record and member. wall: seconds of a step, most
    of all spent on `waits_for`. nbytes: bytes that arrive from other hosts in a step, all hosts together.
    memory: bytes of the slots on the fullest host. limit: CPU seconds per record and member below which no
    design gets; distance: cpu over it. taken: whether the schedule does it so.
    """

    design: Design
    readers: int | None
    cut: str
    cpu: float
    wall: float
    waits_for: str
    nbytes: float
    memory: float
    limit: float
    distance: float
    taken: bool = False


class Choice(msgspec.Struct, frozen=True, gc=False):
    """What a pass decided, for `explain`: the rejected alternatives with the reason.

    seconds: the predicted time of what was chosen. source: where the times come from, the model of a
    topology or a measurement with its date, after whose they are where the choice is about several ops.
    sharing: of a choice how to share, all designs with their costs.
    """

    by: str
    what: str
    why: str
    span: Span | None = None
    rejected: tuple[str, ...] = ()
    seconds: float | None = None
    source: str = ""
    alternatives: tuple[Alternative, ...] = ()
    sharing: tuple[SharingCost, ...] = ()

    @property
    def measure(self) -> str:
        """What its seconds and those of its alternatives are: of a phase, of a collective, or of a step."""
        return {"search": "exposed", "share": "a step takes"}.get(self.by, "alone")
