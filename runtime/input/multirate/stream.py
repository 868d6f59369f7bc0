"""Members that share: one stream of units, which each member takes at its own pace.

The stream is a window on the order of records: units are made ahead as far as the slowest member leaves room,
and go when it has passed them. Nobody is skipped: a member that would run too far ahead waits. A member that
comes back to what has gone (it stood at the end of its epoch, or was restored further back) reads by itself
until it is inside the window again, and holds the others meanwhile.

Where processes share the stream, a thread keeps each of them at its duty while its own members take nothing.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NoReturn

from commplan.diagnostics import fail
from commplan.ir.schedule import Read
from commplan.runtime.input.group import Group
from commplan.runtime.input.host_batch import HostBatch
from commplan.runtime.input.iterator import PhaseBatches
from commplan.runtime.input.multirate.schedule import ClockPlan
from commplan.runtime.input.observe.accounting import Meter
from commplan.runtime.input.observe.wait_log import LOG, WaitReporter
from commplan.runtime.input.program import Pace
from commplan.runtime.input.ring.exchange import GroupExchange
from commplan.runtime.input.shm.futex import LOOK_S
from commplan.runtime.input.sources import files as _sources
from commplan.wait import attended, ended

NOBODY_S = 120.0  # how long a member is waited for that no thread seems to drive
TIMEOUT_S = 1800.0
IDLE_S = 0.5  # a member that begins its next epoch sooner than this finds the units that others keep for it


@dataclass(frozen=True)
class PeerGroup:
    """The processes that share a stream. start: the unit that they begin with. members: the first member that
    each of them holds."""

    group: Group
    start: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class StreamOptions:
    """ask: given the unit that this process would begin with, whom it shares the stream with. timeout:
    seconds that members wait for one another. workers: what makes the units, see `PhaseBatches`. The first
    member that opens settles them."""

    ask: Callable[[int], PeerGroup | None] = lambda _: None
    timeout: float = TIMEOUT_S
    workers: str = "threads"


@dataclass
class Consumer:
    """One open member. each: units of its batches. position: the first unit that it has not taken. holding:
    it is inside an epoch, so that nobody may run too far ahead of it. driver: the thread that last asked for
    its batches; maker: the one that opened it. waits: it is waiting for other members now."""

    member: int
    each: int
    position: int
    holding: bool = True
    maker: threading.Thread = field(default_factory=threading.current_thread)
    driver: threading.Thread | None = None
    waits: bool = False

    @property
    def works_on(self) -> int:
        """The first unit that counts as kept for it: where the batch begins that it has taken last."""
        return self.position - self.each


class MultirateStream:
    """The members of one phase in this process, and the stream that they take their units from.

    sources, functions: as for `PhaseBatches`.
    """

    def __init__(
        self, plan: ClockPlan, sources: Mapping[str, object], functions: Mapping[str, Callable[..., Any]]
    ) -> None:
        self.plan, self.functions, self._terms = plan, functions, StreamOptions()
        reads = [op.source for op in plan.schedule.phase(plan.phase).ops if isinstance(op, Read)]
        self.sources = _sources.bound(plan.schedule, sources, list(dict.fromkeys(reads)))
        self.epoch = plan.epoch(self.sources)  # units
        self.slots = plan.rates.bound // plan.rates.unit
        # As in the ring: entered as the lock itself, and again by what a finaliser interrupts.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._pulling = threading.Lock()  # held by who makes the stream, or waits for its next unit
        self._process = os.getpid()
        self._hands: dict[int, Consumer] = {}
        # Units from `low` on are kept, those before `next` have come; the stream began with `start`.
        self._low = self._next = self._start = self._asked = 0
        self._company: PeerGroup | None = None
        self._attendant: threading.Thread | None = None
        self._stream: PhaseBatches | None = None
        self._failure: Exception | None = None  # to make it
        self.meter = Meter(plan.phase, plan.schedule.plan)  # of the stream
        self._pool: ThreadPoolExecutor | None = None

    # --- coming and going ---

    def open(self, member: int, position: int, terms: StreamOptions) -> Consumer:
        """Member `member` is about to take units from `position` on. Errors: CP0948 where it is open."""
        with self._lock:
            if member in self._hands:
                fail(
                    "CP0948",
                    f"member {member} of `{self.plan.clock}` has batches of `{self.plan.phase}` already",
                    "a member goes through its records once at a time: go on with those, or close them first",
                    file=self.plan.schedule.file,
                )
            if not self._hands:
                self._terms = terms
                self._company = terms.ask(position) if self.plan.shared is not None else None
            hand = self._hands[member] = Consumer(member, self.plan.rates.units[member], position)
            self._advance()
            return hand

    def begin(self, hand: Consumer) -> None:
        """The member begins an epoch, or goes on with it: from now on the others wait for it."""
        with self._lock:
            hand.driver = threading.current_thread()
            if not hand.holding:
                hand.holding = True
                self._advance()
                self._want()

    def passed(self, hand: Consumer, position: int, *, finished: bool) -> None:
        """The member has no use for units before `position`; finished: nor for the next ones, for now."""
        with self._lock:
            hand.position, hand.holding = position, not finished
            self._advance()

    def leave(self, hand: Consumer, *, wait: bool = True) -> None:
        """The member is closed; with the last one the stream ends. wait: for all of it; else it ends when
        what is left of it is collected. May be called twice."""
        if os.getpid() != self._process:  # forked: the stream is the other's
            return
        with self._lock:
            if self._hands.get(hand.member) is not hand:
                return
            del self._hands[hand.member]
            hand.holding = False
            if self._hands:
                self._advance()
                return
            stream, pool, attendant = self._stream, self._pool, self._attendant
            self._stream = self._pool = self._attendant = self._company = self._failure = None
            self._changed.notify_all()
        if wait and stream is not None:
            stream.close()
        if pool is not None:
            pool.shutdown(wait=wait)
        if wait and attendant is not None and attendant is not threading.current_thread():
            attended(functools.partial(ended, attendant))

    def pool(self, threads: int) -> ThreadPoolExecutor:
        """Threads for what members do for themselves."""
        with self._lock:
            if self._pool is None:
                name = f"commplan-{self.plan.schedule.plan}-{self.plan.phase}-own"
                self._pool = ThreadPoolExecutor(threads, name)
            return self._pool

    # --- taking ---

    def behind(self, hand: Consumer) -> bool:
        """Whether units that the member needs have gone."""
        with self._lock:
            return self.plan.shared is None or (self._stream is not None and hand.position < self._low)

    def take(self, hand: Consumer, count: int, *, wait: bool = True) -> list[HostBatch] | None:
        """The next `count` units of a member; its position stays. None where they would have to be waited for
        and `wait` is not set.

        Errors: CP0946 where waiting would never end, CP0947 where it took too long; what making a unit
        raised.
        """
        high = hand.position + count
        with self._lock:
            waited, lasting = 0.0, WaitReporter()
            while slow := self._slow(hand, high):
                if not wait:
                    return None
                if self._let_go(hand, slow):
                    continue
                self._check(hand, slow, waited, lasting)
                waited += self._wait(hand, slow)
            if high > self._asked:
                self._asked = high
                self._advance()
        stream = self._stream
        if high > self._next or stream is None:
            if not wait and (stream is None or self._pulling.locked()):
                return None
            with self._pulling:
                stream = self._stream or self._made()
                if not self._pull(stream, high, wait=wait):
                    return None
        return [stream.unit(number - self._start) for number in range(hand.position, high)]

    def _pull(self, stream: PhaseBatches, high: int, *, wait: bool = True) -> bool:
        """Wait until all units before `high` are in the window; False where that would take waiting and
        `wait` is not set (the pulling lock is held)."""
        while self._next < high:
            number = self._next
            if not wait and not stream.ready(number - self._start):
                return False
            stream.unit(number - self._start)
            with self._lock:
                if stream is self._stream:
                    self._next = number + 1
                    self._advance()
        return True

    def _made(self) -> PhaseBatches:
        """The stream, from the first unit that a member wants, or that the processes agreed on."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            wanted = min((hand.position for hand in self._hands.values() if hand.holding), default=0)
            company, units = self._company, self.plan.units
            start = wanted if company is None else company.start
            self._start = self._low = self._next = start
            self._asked = 0
        if units is None:
            raise RuntimeError("members that share nothing have no stream")
        try:
            stream = PhaseBatches(
                units, self.plan.phase, self.sources, self.functions,
                group=company.group if company is not None else None,
                pace=Pace(*divmod(start, self.epoch), self.epoch, self.slots),
                meter=self.meter, workers=self._terms.workers, timeout=self._terms.timeout,
            )  # fmt: skip
        except Exception as error:
            self._failure = error  # it belongs to all members
            raise
        with self._lock:
            self._stream = stream
            if company is not None and stream.exchange is not None:
                self._attendant = threading.Thread(
                    target=_attend, args=(weakref.ref(self), stream.exchange, company),
                    name="commplan-attendant", daemon=True,
                )  # fmt: skip
                self._attendant.start()
            self._want()
        return stream

    def _slow(self, hand: Consumer, high: int) -> list[Consumer]:
        """The members that must come nearer before this one may take units before `high`, the last first."""
        behind = [
            other
            for other in self._hands.values()
            if other is not hand and other.holding and high > other.works_on + self.slots
        ]
        return sorted(behind, key=lambda other: (other.position, other.member))

    def _advance(self) -> None:
        """Let go of what all have passed, and begin what there is room for (the lock is held).

        Units that a member at the end of its epoch will want are kept while nobody needs the room.
        """
        # Between processes the slots themselves are the bound: what is worked on has them until it is let go.
        alone = self._company is None
        held = [h.works_on if alone else h.position for h in self._hands.values() if h.holding]
        wished = min((hand.position for hand in self._hands.values()), default=self._next)
        floor = min([max(wished, self._asked - self.slots), *held])
        self._low = min(max(self._low, floor), self._next)
        if self._stream is not None:
            self._stream.passed(self._low - self._start, shown=max(self.plan.rates.units))
        self._changed.notify_all()

    def _want(self) -> None:
        """Tell the other processes which epoch a member here is in (the lock is held)."""
        held = [hand.position // self.epoch for hand in self._hands.values() if hand.holding]
        exchange = self._stream.exchange if self._stream is not None else None
        if exchange is not None and held:
            exchange.arm(max(held) + 1)

    # --- what processes do for each other ---

    def idle(self) -> bool:
        """Whether no member here is inside an epoch."""
        with self._lock:
            return not any(hand.holding for hand in self._hands.values())

    def attend(self, epoch: int, *, take: bool) -> bool:
        """Go on with the stream to the end of `epoch` for other processes; whether there was work.

        take: and take units that no member here wants now.
        """
        stream = self._stream
        if stream is None:
            return False
        stream.go_on(epoch)
        done = self._next >= (epoch + 1) * self.epoch
        if not take or done or self._pulling.locked() or not self.idle():
            return False
        with self._lock:
            self._asked = self._next + self.slots  # nothing is kept here for members that stand still
            self._advance()
        try:
            with self._pulling:
                self._pull(stream, self._next + 1)
        except Exception:  # noqa: BLE001  the members that come to this unit are told
            return False
        return True

    def pulling(self) -> int | None:
        """The unit that a thread waits for, counted from the first; None where none does."""
        with self._lock:
            waits = self._stream is not None and self._pulling.locked()
            return self._next - self._start if waits else None

    # --- who waits for whom ---

    def _wait(self, hand: Consumer, slow: Sequence[Consumer]) -> float:
        """Wait for a change; the seconds that it took (the lock is held). slow: whom for."""
        begun, hand.waits = time.monotonic(), True
        try:
            self._changed.wait(1.0)
        finally:
            hand.waits = False
            waited = time.monotonic() - begun
            last = min(slow, key=lambda other: other.position)
            self.meter.slowed(last.member, self._distance(hand, last), waited)
        return waited

    def _check(self, hand: Consumer, slow: Sequence[Consumer], waited: float, lasting: WaitReporter) -> None:
        """Tell about a wait for `slow` that lasts, and end one that would last for ever.

        Threads never wait for each other in a ring without that: let member a_i wait for b_i, which is driven
        by the thread that waits with a_i+1. Then each a_i is out of reach of b_i, and each a_i+1 is within
        reach of b_i, or its thread would be told: added up over the ring, these distances contradict.
        """
        clock, member = self.plan.clock, hand.member
        for other in slow:
            if self._is_own(other):
                self._fail(
                    "CP0946",
                    f"member {member} of `{clock}` would wait for member {other.member},"
                    " which the same thread drives",
                    hand,
                    other,
                    f"drive member {other.member} first, give each member a thread of its own,"
                    " or close its batches",
                )
        nobody = next((other for other in slow if not (other.driver and other.driver.is_alive())), None)
        if waited > self._terms.timeout or (nobody is not None and waited > NOBODY_S):
            last = nobody or slow[0]
            how = "it lives" if nobody is None else "no thread drives it"
            self._fail(
                "CP0947",
                f"member {member} of `{clock}` waited {waited:.0f} s for member {last.member}: {how}",
                hand,
                last,
                f"drive member {last.member}, or close its batches if it is done",
            )
        if lasting.due(waited):
            names = ", ".join(f"{o.member} ({self._distance(hand, o)} records behind)" for o in slow)
            LOG.warning(
                "member %d of `%s` has waited %.0f s for member %s: %d records are kept",
                member, clock, waited, names, self.plan.rates.bound,
            )  # fmt: skip

    def _is_own(self, other: Consumer) -> bool:
        """Whether nobody but the calling thread would drive `other`."""
        caller = threading.current_thread()
        return other.driver is caller or (
            other.driver is None and other.maker is caller and self._alone(caller)
        )

    def _let_go(self, hand: Consumer, slow: Sequence[Consumer]) -> bool:
        """Where one clock holds for all, a thread that takes one member's batches after another's goes on:
        what the others have not taken they read by themselves (the lock is held). Whether that makes room."""
        own = [other for other in slow if self._is_own(other)] if not self.plan.is_paced else []
        for other in own:
            other.holding = False
            LOG.warning(
                "member %d of `%s` goes on without member %d, which the same thread drives and which is"
                " %d records behind: that one reads for itself until it has caught up",
                hand.member, self.plan.clock, other.member, self._distance(hand, other),
            )  # fmt: skip
        if own:
            self._advance()
        return bool(own)

    def _alone(self, caller: threading.Thread) -> bool:
        """Whether no other thread is there that might come to drive a member."""
        blocked = {hand.driver for hand in self._hands.values() if hand.waits}
        return not any(
            thread is not caller and thread not in blocked and not thread.name.startswith("commplan")
            for thread in threading.enumerate()
        )

    def _distance(self, hand: Consumer, other: Consumer) -> int:
        """Records that `other` is behind."""
        return (hand.position - other.position) * self.plan.rates.unit

    def _fail(self, code: str, message: str, hand: Consumer, other: Consumer, fix: str) -> NoReturn:
        plan = self.plan
        reads = [op for op in plan.schedule.phase(plan.phase).ops if isinstance(op, Read)]
        read = next((op for op in reads if op.clock), reads[0])
        fail(
            code,
            message,
            f"member {other.member} is {self._distance(hand, other)} records behind, and with another batch"
            f" it would be more than {plan.rates.lead(other.member)}: {plan.rates.bound} are kept at most",
            fix,
            span=read.span,
            file=plan.schedule.file,
        )


def close_on_gc(clocks: MultirateStream, hand: Consumer) -> None:
    """What a finaliser calls."""
    with contextlib.suppress(Exception):
        clocks.leave(hand, wait=False)


def _attend(reference: weakref.ref[MultirateStream], ring: GroupExchange, company: PeerGroup) -> None:
    """Keep a process at its duty until its ring is stopped: its parts are made, and its slots let go, as long
    as a member of any process of its host is inside an epoch. Also tell whom the members here wait for."""
    idle = time.monotonic()  # since when no member here is inside an epoch
    since, lasting = idle, WaitReporter()  # of a wait for another process's member
    while not ring.is_stopped:
        clocks = reference()
        if clocks is None:
            return
        wanted, now = ring.wanted(), time.monotonic()
        idle = now if not clocks.idle() else min(idle, now)
        busy = wanted > 0 and clocks.attend(wanted - 1, take=now - idle > IDLE_S)
        number = clocks.pulling()
        slow = None if number is None else ring.slowest(number)
        if slow is None or number is None:
            since, lasting = time.monotonic(), WaitReporter()
        else:
            process, taken = slow
            member, behind = company.members[process], (number - taken) * clocks.plan.rates.unit
            waited = time.monotonic() - since
            clocks.meter.slowed(member, behind, min(LOOK_S, waited))
            if lasting.due(waited):
                LOG.warning(
                    "process %d has waited %.0f s for process %d, which holds member %d: it is %d records"
                    " behind, and %d are kept",
                    ring.group.index, waited, process, member, behind, clocks.plan.rates.bound,
                )  # fmt: skip
        del clocks  # nobody is kept alive by being attended to
        if not busy:
            ring.sleep(LOOK_S)
