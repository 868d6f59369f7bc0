"""Decisions of passes, stored in the schedule for `explain`."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from commplan.diagnostics import Span

# How processes obtain a loaded value that is the same for all members; see `ir.ops.share.Share`.
Design = Literal["duplicate", "all_shared", "single_broadcast", "multi_broadcast"]
# All designs.
DESIGNS: tuple[Design, ...] = get_args(Design)


class Alternative(msgspec.Struct, frozen=True, gc=False):
    """An alternative that a pass rejected.

    Attributes:
        what: The alternative, in words.
        seconds: Its predicted time; None without a prediction.
        why: Another reason against it; empty if the time is the only one.
    """

    what: str
    seconds: float | None = None
    why: str = ""


class SharingCost(msgspec.Struct, frozen=True, gc=False):
    """The predicted cost of a sharing design; see `commplan.input.costs`.

    Attributes:
        design: The design.
        readers: The number of readers; None for designs without readers.
        cut: The point at which members diverge, in words.
        cpu: CPU seconds per record and member.
        wall: Seconds per step.
        waits_for: The resource that accounts for most of `wall`.
        nbytes: Bytes received from other hosts per step, over all hosts.
        memory: Bytes of slots on the host with the most.
        limit: A lower bound of `cpu` over all designs.
        distance: `cpu` divided by `limit`.
        taken: Whether the schedule uses this design.
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
    """A decision of a pass, with the rejected alternatives and reasons.

    Attributes:
        by: The pass.
        what: The subject of the decision.
        why: The reason.
        span: The place of the stage in the plan; None if the decision is not about one stage.
        rejected: Rejected options, in words, without times.
        seconds: The predicted time of the choice (`measure`); None without a prediction.
        source: The origin of the times: the model of a topology, or a measurement with its date; empty
            without times.
        alternatives: Rejected alternatives with times.
        sharing: For a sharing decision, all designs with their costs; else empty.
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
        """The quantity in `seconds`, in words for `explain`.

        It is the exposed time of a phase for the pass `search`, the time of a step for `share`, and that of
        one collective alone for other passes.
        """
        return {"search": "exposed", "share": "a step takes"}.get(self.by, "alone")
