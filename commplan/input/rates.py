"""Members by their own clocks: what they take from one stream of records, and how far apart they get.

All members visit the records of an epoch in the same order, each in batches of its own size. The stream is
cut into units, as many records as divide every batch; a step of a member takes some whole units. After a
round, the least number of records that all batches divide, all of them have taken the same again.

Members keep pace when they get through equally many records in the same time. At time t (in records), with
batches b_i, member i works on its batch number floor(t / b_i): it was given everything before (floor(t / b_i)
+ 1) b_i, and has passed what comes before floor(t / b_i) b_i. All that is said here of buffers and lags
follows from that. The least that t mod b_j falls short of b_j, at times when i begins a batch, is gcd(b_i,
b_j): multiples of b_i reach every multiple of that divisor modulo b_j.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from commplan.input.order import Order, Tail, Visit
from commplan.input.prefetch import PREFETCH
from commplan.ir.types import sized


@dataclass(frozen=True)
class Rates:
    """batches: records of one step of each member. prefetch: steps of work ahead that each may have in
    stock."""

    batches: tuple[int, ...]
    prefetch: int = PREFETCH

    @property
    def unit(self) -> int:
        """Records of a unit: the greatest number that divides every batch."""
        return math.gcd(*self.batches)

    @property
    def units(self) -> tuple[int, ...]:
        """Units that a step of each member takes."""
        return tuple(batch // self.unit for batch in self.batches)

    @property
    def round(self) -> int:
        """Records after which all members have taken the same again."""
        return math.lcm(*self.batches)

    @property
    def round_steps(self) -> tuple[int, ...]:
        """Steps of each member in a round."""
        return tuple(self.round // batch for batch in self.batches)

    @property
    def lag(self) -> int:
        """The most records that one member was given more than another while they keep pace: the largest b_i
        - gcd(b_i, b_j). It is reached when i begins a batch and j is one divisor short of beginning one."""
        return self.kept(held=0)

    def kept(self, ahead: int = 0, held: int = 1) -> int:
        """Records that must be kept at once so that members who keep pace never wait for room.

        ahead: batches that each member has in stock beside the one that it works on. held: batches that it
        has not let go of, that one included. From the first record that member j holds to the last that
        member i is to have there are at most (ahead + 1) b_i + held b_j - gcd(b_i, b_j), and that many are
        reached.
        """
        sizes = sorted(set(self.batches))
        return max((ahead + 1) * i + held * j - math.gcd(i, j) for i in sizes for j in sizes)

    @property
    def bound(self) -> int:
        """Records that the stream keeps at once, a multiple of `unit`: enough that members who keep pace
        never wait, each with `prefetch` batches in stock, and twice the largest batch at least.

        With one largest batch nothing can lock: whoever is behind has passed all that is kept before it, so
        that its next batch finds room; the second is for a member that looks at its batch while it asks for
        the next.
        """
        return max(self.kept(self.prefetch), 2 * max(self.batches))

    def lead(self, member: int) -> int:
        """The most records that another member may be given more than `member`, however slow it is: what is
        kept from the first record of the batch that `member` works on."""
        return self.bound - self.batches[member]

    def of(
        self, member: int, length: int, seed: int, visit: Visit = "exactly_once", tail: Tail = "pad"
    ) -> Order:
        """What member number `member` visits by itself."""
        return Order(length, self.batches[member], seed, visit, tail)

    def taken(self, member: int, step: int) -> tuple[int, int]:
        """The units [low, high) of step `step` of a member, counted in each epoch from 0."""
        each = self.units[member]
        return step * each, (step + 1) * each

    def epoch(self, length: int, visit: Visit = "exactly_once", tail: Tail = "pad") -> int:
        """Units of an epoch of `length` records: as many as the member that takes most of them.

        The others pass over what is left; every member begins the next epoch with the same unit. Units past
        the end of the records hold what pads the last batches; of a short last batch only some units hold
        rows.
        """
        most = 0
        for batch in set(self.batches):
            steps = Order(length, batch, 0, visit, tail).steps
            most = max(most, steps * batch // self.unit)
        if tail == "short" and visit != "at_least_once":
            return min(most, -(-length // self.unit))
        return most


def rates(batches: Sequence[int], prefetch: int = PREFETCH) -> Rates:
    """How members with these batches go together.

    batches: records of a step, member by member, each at least 1. prefetch: batches of work ahead, at least
    1. Raises ValueError for other numbers.
    """
    if not batches or min(batches) < 1 or prefetch < 1:
        raise ValueError(f"no rates: batches {list(batches)}, prefetch {prefetch}")
    return Rates(tuple(batches), prefetch)


def round_text(rates: Rates) -> str:
    """The round in words: `a round of 64 records (2 steps of batch 32, 1 of 64)`."""
    steps = [f"{rates.round // batch} of {batch}" for batch in dict.fromkeys(rates.batches)]
    first = steps[0].replace(" of ", f" step{'s' if rates.round > rates.batches[0] else ''} of batch ", 1)
    return f"a round of {rates.round} records ({', '.join([first, *steps[1:]])})"


def kept_text(rates: Rates, record_nbytes: int = 0) -> str:
    """What is kept and how far members part, in words. record_nbytes: of what is kept; 0 where it is not
    known."""
    nbytes = f" ({sized(rates.bound * record_nbytes)})" if record_nbytes else ""
    most = rates.lead(rates.batches.index(min(rates.batches)))
    ahead = f"in units of {rates.unit}, {rates.prefetch} batches ahead"
    return (
        f"at most {rates.bound} records are kept{nbytes}, {ahead}; members that keep pace are {rates.lag}"
        f" records apart at most, and none gets more than {most} ahead of another"
    )
