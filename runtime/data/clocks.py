"""Members by their own clocks: one stream of small units, which each member takes at its own pace.

The stream is a window on the order of records: units are made ahead as far as the slowest member leaves room,
and go when it has passed them. Nobody is skipped: a member that would run too far ahead waits. A member that
comes back to what has gone (it stood at the end of its epoch, or was restored further back) reads by itself
until it is inside the window again, and holds the others meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from commplan.diagnostics import CommplanError, fail
from commplan.ir.schedule import Read
from commplan.runtime.data import sources as _sources
from commplan.runtime.data.attendant import Attendant, Company
from commplan.runtime.data.batches import PhaseBatches
from commplan.runtime.data.clockplan import ClockPlan
from commplan.runtime.data.handing import HostBatch
from commplan.runtime.data.pace import Pace
from commplan.runtime.data.telling import LOG, Lasting
from commplan.runtime.data.usage import Meter

NOBODY_S = 120.0  # how long a member is waited for that no thread seems to drive
TIMEOUT_S = 1800.0


# Given the unit that this process would begin with: whom it shares the stream with, if anybody.
Ask = Callable[[int], Company | None]


@dataclass(frozen=True)
class Terms:
    """ask: whom to ask for processes that share the stream. timeout: seconds that members wait for one
    another. workers: what makes the units, see `PhaseBatches`. The first member that opens settles them."""

    ask: Ask = lambda _: None
    timeout: float = TIMEOUT_S
    workers: str = "threads"


@dataclass
class Hand:
    """One open member. position: the first unit that it has not taken. holding: it is inside an epoch, so
    that nobody may run too far ahead of it. driver: the thread that last asked for its batches; maker: the
    one that opened it. waits: the members that it is waiting for now."""

    member: int
    position: int
    holding: bool = True
    maker: threading.Thread = field(default_factory=threading.current_thread)
    driver: threading.Thread | None = None
    waits: tuple[int, ...] = ()


class Clocks:
    """The members of one phase in this process, and the stream that they take their units from.

    sources, functions: as for `PhaseBatches`.
    """

    def __init__(
        self,
        plan: ClockPlan,
        sources: Mapping[str, object],
        functions: Mapping[str, Callable[..., Any]],
    ) -> None:
        self.plan, self.functions, self._terms = plan, functions, Terms()
        reads = [op.source for op in plan.schedule.phase(plan.phase).ops if isinstance(op, Read)]
        self.sources = _sources.bound(plan.schedule, sources, list(dict.fromkeys(reads)))
        self.epoch = plan.epoch(self.sources)  # units
        self.unit = plan.rates.unit
        self.slots = plan.rates.bound // self.unit
        # As in the ring: entered as the lock itself, and again by what a finaliser interrupts.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self.process = os.getpid()
        self._hands: dict[int, Hand] = {}
        self._window: dict[int, HostBatch] = {}
        self._low = self._next = self._start = self._limit = self._asked = 0
        self._company: Company | None = None
        self._attendant: Attendant | None = None
        self._feed: PhaseBatches | None = None
        self.meter = Meter(plan.phase, plan.schedule.plan)  # of the stream
        # Who makes the feed, or takes a unit from it; who comes back instead was interrupted on the way.
        self._puller: threading.Thread | None = None
        self._broken: tuple[int, Exception] | None = None
        self._pool: ThreadPoolExecutor | None = None

    # --- coming and going ---

    def open(self, member: int, position: int, terms: Terms) -> Hand:
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
            hand = self._hands[member] = Hand(member, position)
            self._advance()
            return hand

    def begin(self, hand: Hand) -> None:
        """The member begins an epoch, or goes on with it: from now on the others wait for it."""
        with self._lock:
            hand.driver = threading.current_thread()
            if not hand.holding:
                hand.holding = True
                self._advance()
                self._want()

    def passed(self, hand: Hand, position: int, *, finished: bool) -> None:
        """The member has no use for units before `position`; finished: nor for the next ones, for now."""
        with self._lock:
            hand.position, hand.holding = position, not finished
            self._advance()

    def leave(self, hand: Hand) -> None:
        """The member is closed; with the last one the stream ends."""
        feed, pool, attendant = self.forget(hand)
        if feed is not None:
            feed.close()
        if pool is not None:
            pool.shutdown()
        if attendant is not None:
            attendant.join()

    def forget(self, hand: Hand) -> tuple[PhaseBatches | None, ThreadPoolExecutor | None, Attendant | None]:
        """As `leave`, without waiting for anything: what is left to be closed. May be called twice."""
        if os.getpid() != self.process:  # forked: the stream is the other's
            return None, None, None
        with self._lock:
            if self._hands.get(hand.member) is not hand:
                return None, None, None
            del self._hands[hand.member]
            hand.holding = False
            if self._hands:
                self._advance()
                return None, None, None
            left = self._feed, self._pool, self._attendant
            self._feed = self._pool = self._attendant = self._company = self._broken = None
            self._window.clear()
            self._changed.notify_all()
            return left

    def pool(self, threads: int) -> ThreadPoolExecutor:
        """Threads for what members do for themselves."""
        with self._lock:
            if self._pool is None:
                name = f"commplan-{self.plan.schedule.plan}-{self.plan.phase}-own"
                self._pool = ThreadPoolExecutor(threads, name)
            return self._pool

    @property
    def timeout(self) -> float:
        """Seconds that members wait for one another."""
        return self._terms.timeout

    # --- taking ---

    def behind(self, hand: Hand) -> bool:
        """Whether units that the member needs have gone."""
        with self._lock:
            return self.plan.shared is None or (self._feed is not None and hand.position < self._low)

    def take(self, hand: Hand, count: int, *, wait: bool = True) -> list[HostBatch] | None:
        """The next `count` units of a member; its position stays. None where they would have to be waited for
        and `wait` is not set.

        Errors: CP0946 where waiting would never end, CP0947 where it took too long; what making a unit
        raised.
        """
        watch = _Watch(self, hand)
        high = hand.position + count
        while True:
            with self._lock:
                if wait:
                    hand.driver = threading.current_thread()
                self._refuse(high)
                if self._feed is not None and high <= self._next:
                    return [self._window[number] for number in range(hand.position, high)]
                slow = self._slow(hand, high)
                if not slow and high > self._asked:
                    self._asked = high
                    self._advance()
                ready = self._feed is not None and self._feed.work_ahead()
                if not wait and (slow or self._busy() or not ready):
                    return None
                if slow or self._busy():
                    watch.wait(slow)
                    continue
                self._puller = threading.current_thread()
            self._pull()

    def _busy(self) -> bool:
        """Whether another thread is at the feed (the lock is held)."""
        return self._puller not in (None, threading.current_thread())

    def _refuse(self, high: int) -> None:
        """Raise what making a unit before `high` raised (the lock is held)."""
        if self._broken is None or high <= self._broken[0]:
            return
        error = self._broken[1]
        raise CommplanError(*error.diagnostics) if isinstance(error, CommplanError) else error

    def _pull(self) -> None:
        """Move one unit from the feed to the window; the first time, make the feed. Whoever is interrupted
        finds the same unit the next time."""
        number, unit = self._next, None
        error: Exception | None = None
        feed = self._feed
        try:
            if feed is None:
                feed = self._made()
            number = self._next  # which making the feed has set
            unit = feed.unit(number - self._start)
        except Exception as raised:  # noqa: BLE001  it belongs to all members that come to this unit
            error = raised
        finally:
            with self._lock:
                self._puller = None
                if error is not None:
                    self._broken = (self._next, error)
                elif unit is not None and feed is not None and feed is self._feed:
                    self._window[number] = unit
                    self._next = number + 1
                    feed.passed(self._next - self._start)
                    self._advance()
                self._changed.notify_all()

    def _made(self) -> PhaseBatches:
        """The stream, from the first unit that a member wants, or that the processes agreed on."""
        with self._lock:
            wanted = min((hand.position for hand in self._hands.values() if hand.holding), default=0)
            company = self._company
            start = wanted if company is None else company.start
            self._start = self._low = self._next = start
            self._limit, self._asked = self.slots, 0
            units = self.plan.units
        if units is None:
            raise RuntimeError("members that share nothing have no stream")
        pace = Pace(start // self.epoch, start % self.epoch, self.epoch, self.slots, lambda: self._limit)
        feed = PhaseBatches(
            units, self.plan.phase, self.sources, self.functions,
            group=company.group if company is not None else None, pace=pace, meter=self.meter,
            workers=self._terms.workers,
        )  # fmt: skip
        with self._lock:
            self._feed = feed
            if company is not None and feed.exchange is not None:
                self._attendant = Attendant(weakref.ref(self), feed.exchange, company)
                self._attendant.start()
            self._want()
        return feed

    def _slow(self, hand: Hand, high: int) -> tuple[int, ...]:
        """The members that must come nearer before this one may take units before `high`, the last first."""
        behind = [
            (other.position, other.member)
            for other in self._hands.values()
            if other is not hand and other.holding and high > self._works_on(other) + self.slots
        ]
        return tuple(member for _, member in sorted(behind))

    def _works_on(self, hand: Hand) -> int:
        """The first unit that counts as kept for a member: where the batch begins that it has taken last."""
        return hand.position - self.plan.rates.units[hand.member]

    def _advance(self) -> None:
        """Let go of what all have passed, and begin what there is room for (the lock is held).

        Units that a member at the end of its epoch will want are kept while nobody needs the room.
        """
        holding = [hand for hand in self._hands.values() if hand.holding]
        held = min((hand.position for hand in holding), default=self._next)
        wished = min((hand.position for hand in self._hands.values()), default=self._next)
        floor = min(held, max(wished, self._asked - self.slots))
        low = min(max(self._low, floor), self._next)
        for number in range(self._low, low):
            self._window.pop(number, None)
        # Between processes the slots themselves are the bound: what is worked on has them until it is let go.
        works_on = [self._works_on(hand) for hand in holding] if self._company is None else []
        self._low, self._limit = low, min([max(floor, low), *works_on]) + self.slots - self._start
        if self._feed is not None:
            if self._feed.exchange is not None:
                # What is still shown of the batches before keeps its content, and gives back its slots.
                self._feed.exchange.recall(low - self._start - max(self.plan.rates.units))
            self._feed.work_ahead()
        self._changed.notify_all()

    def _want(self) -> None:
        """Tell the other processes which epoch a member here is in (the lock is held)."""
        held = [hand.position // self.epoch for hand in self._hands.values() if hand.holding]
        if self._attendant is not None and held:
            self._attendant.want(max(held))

    # --- what the attendant asks ---

    def idle(self) -> bool:
        """Whether no member here is inside an epoch."""
        with self._lock:
            return not any(hand.holding for hand in self._hands.values())

    def attend(self, epoch: int, *, take: bool) -> bool:
        """Go on with the stream to the end of `epoch` for other processes; whether there was work.

        take: and take units that no member here wants now.
        """
        with self._lock:
            feed = self._feed
            if feed is None:
                return False
            feed.go_on(epoch)
            feed.work_ahead()
            done = self._next >= (epoch + 1) * self.epoch
            if not take or self._busy() or self._broken or done or not self.idle():
                return False
            self._puller = threading.current_thread()
            self._asked = self._next + self.slots  # nothing is kept here for members that stand still
            self._advance()
        self._pull()
        return True

    def pulling(self) -> int | None:
        """The unit that a thread waits for, counted from the first; None where none does."""
        with self._lock:
            return self._next - self._start if self._puller and self._feed is not None else None

    # --- who waits for whom ---

    def stuck(self, slow: Sequence[int]) -> int | None:
        """A member among `slow` that cannot come nearer while this thread waits (the lock is held).

        Threads never wait for each other in a ring without that: let member a_i wait for b_i, which is driven
        by the thread that waits with a_i+1. Then each a_i is out of reach of b_i, and each a_i+1 is within
        reach of b_i, or its thread would be told: added up over the ring, these distances contradict.
        """
        here = threading.current_thread()
        for member in slow:
            other = self._hands[member]
            if other.driver is here or (other.driver is None and other.maker is here and _alone(self._hands)):
                return member
        return None

    def deserted(self, slow: Sequence[int]) -> int | None:
        """A member among `slow` that no living thread drives."""
        for member in slow:
            hand = self._hands.get(member)
            if hand is not None and (hand.driver is None or not hand.driver.is_alive()):
                return member
        return None

    def distance(self, hand: Hand, member: int) -> int:
        """Records that `member` is behind."""
        other = self._hands.get(member)
        return (hand.position - other.position) * self.plan.rates.unit if other is not None else 0

    def wait(self, seconds: float) -> None:
        """Until something changes (the lock is held)."""
        self._changed.wait(seconds)


def _alone(hands: Mapping[int, Hand]) -> bool:
    """Whether no other thread is there that might come to drive a member."""
    here = threading.current_thread()
    blocked = {hand.driver for hand in hands.values() if hand.waits}
    return not any(
        thread is not here and thread not in blocked and not thread.name.startswith("commplan")
        for thread in threading.enumerate()
    )


@dataclass
class _Watch:
    """One member's wait for others: told about when it lasts, and ended where it would last for ever."""

    clocks: Clocks
    hand: Hand
    _waited: float = 0.0
    _lasting: Lasting = field(default_factory=Lasting)

    def wait(self, slow: tuple[int, ...]) -> None:
        """Wait for a change (the clocks' lock is held). slow: whom for; nobody where a unit is being made."""
        if slow:
            self._look(slow)
        begun = time.monotonic()
        self.hand.waits = slow
        try:
            self.clocks.wait(1.0)
        finally:
            self.hand.waits = ()
            if slow:
                self._count(slow, time.monotonic() - begun)

    def _count(self, slow: tuple[int, ...], seconds: float) -> None:
        self._waited += seconds
        last = max(slow, key=lambda member: self.clocks.distance(self.hand, member))
        self.clocks.meter.slowed(last, self.clocks.distance(self.hand, last), seconds)

    def _look(self, slow: tuple[int, ...]) -> None:
        clocks, clock, member = self.clocks, self.clocks.plan.clock, self.hand.member
        stuck = clocks.stuck(slow)
        if stuck is not None:
            self._fail(
                "CP0946",
                f"member {member} of `{clock}` would wait for member {stuck}, which the same thread drives",
                stuck,
                f"drive member {stuck} first, give each member a thread of its own, or close its batches",
            )
        nobody = clocks.deserted(slow)
        if self._waited > clocks.timeout or (nobody is not None and self._waited > NOBODY_S):
            last = slow[0] if nobody is None else nobody
            how = "it lives" if nobody is None else "no thread drives it"
            self._fail(
                "CP0947",
                f"member {member} of `{clock}` waited {self._waited:.0f} s for member {last}: {how}",
                last,
                f"drive member {last}, or close its batches if it is done",
            )
        if self._lasting.due(self._waited):
            names = ", ".join(f"{m} ({clocks.distance(self.hand, m)} records behind)" for m in slow)
            LOG.warning(
                "member %d of `%s` has waited %.0f s for member %s: %d records are kept",
                member, clock, self._waited, names, clocks.plan.rates.bound,
            )  # fmt: skip

    def _fail(self, code: str, message: str, other: int, fix: str) -> None:
        plan = self.clocks.plan
        read = next(op for op in plan.schedule.phase(plan.phase).ops if isinstance(op, Read) and op.clock)
        fail(
            code,
            message,
            f"member {other} is {self.clocks.distance(self.hand, other)} records behind, and with another"
            f" batch it would be more than {plan.rates.lead(other)}: {plan.rates.bound} are kept at most",
            fix,
            span=read.span,
            file=plan.schedule.file,
        )


def quietly(clocks: Clocks, hand: Hand) -> None:
    """What a finaliser calls: the stream ends when what is left of it is collected."""
    with contextlib.suppress(Exception):
        _, pool, _ = clocks.forget(hand)
        if pool is not None:
            pool.shutdown(wait=False)
