"""`run.batches(member=m)` where members go by their own clocks: who shares the stream that they take from."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from commplan.input.division import division
from commplan.ir import schedule as ir
from commplan.runtime.batches import PATIENCE_S, this_host
from commplan.runtime.context import Context
from commplan.runtime.data.attendant import Company
from commplan.runtime.data.clockplan import ClockPlan, clock_plan
from commplan.runtime.data.clocks import Ask, Clocks
from commplan.runtime.data.group import Group, group
from commplan.runtime.data.ownclock import ClockedBatches


@dataclass
class ClockedPhases:
    """The phases of a run with members by their own clocks; those of a process share one stream a phase."""

    _known: dict[str, Clocks] = field(default_factory=dict[str, Clocks])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def member(
        self,
        context: Context,
        phase: ir.Phase,
        sources: Mapping[str, Any],
        state: Mapping[str, int] | None,
        among: Group | None,
        timeout: float | None,
    ) -> Callable[[Mapping[str, tuple[int, ...]]], ClockedBatches]:
        """What makes the batches of one member, given the indices that this process holds of the other axes.

        context: the member's. among: the processes that share the stream, found by asking all if None. The
        first member of a process that opens asks: every process of the job does so alike. Errors: as
        `ClockedBatches`, and CP0945.
        """
        schedule = context.whole or context.schedule
        with self._lock:
            if phase.name not in self._known:
                plan = clock_plan(schedule, phase.name)
                self._known[phase.name] = Clocks(plan, sources, context.functions)
            clocks = self._known[phase.name]
        place = context.members[clocks.plan.clock]
        patience = PATIENCE_S if timeout is None else timeout

        def make(local: Mapping[str, tuple[int, ...]]) -> ClockedBatches:
            ask = _asking(context, clocks.plan, place, patience) if among is None else _given(among)
            return ClockedBatches(clocks, place, local=local, state=state, ask=ask, timeout=patience)

        return make


def _given(among: Group) -> Ask:
    """Processes that the caller has found: one member each, all of which begin with the same unit."""
    return lambda position: Company(among, position, tuple(range(among.count)))


def _asking(context: Context, plan: ClockPlan, member: int, timeout: float) -> Ask:
    """How to find the processes that share the stream: those of a host, over MPI those of all hosts.

    A mesh of devices shares inside hosts only: its collectives are called by all processes alike, step by
    step, and members by their own clocks have no steps in common.
    """
    machine, members = context.machine, plan.schedule.axis(plan.clock).size

    def ask(position: int) -> Company | None:
        host = this_host()
        facts = [plan.schedule.plan_digest, plan.phase, "own clocks"]
        if machine.layout == "global":
            facts.append(host)
        found = machine.peers("\0".join(facts), host, position * members + member)
        if found is None:
            return None
        made = division("all_shared", found.hosts)
        read = next(op for op in plan.schedule.phase(plan.phase).ops if isinstance(op, ir.Read) and op.clock)
        blame = (f"load {read.source} over {plan.clock}", read.span, plan.schedule.file)
        carrier = machine.carrier(
            found, made, blame=blame, on_failure=read.hints.on_failure or "stop", timeout=timeout
        )
        run_id, count = f"commplan-{found.run_id}", len(found.hosts)
        one = group(run_id, found.index, count, timeout=timeout, hosts=found.hosts, carrier=carrier)
        return Company(one, min(found.places) // members, tuple(place % members for place in found.places))

    return ask
