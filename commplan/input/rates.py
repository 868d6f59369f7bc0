"""Members with different batch sizes that read one stream of records: units, buffer sizes and lags.

All members visit the records of an epoch in the same order, in batches of different sizes. The stream is
divided into units of g records, with g the greatest common divisor of the batch sizes; a step of a member
takes a number of whole units. After a round, the least common multiple of the batch sizes, all members have
taken the same records.

Members keep pace if they process records at equal rates. At time t (in records), with batch sizes b_i, member
i works on batch floor(t / b_i): it has received all records before (floor(t / b_i) + 1) b_i and released
those before floor(t / b_i) b_i. Buffer sizes and lags follow from that. When member i begins a batch, the
minimum of b_j - t mod b_j is gcd(b_i, b_j), because multiples of b_i reach every multiple of that divisor
modulo b_j.
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
    """Batch sizes of members that read one stream.

    Attributes:
        batches: Records per step of each member, each at least 1.
        prefetch: The number of batches that each member may have prefetched, at least 1.
    """

    batches: tuple[int, ...]
    prefetch: int = PREFETCH

    @property
    def unit(self) -> int:
        """The number of records per unit: the greatest common divisor of the batch sizes."""
        return math.gcd(*self.batches)

    @property
    def units(self) -> tuple[int, ...]:
        """The number of units per step of each member."""
        return tuple(batch // self.unit for batch in self.batches)

    @property
    def round(self) -> int:
        """The number of records after which all members have taken the same records."""
        return math.lcm(*self.batches)

    @property
    def round_steps(self) -> tuple[int, ...]:
        """The number of steps of each member in a round."""
        return tuple(self.round // batch for batch in self.batches)

    @property
    def lag(self) -> int:
        """The largest lead, in received records, of one member over another while they keep pace.

        It is the maximum of b_i - gcd(b_i, b_j). Member i reaches it when it begins a batch while member j is
        gcd(b_i, b_j) records before the end of a batch.
        """
        return self.buffered(in_use=0)

    def buffered(self, ahead: int = 0, in_use: int = 1) -> int:
        """The number of records to buffer so that members that keep pace never wait for space.

        From the first record that member j holds to the last that member i needs, there are at most (ahead +
        1) b_i + in_use b_j - gcd(b_i, b_j) records, and this bound is attained.

        Args:
            ahead: The number of prefetched batches per member, without the current one.
            in_use: The number of batches that a member has not released, including the current one.
        """
        sizes = sorted(set(self.batches))
        return max((ahead + 1) * i + in_use * j - math.gcd(i, j) for i in sizes for j in sizes)

    @property
    def bound(self) -> int:
        """The number of buffered records of the stream, a multiple of `unit`.

        Members that keep pace never wait, each with `prefetch` batches ready. It is at least twice the
        largest batch. One largest batch prevents deadlock: the slowest member has released all records before
        its position, so there is space for its next batch. The second one is for a member that uses a batch
        while it requests the next.

        It is also the largest lead, in received records, of one member over another: records are kept from
        the first one that the slowest member has not released.
        """
        return max(self.buffered(self.prefetch), 2 * max(self.batches))

    def order_of(
        self, member: int, length: int, seed: int, visit: Visit = "exactly_once", tail: Tail = "pad"
    ) -> Order:
        """The order of records of member number `member`; see `Order` for the other arguments."""
        return Order(length, self.batches[member], seed, visit, tail)

    def units_of(self, member: int, step: int) -> tuple[int, int]:
        """The units [low, high) of a member's batch at `step`. Units and steps count from 0 in each epoch."""
        each = self.units[member]
        return step * each, (step + 1) * each

    def epoch(self, length: int, visit: Visit = "exactly_once", tail: Tail = "pad") -> int:
        """The number of units in an epoch of `length` records: the maximum over members.

        See `Order` for `visit` and `tail`.

        Members that need fewer skip the remaining units. All members therefore begin the next epoch with the
        same unit. Units past the end of the records hold the padding of the last batches. If the last batch
        is short, there are no such units, and the last unit may have fewer rows.
        """
        most = 0
        for batch in set(self.batches):
            steps = Order(length, batch, 0, visit, tail).steps
            most = max(most, steps * batch // self.unit)
        if tail == "short" and visit != "at_least_once":
            return min(most, -(-length // self.unit))
        return most


def rates(batches: Sequence[int], prefetch: int = PREFETCH) -> Rates:
    """The rates of members with these batch sizes, checked.

    Args:
        batches: Records per step of each member, each at least 1.
        prefetch: The number of prefetched batches, at least 1.

    Raises:
        ValueError: If there is no batch size, or a number is less than 1.
    """
    if not batches or min(batches) < 1 or prefetch < 1:
        raise ValueError(f"no rates: batches {list(batches)}, prefetch {prefetch}")
    return Rates(tuple(batches), prefetch)


def round_text(rates: Rates) -> str:
    """A description such as `a round of 64 records (2 steps of batch 32, 1 of 64)`."""
    steps = [f"{rates.round // batch} of {batch}" for batch in dict.fromkeys(rates.batches)]
    first = steps[0].replace(" of ", f" step{'s' if rates.round > rates.batches[0] else ''} of batch ", 1)
    return f"a round of {rates.round} records ({', '.join([first, *steps[1:]])})"


def buffer_text(rates: Rates, record_nbytes: int = 0) -> str:
    """A description of the buffer and the largest lag.

    Args:
        rates: The rates.
        record_nbytes: The bytes of a record; 0 if unknown, for a text without bytes.
    """
    nbytes = f" ({sized(rates.bound * record_nbytes)})" if record_nbytes else ""
    ahead = f"in units of {rates.unit}, {rates.prefetch} batches ahead"
    return (
        f"at most {rates.bound} records are kept{nbytes}, {ahead}; members that keep pace are {rates.lag}"
        f" records apart at most, and none gets more than {rates.bound} ahead of another"
    )
