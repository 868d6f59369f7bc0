"""Batches between processes: readers make their parts, all see the whole.

The processes of a host map one file of memory (`/dev/shm`), which holds a few slots. A reader fills its part
of batch q in slot q modulo the number of slots, once everyone of the host has let go of batch q - slots;
everyone reads the slot once all parts are there. Two counters per process carry all of that: `filled` and
`taken`. Between hosts a carrier moves the parts, led by one process of each host, and a third counter tells
the others.

The memory has no name in any folder, so nothing stays behind, whatever dies. Where the
plan goes on without those who die (`on_failure = continue`), the next living process of the host makes the
dead one's part and moves its counter, so that nobody else need know.
Where they take turns (`turn_schedule`) the counter of each stands at its next turn.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NoReturn

from commplan.diagnostics import CommplanError
from commplan.input.work_partition import Division
from commplan.ir.plan import Ref
from commplan.recorder.processes import process_state
from commplan.runtime.input.group import Group
from commplan.runtime.input.layout import Array
from commplan.runtime.input.observe.accounting import Meter
from commplan.runtime.input.observe.wait_log import Cadence, WaitReporter
from commplan.runtime.input.prefetch.overdue_calls import OverdueCalls
from commplan.runtime.input.program import EpochCursor
from commplan.runtime.input.shm import futex
from commplan.runtime.input.shm import shm_control as _control
from commplan.runtime.input.shm.shm_control import LEFT, LOOK_S, Control, fence
from commplan.runtime.input.shm.slot_layout import SlotLayout
from commplan.runtime.input.shm.slot_status import PeerErrors, Place, check_status, write_status
from commplan.runtime.input.shm.slots import CompletionCounter, Slots
from commplan.runtime.input.transport.transport import RegroupedError, RowSlices
from commplan.runtime.input.turn_schedule import TurnSchedule
from commplan.wait import Wait


@dataclass
class SharedRing:
    """This process's side of the slots: the waits on the other processes, each of which raises where it
    cannot go on, and the arrays to write to and to read from.

    goes_on: who dies or leaves is done without. keep: batches that this process may show at a time. course,
    order: where batches stand, and a checksum of the order of records. rows: of the batch of a step, for each
    flow that moves anything by its place in the program. rebuild: fills the part of another process in a
    batch, in the calling thread. overdue: raises CP0926, where it is this process's own part that is waited
    for, after so many seconds. Errors: CP0920 a peer died or left, CP0921 a peer is missing or silent, CP0922
    the peers are not doing the same; and a peer's own error, as it was. Waits raise ClosedError once stopped.
    """

    group: Group
    control: Control
    slots: Slots
    rooms: SlotLayout
    roster: TurnSchedule
    told: PeerErrors
    key: str
    meter: Meter
    goes_on: bool
    keep: int
    course: EpochCursor
    order: int
    rows: Callable[[int], Mapping[int, int]]
    rebuild: Callable[[int, int], None] = lambda number, process: None
    overdue: Callable[[float], NoReturn] = OverdueCalls.of_nobody
    _left: bool = False
    _process: int = field(default_factory=os.getpid)
    _gone: set[int] = field(default_factory=set[int])  # of this host, known to be dead or to have left
    _duties: dict[int, int] = field(default_factory=dict[int, int])  # process -> first batch made as planned
    _begun: int = 0
    _failed: tuple[int, BaseException] | None = None
    _awaited: dict[_control.Bell, int] = field(default_factory=dict[_control.Bell, int])  # in waits that last
    _done: dict[int, CompletionCounter] = field(default_factory=dict[int, CompletionCounter])
    _returns: CompletionCounter = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _cadence: Cadence = field(default_factory=Cadence)  # of whole batches

    def __post_init__(self) -> None:
        self.index, self.count, self.carrier = self.group.index, self.group.count, self.group.carrier
        self._returns = CompletionCounter(self._let_go)
        self.slots.returned = self._returns.add
        self._local = self.group.local
        self._makers = [process for process in self.rooms.makers if process in self._local]
        self._leader = self._local[0]
        if self.index in self._makers:
            self._take_over(self.index, 0, 0)

    def in_use(self) -> tuple[int, int]:
        """The slots, and how many of them hold a batch that somebody fills, has filled or still reads."""
        filled = max((self.control.word(p, "filled").value for p in self._makers), default=0)
        if self.roster.follows(filled) >= 0:  # counters stand at turns to come
            filled = self.control.least("filled", self._makers)
        taken = self.control.least("taken", self._living())
        return self.slots.count, max(0, min(filled - taken, self.slots.count))

    def _living(self) -> list[int]:
        return [process for process in self._local if process not in self._gone]

    # --- waiting, for the ring ---

    def writable(self, number: int) -> None:
        """Wait until the slot of batch `number` may be written to; at once where this process writes
        nothing."""
        if not self._duties and not self.leads():
            return
        with self.meter.working(self.key):
            before = self.roster.follows(number)
            if before >= 0:  # whoever waits to be given it looks after its makers
                self.control.wait("filled", lambda: self.control.beyond("filled", self._makers, before))
            self._await_free(number)

    def _await_free(self, number: int) -> None:
        behind = number - self.slots.count

        def free() -> bool:
            if not self.control.beyond("taken", self._living(), behind):
                return False
            # A host that was left behind when another died is served from the batch before.
            return self.carrier is None or not self.goes_on or self._carried_so_far() > behind + 1

        self._await_all("taken", behind, self._living, free)

    def _await_parts(self, number: int) -> None:
        """Wait until all parts that are made on this host are there; where a dead one's are mine, make
        them."""

        def filled() -> bool:
            self._make_up(number)
            self._check_failed(number)
            return self.control.beyond("filled", self._makers, number)

        self._await_all("filled", number, lambda: self._makers, filled)
        self._cadence.came()

    def _await_all(
        self,
        name: Literal["filled", "taken"],
        beyond: int,
        processes: Callable[[], Sequence[int]],
        enough: Callable[[], bool],
    ) -> None:
        """Wait until the counters of `processes` are past `beyond`, which `enough` tells."""

        def behind() -> list[int]:
            words = ((process, self.control.word(process, name).value) for process in processes())
            return [process for process, value in words if process != self.index and value <= beyond]

        lasting: list[WaitReporter] = []  # made where the wait lasts

        def look(waited: float) -> None:
            lasting.extend(() if lasting else (WaitReporter(self._cadence.usual_s()),))
            for process in behind():
                self._look_after(process, name, beyond)
                self._awaited[name] = process
            if name == "filled" and lasting[0].due(waited):
                self._warn(beyond, waited, behind())

        def late(waited: float) -> NoReturn:
            names = behind()
            if not names:
                self.overdue(waited)
            self._silent(self.control.give_up(names[0]), bound_s)

        bound_s = self.group.timeout
        self.control.wait(name, enough, Wait(bound_s, late, look, LOOK_S))
        self._awaited.pop(name, None)

    def _warn(self, number: int, waited: float, behind: Sequence[int]) -> None:
        """Say who keeps batch `number`: one that has not taken an earlier one, in whose slot it belongs, else
        one that has not made its part. Not this process itself, whose calls are looked after elsewhere."""
        full = number - self.slots.count
        takers = [p for p in self._living() if self.control.word(p, "taken").value <= full]
        if self.index in takers or not (takers or behind):
            return
        process = (takers or behind)[0]
        count = self.course.count
        owed = f"to take batch {count(full)}" if takers else f"for its part of batch {count(number)}"
        self.told.warn(process, waited, owed, self.control.memory.holder(process))

    def awaited(self) -> int:
        """The process that a wait which lasts waits for, -1 for none."""
        waits: tuple[_control.Bell, ...] = ("filled", "carried", "taken")
        return next((self._awaited[name] for name in waits if name in self._awaited), -1)

    def _silent(self, process: int, seconds: float) -> NoReturn:
        number = self.control.memory.holder(process)
        self.told.silent(process, seconds, process_state(number) if number else "alive")

    def _carried_so_far(self) -> int:
        return self.control.bell("carried").value

    def fills(self) -> int | None:
        """The first batch that `duties` is to be asked for; None where this process makes no part."""
        return self._begun if self._duties else None

    def passes(self, number: int) -> bool:
        """Whether batch `number` is begun without this process, which `duties` is then not asked for."""
        with self._lock:
            for process, begun in self._duties.items():
                if begun <= number and self.roster.turn(process, number) == number:
                    return False
            self._begun = max(self._begun, number + 1)
        return True

    def fail(self, number: int, error: BaseException) -> None:
        """No batch from `number` on can be made here: whoever waits for one hears `error`."""
        self._failed = (number, error)
        self.control.wake()

    def ahead(self, number: int) -> int:
        """Batches from `number` on that are here whole."""
        filled = self._carried_so_far() if self.carrier else self.control.least("filled", self._makers)
        return max(0, filled - number)

    def readable(self, number: int) -> None:
        """Wait until all have filled their parts of batch `number`; raises what went wrong with one."""
        with self.meter.working(self.key, waits=True):
            if self.carrier is None:
                self._await_parts(number)
            elif self.leads() and not self.carrier.by_caller:
                self._carry(number)
            else:
                self._await_carried(number)
        makers = self.roster.heard(number)
        check_status(self.slots.memory(number), makers, self._place(number), self.told)

    def _await_carried(self, number: int) -> None:
        def look(_: float) -> None:
            self._awaited["carried"] = self._leader
            self._adopt(number)
            for process in self._makers:  # their parts are asked for by the leader; a dead one's may be mine
                if process != self.index and self.goes_on and not self.control.alive(process):
                    self._look_after(process, "filled", number)
            if self.index != self._leader and not self.leads() and not self.control.alive(self._leader):
                if not self.goes_on:
                    self._lost(self._leader)
                self._gone.add(self._leader)
                alive = (process for process in self._local if self.control.alive(process))
                self._leader = min(alive, default=self.index)  # nobody's once this process is stopped

        def carried() -> bool:
            self._make_up(number)
            self._check_failed(number)
            return self._carried_so_far() > number or self._leads_now()

        bound_s = 2 * self.group.timeout  # the leader gives up first, and says for whom it waited

        def late(_: float) -> NoReturn:
            self._silent(self.control.give_up(self._leader), bound_s)

        self.control.wait("carried", carried, Wait(bound_s, late, look, LOOK_S))
        self._awaited.pop("carried", None)
        if self._carried_so_far() <= number:
            self._carry(number)

    def _check_failed(self, number: int) -> None:
        if self._failed is not None and number >= self._failed[0]:
            raise self._failed[1]

    def leads(self) -> bool:
        """Whether this process carries the batches of its host: others wait for it even where it failed."""
        return self.carrier is not None and self.index == self._leader

    def _leads_now(self) -> bool:
        """Whether this process became the leader while it waited."""
        carrier = self.carrier
        return carrier is not None and not carrier.by_caller and self.leads() and self.control.lead()

    def _look_after(self, process: int, name: _control.Name, beyond: int) -> None:
        """Where waiting for `process` is in vain: raise, or go on without it. Its counter is read again after
        its presence: a peer that finished its part and then left has done its duty."""
        word = self.control.word(process, name)
        if (process not in self._gone and self.control.alive(process)) or word.value > beyond:
            return
        if self.goes_on:
            self._gone.add(process)
            if name == "filled":
                self._inherit(process, beyond)
            return
        self._lost(process)

    def _lost(self, process: int) -> NoReturn:
        """Raise what became of `process`, or of the one that it gave up on."""
        culprit = self.control.give_up(process)
        if culprit == self.index:
            self.told.lost(process, "left: it had waited for this one in vain")
        if self.control.alive(culprit):
            self._silent(culprit, self.group.timeout)
        left = self.control.word(culprit, "presence").value == LEFT
        self.told.lost(culprit, "left: its batches were closed before the epoch's end" if left else "died")

    # --- inheriting ---

    def _inherit(self, process: int, number: int) -> None:
        """Make the parts of a dead process from now on, if this one is its heir. number: the batch that is
        waited for."""
        if process in self._duties:
            return
        alive = [other for other in self._local if self.control.alive(other)]
        base = process if process in self._local else self.control.word(process, "charge").value - 1
        heir = base if base in alive else next(iter(self.rooms.divisions.values())).successor(base, alive)
        if heir == self.index and self.control.take_duty(process):
            with self._lock:
                if process in self._duties:  # another thread of this process was first: one lock is for all
                    return
                if not self._duties:  # nothing was begun ahead here so far
                    self._begun = max(self._begun, number + 1)
                self._take_over(process, self.control.word(process, "filled").value, self._begun)

    def _take_over(self, process: int, filled: int, begun: int) -> None:
        """From batch `begun` on the parts of `process` are made with this process's own; those from `filled`
        to there are made up for."""
        self._done[process] = CompletionCounter(
            lambda to: self.control.advance(process, "filled", to, self._makers),
            filled,
            lambda number: self.roster.turn(process, number + 1),
        )
        self._duties[process] = begun

    def _make_up(self, number: int) -> None:
        """Make what a dead process left undone of batch `number`."""
        for process, begun in list(self._duties.items()):
            if number < begun and self._done[process].upto <= number:
                self._await_free(number)
                error: BaseException | None = None
                try:
                    self.rebuild(number, process)
                except BaseException as raised:  # noqa: BLE001  told to all, with the part
                    error = raised
                self._say(number, process, error)

    # --- between hosts ---

    def carry_ahead(self, number: int) -> None:
        """Carry all batches up to `number`, in the caller's thread; nothing where another one does that."""
        carrier = self.carrier
        if carrier is None or not carrier.by_caller or not self.leads():
            return
        with self.meter.working(self.key, waits=True):
            while (carried := self._carried_so_far()) <= number:
                self._carry(carried)

    def _carry(self, number: int) -> None:
        """Move the parts of batch `number` between hosts. What went wrong here travels too."""
        carrier = self.carrier
        if carrier is None:
            return
        try:
            if self._makers:
                self._await_parts(number)
            else:
                self._await_free(number)
        except CommplanError as error:
            for process in self._makers:
                if self.control.word(process, "filled").value <= number:
                    self._write(number, process, error)
        while True:
            before = self._parcels(number - 1) if number > 0 else ()
            try:
                carrier.carry(number, self._parcels(number), before, self.course.count(number))
                break
            except RegroupedError as regrouped:
                self._regroup(regrouped, number)
                self._await_parts(number)
        self.control.carry_to(number + 1)

    def _parcels(self, number: int) -> list[RowSlices]:
        return self.rooms.parcels(self.slots.memory(number), self.rows(self.course.at(number)[1]))

    def _regroup(self, regrouped: RegroupedError, number: int) -> None:
        """Parts of dead processes of other hosts, for whom nobody is left there, are made here from now
        on."""
        hosts, before = self.group.hosts, next(iter(self.rooms.divisions.values())).readers
        for was, now in zip(before, regrouped.division.readers, strict=True):
            charge = self.control.word(was, "charge")
            if hosts[was] != self.group.host == hosts[now] and not charge.value:
                self.control.word(was, "filled").value = regrouped.number
                fence()
                charge.value = now + 1
        self._adopt(number)

    def _adopt(self, number: int) -> None:
        """Learn which parts of other hosts are made on this one."""
        for process in self.rooms.makers:
            if process not in self._makers and self.control.word(process, "charge").value:
                fence()
                self._makers.append(process)
                self._inherit(process, number)

    # --- saying ---

    def _place(self, number: int) -> Place:
        return Place(*self.course.at(number), self.order)

    def _write(self, number: int, process: int, error: BaseException | None) -> None:
        at = self.rooms.makers.index(process)
        write_status(self.slots.memory(number), at, self._place(number), error)

    def _say(self, number: int, process: int, error: BaseException | None) -> None:
        """The part of `process` in batch `number` is there, or what went wrong with it."""
        self._write(number, process, error)
        self._done[process].add(number)

    # --- doing, for the maker ---

    def division(self, flow: int, number: int) -> Division:
        """Who makes which rows of a flow, which is named by its place in the program, in batch `number`."""
        return self.roster.at(flow, number)

    def duties(self, number: int) -> tuple[int, ...]:
        """The processes whose parts this one makes in batch `number`; asked once for each, in order."""
        with self._lock:
            self._begun = max(self._begun, number + 1)
            owners = (process for process, begun in self._duties.items() if begun <= number)
            mine = tuple(process for process in owners if self.roster.turn(process, number) == number)
        self.roster.begun(number)
        return mine

    def arrays(self, number: int) -> dict[Ref, Array]:
        """The arrays of batch `number` to write to: the moved values, and what belongs to each flow."""
        return self.rooms.views(self.slots.memory(number), writable=True)

    def lend(self, number: int) -> dict[Ref, Array]:
        """The same to read from; the slot is let go when nothing shows it any more."""
        return self.rooms.views(self.slots.lend(number, {}), writable=False)

    def publish(self, number: int, processes: tuple[int, ...], error: BaseException | None) -> None:
        """Say that the parts of `processes` in batch `number` are there, or what went wrong with them."""
        self.roster.done(number)
        for process in processes:
            self._say(number, process, error)

    def handed(self, number: int) -> None:
        """Batch `number` is the caller's now: those before it that are still shown, but for `keep`, are its
        own."""
        self.roster.look(number)
        self.recall(number - self.keep + 1)

    def recall(self, number: int) -> None:
        """Batches before `number` give back their slots; what is still shown of them is the caller's own."""
        for old in self.slots.lent():
            if old < number:
                self.slots.recall(old)

    # --- members by their own clocks, see `multirate` ---

    def want(self, epochs: int) -> None:
        """This process has begun so many epochs."""
        word = self.control.word(self.index, "wanted")
        if epochs > word.value:
            word.value = epochs
            self.control.ring("taken")

    def wanted(self) -> int:
        """Epochs that some living process of this host has begun."""
        return max((self.control.word(p, "wanted").value for p in self._living()), default=0)

    def sleep(self, seconds: float) -> None:
        """Until something is let go or wanted, or for so long."""
        word = self.control.bell("taken")
        futex.wait(word, word.value, seconds)

    def slowest(self, number: int) -> tuple[int, int] | None:
        """The process of this host that batch `number` waits for, and how many batches it has let go."""
        taken = [(self.control.word(p, "taken").value, p) for p in self._living() if p != self.index]
        least, process = min(taken, default=(number, -1))
        return (process, least) if least <= number - self.slots.count else None

    def _let_go(self, upto: int) -> None:
        # What a forked process drops is still shown in the one that it was forked from.
        if not self._left and os.getpid() == self._process:
            self.control.advance(self.index, "taken", upto, self._living())

    def stop(self) -> None:
        """Make the waits of this process return."""
        self.control.stop()
        if self.carrier is not None:
            self.carrier.stop()

    def leave(self) -> None:
        """Tell the peers, and let go of the memory."""
        with self._lock:
            if self._left:
                return
            self._left = True
        self.slots.close()
        self.control.leave()
        self.control.memory.close()
        if self.carrier is not None:
            self.carrier.close()
