"""`run.batches(member=m)` for members that share loads: finds the processes that share a stream of units.

`ClockedPhases` makes the batches of one member. `MultirateBatches` iterates over all members of a process.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from commplan.ir import schedule as ir
from commplan.runtime.context import Context
from commplan.runtime.input.device.batches import carried_group, refuse_group, this_host
from commplan.runtime.input.group import Blame, Group
from commplan.runtime.input.iterator import PhaseBatches
from commplan.runtime.input.multirate.clocked import (
    ClockedBatches,
    ClockedPhase,
    PeerGroup,
    SharingOptions,
    member_batches,
)
from commplan.runtime.input.multirate.schedule import ClockPlan, clock_plan, clocked
from commplan.runtime.input.observe.accounting import Meter, Summary, merged
from commplan.runtime.input.observe.wait_log import PATIENCE_S

if TYPE_CHECKING:
    from commplan.runtime.input.device.batches import Batches
    from commplan.runtime.run import Run


@dataclass
class ClockedPhases:
    """The phases of a run whose members share loads. The members of a process share one stream per phase."""

    _phases: dict[str, ClockedPhase] = field(default_factory=dict[str, ClockedPhase])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def member(
        self,
        context: Context,
        phase: ir.Phase,
        sources: Mapping[str, Any],
        state: Mapping[str, int] | None,
        among: Group | None,
        timeout: float | None,
        workers: str = "threads",
    ) -> ClockedBatches | PhaseBatches:
        """The batches of one member.

        If `among` is None, the first member that a process opens calls a collective operation to find the
        group: every process of the job must open one. Its `timeout` and `workers` apply to the stream.

        Args:
            context: the member's context.
            phase: the phase.
            sources: the sources by name. Those of the first member that is opened are used.
            state: the state to continue from; None for the first batch.
            among: the processes that share the stream, one member each; None to find them.
            timeout: seconds to wait for a live but silent peer; None for `PATIENCE_S`.
            workers: "threads" or "processes", which run the host functions.

        Raises:
            CommplanError: as `ClockedBatches`; CP0927 if `among` has several processes and no value is
                shared; CP0945 if the batch sizes of two loads are not proportional.
        """
        schedule = context.whole or context.schedule
        with self._lock:
            if phase.name not in self._phases:
                plan = clock_plan(schedule, phase.name)
                self._phases[phase.name] = ClockedPhase(plan, sources, context.functions)
            clocks = self._phases[phase.name]
        member = context.members[clocks.plan.clock]
        timeout_s = PATIENCE_S if timeout is None else timeout

        def ask(position: int) -> PeerGroup | None:
            """See `SharingOptions.ask`. position: the first unit of this process."""
            if among is None:
                return _peer_group(context, clocks.plan, position, member, timeout_s)
            if among.count > 1 and clocks.plan.shared is None:
                refuse_group(schedule, phase.name)
            return PeerGroup(among, position, tuple(range(among.count)))  # one member each, all at one unit

        options = SharingOptions(ask, timeout_s, workers)
        return member_batches(
            clocks, member, local=context.machine.input.local(), state=state, options=options
        )


def _peer_group(
    context: Context, plan: ClockPlan, position: int, member: int, timeout: float
) -> PeerGroup | None:
    """The processes that share the stream, by a collective call; None if no other process shares it.

    Over MPI, the processes of all hosts share. On a mesh of devices, those of a host do: all processes would
    have to call its collectives in the same order, and members with separate clocks have no common steps.

    Args:
        context: the context of the member.
        plan: the schedules of the members.
        position: the first unit of this process.
        member: the member of this process that was opened first.
        timeout: seconds to wait for a live but silent peer.
    """
    machine, members = context.machine, plan.schedule.axis(plan.clock).size
    host = this_host()
    facts = [plan.schedule.plan_digest, plan.phase, "one by one"]
    if machine.layout == "global":
        facts.append(host)
    # The place of a process encodes both numbers. The others decode them below.
    peers = machine.input.peers("\0".join(facts), host, position * members + member, timeout)
    if peers is None:
        return None
    ops = plan.schedule.phase(plan.phase).ops
    reads = [op for op in ops if isinstance(op, ir.Read)]
    failures = {op.hints.on_failure for op in ops if isinstance(op, ir.Read | ir.Share)}
    on_failure = "continue" if "continue" in failures else "stop"
    first, share = next((op for op in reads if op.clock), reads[0]), plan.share
    blame = Blame(f"load {first.source} over {plan.clock}", first.span, plan.schedule.file)
    member_indices = tuple(place % members for place in peers.places)
    design, readers = ("all_shared", None) if share is None else (share.design, share.readers)
    if readers is not None:  # the members of this host may include no reader
        readers = max(1, sum(member < readers for member in member_indices))
    group = carried_group(machine, peers, design, blame, on_failure, timeout, readers)
    return PeerGroup(group, min(peers.places) // members, member_indices)


class MultirateBatches(Iterator[dict[str, Any]]):
    """The batches of all members that this process holds, for a program that runs them together.

    An item holds the batches that are due: `{"pixels of member 0": array, ...}`. Each `iter()` runs one
    epoch, with as many items as the member with the most batches has. During an epoch all members progress by
    equal fractions of theirs.

    Attributes:
        steps: the number of items of an epoch.

    Args:
        run: the run.
        phase: the name of a phase whose members have separate clocks.
    """

    def __init__(self, run: Run, phase: str) -> None:
        axis = clocked(run.context.schedule.phase(phase)) or ""
        members = run.context.machine.input.local()[axis]
        self._feeds: dict[int, Batches] = {member: run.batches(phase, member=member) for member in members}
        self.steps = max(feed.steps for feed in self._feeds.values())
        self._done = 0

    def __iter__(self) -> MultirateBatches:
        self._done = 0
        for feed in self._feeds.values():
            iter(feed)
        return self

    def __next__(self) -> dict[str, Any]:
        if self._done == self.steps:
            raise StopIteration
        self._done += 1
        batches: dict[str, Any] = {}
        for member, feed in self._feeds.items():
            # A batch is due when the fastest members reach the fraction of the epoch at which it ends.
            if self._done * feed.steps // self.steps > (self._done - 1) * feed.steps // self.steps:
                batches |= {f"{name} of member {member}": array for name, array in next(feed).items()}
        return batches

    @property
    def meters(self) -> tuple[Meter, ...]:
        """The meters of all members, without duplicates."""
        return tuple({id(meter): meter for feed in self._feeds.values() for meter in feed.meters}.values())

    def summary(self) -> Summary:
        """The cost of the input so far, over all members."""
        return merged(meter.summary() for meter in self.meters)

    def close(self) -> None:
        """End the work ahead of all members. May be called twice."""
        for feed in self._feeds.values():
            feed.close()


def batches_of(run: Run, phase: str) -> Batches | MultirateBatches:
    """The batches of a phase; those of all members of this process if members have separate clocks."""
    return MultirateBatches(run, phase) if clocked(run.context.schedule.phase(phase)) else run.batches(phase)
