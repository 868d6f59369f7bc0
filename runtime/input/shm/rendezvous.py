"""How the processes of a group meet at their shared memory."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn

from commplan.diagnostics import CommplanError
from commplan.input.order import Order
from commplan.input.prefetch import KEEP
from commplan.input.work_partition import Division, division
from commplan.ir.plan import Ref
from commplan.ir.schedule import Read, Share
from commplan.runtime.input.group import Group
from commplan.runtime.input.observe import wait_log
from commplan.runtime.input.observe.accounting import Meter
from commplan.runtime.input.observe.wait_log import LOG, WaitReporter
from commplan.runtime.input.program import EpochCursor, HostProgram, designed
from commplan.runtime.input.shm import futex, segment
from commplan.runtime.input.shm import shm_control as _control
from commplan.runtime.input.shm.shm_channel import SharedRing
from commplan.runtime.input.shm.shm_control import ABSENT, JOINED, LOOK_S, Control, cores_of
from commplan.runtime.input.shm.slot_layout import slot_layout
from commplan.runtime.input.shm.slot_status import PeerErrors
from commplan.runtime.input.shm.slots import Slots
from commplan.runtime.input.turn_schedule import TurnSchedule
from commplan.verify.input.visitation import prove_division
from commplan.wait import Wait, until

if TYPE_CHECKING:
    from commplan.runtime.input.device.pinned import Pinning


def _meet(group: Group, control: Control, errors: PeerErrors, wanted: segment.Wanted) -> None:
    """Wait until all processes of the host have joined."""
    memory, index, timeout = control.memory, group.index, group.timeout
    control.say_cores(cores_of())
    mine = control.word(index, "presence")
    mine.value = JOINED
    futex.wake(mine)
    for process in group.local:
        word, lasting = control.word(process, "presence"), WaitReporter(wait_log.START_S)
        who = f"process {process} of {group.count}"

        def look(waited: float, lasting: WaitReporter = lasting, who: str = who) -> None:
            segment.refused(memory, wanted)
            if memory.sealed():
                return
            for other in group.local:
                if control.word(other, "presence").value == JOINED and not control.alive(other):
                    errors.lost(other, "died or gave up while the group was forming")
            if lasting.due(waited):
                message = "process %d has waited %.0f s for %s to come; it gives up after %g s"
                LOG.warning(message, index, waited, who, timeout)

        def late(_: float, who: str = who) -> NoReturn:
            errors.fail("CP0921", f"{who} did not come within {timeout:g} s")

        until(functools.partial(futex.changed, word, ABSENT), Wait(timeout, late, look, LOOK_S))
        if process != index and not memory.owned(process) and not memory.sealed():
            errors.lost(process, "died while the group was forming")
    memory.seal()


def join(
    group: Group,
    program: HostProgram,
    orders: Mapping[Ref, Order],
    course: EpochCursor,
    order: int,
    *,
    slots: int,
    meter: Meter,
    keep: int = KEEP,
    leaving: bool = False,
    ahead: int | None = None,
    pinning: Pinning | None = None,
) -> SharedRing:
    """Meet the other processes of `group` and map the slots for what travels in `program`.

    course, order: where the batches stand, and a checksum of `orders`; the same in all. keep: batches that
    this process may show at a time without a copy; less than `slots`, unless it waits for its own arrays.
    leaving: a process may leave the others at any time. ahead: batches in the making at a time, at most,
    where readers may take turns at making them; None: each makes a part of every batch. pinning: what
    registers the slots with this process's devices. Errors: CP0761,
    CP0920 to CP0923.
    """
    schedule, phase = program.schedule, program.phase
    shares = {place: flow.shared for place, flow in enumerate(program.flows) if flow.shared is not None}
    divisions: dict[int, Division] = {}
    for place, share in shares.items():
        readers = share.readers if group.readers is None else group.readers
        chosen = group.carrier.division if group.carrier else division(share.design, group.hosts, readers)
        # What was proved when the plan was compiled was proved of layouts of hosts; this is the real one.
        broken = prove_division(chosen, program.flows[place].batch)
        if broken is not None:
            name = f"`{share.result.rpartition('.')[0]}`"
            raise CommplanError(broken.diagnostic(name, share.span, schedule.file))
        divisions[place] = chosen
    share = next(iter(shares.values()))
    layout = slot_layout(program, divisions)
    over = {axis for f in program.flows for op in f.before if isinstance(op, Share) for axis in op.axes}
    alike = {axis: indices for axis, indices in program.local.items() if axis not in over}
    facts = {
        "the plan": schedule.plan_digest or schedule.plan,
        "the place in the order": (course.epoch, course.step),
        "the order of records (lengths of the sources, seeds, visits)": order,
        "slots and what lies in them": (slots, layout.nbytes),
        "the hosts": group.hosts,
        "who makes what": sorted(divisions.items()),
        "the indices of other axes": sorted(alike.items()),
    }
    label = f"share {share.result.rpartition('.')[0]} via {designed(share)}"
    blame = segment.Blame(label, share.span, schedule.file)
    start = _control.nbytes(group.count)
    wanted = segment.Wanted(
        f"{group.run_id}-{phase.name[:100]}-{group.host}",
        group.count,
        start + slots * layout.nbytes,
        start,
        facts,
        blame,
    )
    memory = segment.opened(wanted, group.index)
    ring: SharedRing | None = None
    try:
        mapped = Slots(memory.descriptor, start, layout.nbytes, slots, pinning=pinning)
        control = Control(memory, group.count, group.index)
        ops = [op for flow in program.flows if flow.shared for op in flow.before]
        hints = [op.hints for op in ops if isinstance(op, Read | Share)]
        goes_on = leaving or any(hint.on_failure == "continue" for hint in hints)
        errors = PeerErrors(group, blame)
        roster = TurnSchedule(control, divisions, group.local, layout.makers, slots, ahead)

        def rows(step: int) -> dict[int, int]:
            flows = ((place, program.flows[place]) for place in divisions)
            return {p: len(program.rows(flow, orders[flow.reads[0].result].rows(step))) for p, flow in flows}

        ring = SharedRing(
            group, control, mapped, layout, roster, errors, share.result, meter, goes_on, keep, course, order,
            rows,
        )  # fmt: skip
        with meter.working(share.result, waits=True):
            _meet(group, control, errors, wanted)
    except BaseException:
        if ring is not None:
            ring.leave()
        else:
            memory.close()
        raise
    return ring
