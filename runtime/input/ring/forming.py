"""Forming a group: its processes on one host create or join a ring, and wait for each other.

`form` is for processes that take all batches together; `join_group` is also for members with separate clocks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from commplan.diagnostics import CommplanError
from commplan.input.work_partition import Division, division
from commplan.ir.schedule import Read, Share
from commplan.ir.serialization.canonical_json import sha256
from commplan.runtime.input.group import Blame, Group
from commplan.runtime.input.observe import wait_log
from commplan.runtime.input.observe.overdue_calls import OverdueCalls
from commplan.runtime.input.observe.wait_log import WaitReporter, log_warning
from commplan.runtime.input.phase_order import hints
from commplan.runtime.input.program import EpochCursor, HostProgram, designed
from commplan.runtime.input.ring import cursor, meeting
from commplan.runtime.input.ring.exchange import GroupExchange
from commplan.runtime.input.ring.memory import SharedMemory, ring_bell
from commplan.runtime.input.ring.peer_errors import PeerErrors
from commplan.runtime.input.ring.producers import Recording
from commplan.runtime.input.ring.ring import Ring
from commplan.runtime.input.ring.units import Units, divisions_of, layout_of, parts_of
from commplan.runtime.input.ring.words import ABSENT, DONE, HOLDS, LIVES, PARTS, Shape
from commplan.runtime.input.shm import futex
from commplan.runtime.input.shm.slot_layout import SlotLayout, slot_layout
from commplan.runtime.input.stages.batch_inputs import BatchInputs
from commplan.verify.input.visitation import prove_division
from commplan.wait import Wait, until

if TYPE_CHECKING:
    from commplan.runtime.machines.pinned import Pinning

KIND = "group"  # the kind of memory in its name; see `meeting.fresh`


class JoinedGroup(NamedTuple):
    """The result of `join_group`.

    Attributes:
        ring: the ring of the group on this host.
        layout: the layout of a slot.
        errors: raises errors about other processes.
        share: the first stage that shares.
    """

    ring: Ring
    layout: SlotLayout
    errors: PeerErrors
    share: Share


def join_group(
    group: Group,
    program: HostProgram,
    epoch_cursor: EpochCursor,
    order: int,
    *,
    slots: int,
    members: Members | None = None,
    doing: Callable[[int], str] = lambda process: "",
) -> JoinedGroup:
    """Create or join the ring of `group` on this host, and wait for the other processes.

    Args:
        group: the group.
        program: the host program, which has a stage that shares.
        epoch_cursor: the epochs and steps of units.
        order: a checksum of the order of records.
        slots: the number of slots.
        members: the members, if they advance independently. Then a process may leave at any time. None if all
            processes take all batches together.
        doing: see `PeerErrors`.

    Raises:
        CommplanError: CP0761 if the division of parts is invalid, CP0920 if a process has gone, CP0921 if one
            does not join in time or this process is there twice, CP0922 if two processes differ, CP0923 if
            there is not enough memory.
    """
    # The stages that share, and the makers of parts on this host.
    shares = {index: flow.shared for index, flow in enumerate(program.flows) if flow.shared is not None}
    divisions = {index: _proved(group, program, index, share) for index, share in shares.items()}
    share = next(iter(shares.values()))
    blame = Blame(
        f"share {share.result.rpartition('.')[0]} via {designed(share)}", share.span, program.schedule.file
    )
    readers = {reader for parts in divisions.values() for reader in parts.readers}
    makers = max(1, len(readers.intersection(group.local)))
    shared_axes = {
        axis for flow in program.flows for op in flow.before if isinstance(op, Share) for axis in op.axes
    }

    # All processes must agree on these facts, whose names are for messages.
    facts = {
        "the plan": program.schedule.plan_digest or program.schedule.plan,
        "the place in the order": (epoch_cursor.epoch, epoch_cursor.step, members and members.start),
        "the order of records (lengths of the sources, seeds, visits)": order,
        "the number and layout of slots": (slots, slot_layout(program, divisions).nbytes),
        "the hosts": group.hosts,
        "the division of parts among processes": sorted(divisions.items()),
        "the indices of other axes": sorted(
            (axis, indices) for axis, indices in program.local.items() if axis not in shared_axes
        ),
    }

    # The shape and the header of the ring, which the first process creates.
    ops = [op for flow in program.flows if flow.shared for op in flow.before if isinstance(op, Read | Share)]
    ends_with_one = members is None and all(op.hints.on_failure != "continue" for op in ops)
    if group.carrier is None:  # any process of the host may make each part
        cores = min(len(os.sched_getaffinity(0)) * makers, os.cpu_count() or 1)
        divisions = divisions_of(program, parts_of(program, cores))
    count, place = len(group.local), group.local.index(group.index)
    is_carried = group.carrier is not None
    errors, layout = PeerErrors(group, blame, doing), slot_layout(program, divisions)
    values = {
        "count": count,
        "ends_with_one": int(ends_with_one),
        "carried": int(is_carried),
        "makers": makers,
    }
    values |= {"epoch": epoch_cursor.steps, "unit": program.flows[0].batch}
    number, start, cursors = place, 0, count  # this process's cursor, the first unit, the number of cursors
    if members is not None:  # the last cursor is that of transfers between hosts, if there are any
        number, start, cursors = members.first, members.start, members.most + is_carried
    shape = Shape(slots, layout.nbytes, layout.parts + is_carried, count, cursors)

    # Create or join the ring.
    with meeting.exclusive():
        memory = _memory(errors, program.phase.name, shape, facts, start=start, next=start, **values)
        if not memory.lock_place(place):
            memory.close()
            _refuse_second(errors)
        if is_carried:
            for part in set(range(layout.parts)).difference(divisions[min(divisions)].parts_on(group.host)):
                memory.slots[-1].words[PARTS + part] = DONE  # other hosts make this part
        else:  # the first process may have another number of cores, and therefore of parts
            layout = layout_of(program, memory.shape.parts)
        ring, threads = Ring(memory), hints(program)[1]
        available = min(memory.add_cores(os.sched_getaffinity(0)), makers * threads)
        memory.header.set(cores=max(available, threads), most=makers * threads, cursor_places=cursors)
        memory.cursors[number].set(process=place + 1, position=start, state=HOLDS)
        if members is not None and is_carried:
            memory.cursors[-1].set(position=start, state=HOLDS)  # see `Carriage.advance`
        ring.enter(place, place + 1)

    try:
        _await_peers(errors, ring, tuple(facts))
    except BaseException:
        _leave(group, ring, number)
        raise
    return JoinedGroup(ring, layout, errors, share)


def _leave(group: Group, ring: Ring, number: int) -> None:
    """Leave the ring, with cursor `number` if the group continues without it."""
    if not ring.ends_with_one:
        cursor.leave(ring, number)
    if group.carrier is not None:
        group.carrier.stop()
        group.carrier.close()
    ring.leave()


class Members(NamedTuple):
    """The members of a group that advance independently.

    Attributes:
        first: the number of the member of this process that joins first.
        start: the first unit of the group.
        most: the number of members in the plan, over all processes.
    """

    first: int
    start: int
    most: int


def form(
    group: Group,
    inputs: BatchInputs,
    order: int,
    *,
    slots: int,
    keep: int,
    calls: OverdueCalls,
    recording: Recording,
    doing: Callable[[int], str],
    pinning: Pinning | None = None,
) -> GroupExchange:
    """Form a group whose processes take all batches together.

    Args:
        group: the group.
        inputs: the inputs of the batches, equal in all processes.
        order: a checksum of the order of records.
        slots: the number of slots.
        keep: the most batches that arrays may reference at a time without a copy. It is less than `slots`,
            unless this process waits until its arrays are released.
        calls: detects user functions that do not return.
        recording: the record of this process's run.
        doing: see `PeerErrors`.
        pinning: registers the slots with devices; None without devices.

    Returns:
        This process's side of the group. A single process has a private ring.

    Raises:
        CommplanError: as `join_group`.
    """
    program, epoch_cursor, meter = inputs.program, inputs.epoch_cursor, inputs.meter
    if group.count == 1:
        return _form_single(group, inputs, order, slots, keep, calls, recording, pinning)
    share = next(flow.shared for flow in program.flows if flow.shared is not None)
    with meter.working(share.result, waits=True):
        ring, layout, errors, share = join_group(
            group, program, epoch_cursor, order, slots=slots, doing=doing
        )
    try:
        return GroupExchange(
            ring, Units(lambda: inputs.factory, epoch_cursor, order, layout, group.index),
            ring.memory.mapped_slots(pinning), errors, share.result, meter, keep, calls, recording,
        )  # fmt: skip
    except BaseException:
        _leave(group, ring, ring.place)
        raise


def _form_single(
    group: Group, inputs: BatchInputs, order: int, slots: int, keep: int, calls: OverdueCalls,
    recording: Recording, pinning: Pinning | None,
) -> GroupExchange:  # fmt: skip
    """Create a ring for a process without a group.

    Its slots are private memory, unless worker processes write to them.
    """
    program, epoch_cursor, threads = inputs.program, inputs.epoch_cursor, hints(inputs.program)[1]
    title, is_private = f"the batches of phase `{program.phase.name}`", inputs.workers is None
    layout = layout_of(program, parts_of(program, threads))
    memory = meeting.created(
        "alone", title, Shape(slots, layout.nbytes, layout.parts, 1, 1), {}, kind="own",
        has_slots=not is_private, count=1, ends_with_one=1, makers=1, cores=threads, cursor_places=1,
    )  # fmt: skip
    try:
        memory.lock_place(0)
        memory.cursors[0].set(process=1, position=0, state=HOLDS)
        ring, blame = Ring(memory), Blame("", program.phase.span, program.schedule.file)
        ring.enter(0, 1)
        return GroupExchange(
            ring, Units(lambda: inputs.factory, epoch_cursor, order, layout, 0, is_single=True),
            memory.mapped_slots(pinning, is_private=is_private), PeerErrors(group, blame), "", inputs.meter,
            keep, calls, recording,
        )  # fmt: skip
    except BaseException:
        memory.close()
        raise


def _proved(group: Group, program: HostProgram, flow: int, share: Share) -> Division:
    """The division of flow number `flow` among the processes, verified for the actual layout of hosts.

    Raises:
        CommplanError: CP0761 if the proof fails.
    """
    readers = share.readers if group.readers is None else group.readers
    chosen = group.carrier.division if group.carrier else division(share.design, group.hosts, readers)
    broken = prove_division(chosen, program.flows[flow].batch)
    if broken is not None:
        name = f"`{share.result.rpartition('.')[0]}`"
        raise CommplanError(broken.diagnostic(name, share.span, program.schedule.file))
    return chosen


def _memory(
    errors: PeerErrors, phase: str, shape: Shape, facts: Mapping[str, object], **values: int
) -> SharedMemory:
    """Open the memory of the group; the first process creates it. The caller holds `meeting.exclusive`.

    Args:
        errors: raises errors about other processes.
        phase: the name of the phase.
        shape: the sizes of the ring, if this process creates it.
        facts: the facts that must be equal in all processes.
        **values: words of the header, if this process creates it.

    Raises:
        CommplanError: CP0921 if this process has the group open already, CP0922 if facts differ, CP0923 if
            there is not enough memory.
    """
    group = errors.group
    name, title = f"{group.run_id}-{phase[:100]}-{group.host}", f"the group of run {group.run_id!r}"
    mine = {fact: sha256(repr(value).encode())[:16] for fact, value in facts.items()}
    for candidate in meeting.memory_files(name, KIND):
        opened = next((m for m in SharedMemory.opened if m.key == candidate.key and m.descriptor >= 0), None)
        if opened is not None and not opened.header.get("sealed"):
            _refuse_second(errors)
        # Opening and closing a file again would release the locks of this process.
        memory = None if opened is not None else meeting.opened(candidate, title)
        if memory is None or memory.header.get("sealed"):
            if memory is not None:
                memory.close()
            continue
        theirs = memory.facts()
        # A bit for each fact that differs, in the order of `facts`: the waiting processes read them.
        unlike = sum(1 << at for at, fact in enumerate(mine) if theirs.get(fact) != mine[fact])
        if unlike:
            memory.header.set(refused=unlike << 32 | group.index + 1)
            ring_bell(memory.bell("changed"))
            first = memory.header.get("first")
            memory.close()
            _refuse_unlike(errors, tuple(facts), group.index, first, unlike)
        return memory
    return meeting.created(
        name,
        title,
        shape,
        mine,
        kind=KIND,
        refuse=errors.blame.fail,
        has_slots=True,
        first=group.index,
        **values,
    )


def _await_peers(errors: PeerErrors, ring: Ring, facts: Sequence[str]) -> None:
    """Wait until all processes of the host have joined, and seal the ring.

    Raises:
        CommplanError: CP0920 if a process has gone, CP0921 after the group's timeout, CP0922 if another
            process was refused.
    """
    group, header, memory = errors.group, ring.header, ring.memory
    bell, reporter = memory.bell("changed"), WaitReporter(wait_log.START_S)

    def missing() -> list[str]:
        states = zip(group.local, ring.processes, strict=True)
        return [f"process {p} of {group.count}" for p, record in states if record.get("state") == ABSENT]

    def attempt(seconds: float) -> bool:
        value = bell.value
        if header.get("sealed") or not missing():
            return True
        futex.wait(bell, value, seconds)
        return False

    def look(waited: float) -> None:
        if refused := header.get("refused"):
            process = (refused & 0xFFFFFFFF) - 1
            _refuse_unlike(errors, facts, process, header.get("first"), refused >> 32)
        _look_after_joined(errors, ring)
        if reporter.due(waited):
            log_warning(
                "process %d has waited %.0f s for %s to join; it gives up after %g s", group.index, waited,
                missing()[0], group.timeout,
            )  # fmt: skip

    def late(_: float) -> NoReturn:
        errors.fail("CP0921", f"{missing()[0]} did not come within {group.timeout:g} s")

    until(attempt, Wait(group.timeout, late, look, futex.LOOK_S))
    _look_after_joined(errors, ring)
    header.set(sealed=1)
    ring_bell(bell)


def _look_after_joined(errors: PeerErrors, ring: Ring) -> None:
    """Raise CP0920 if a process has joined and is gone before the group is complete."""
    for place, record in enumerate(ring.processes):
        state = record.get("state")
        is_gone = state != ABSENT and (state != LIVES or not ring.memory.lives(place))
        if is_gone and not ring.header.get("sealed"):
            errors.lost(errors.group.local[place], "died or gave up while the group was forming")


def _refuse_second(errors: PeerErrors) -> NoReturn:
    """Raise CP0921: the place of this process in the ring is in use."""
    message = f"another process {errors.group.index} of this run is there"
    errors.blame.fail("CP0921", message, "give every run a different id")


def _refuse_unlike(
    errors: PeerErrors, facts: Sequence[str], process: int, first: int, unlike: int
) -> NoReturn:
    """Raise CP0922: `process` and `first` have different facts. `unlike` has a bit for each such fact."""
    names = [name for index, name in enumerate(facts) if unlike >> index & 1]
    differ = names[:1] if unlike & 1 else names  # if the plans differ, all other facts may differ, too
    errors.blame.fail(
        "CP0922",
        f"process {process} is not doing the same as process {first}",
        f"what differs: {', '.join(differ)}",
        "all processes of a group run the same plan, phase, batch and place in the order, with the same "
        "sources, and hold the same indices of every axis that is not shared over",
    )
