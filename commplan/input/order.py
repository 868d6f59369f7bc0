"""The order of records: a pure function of (seed, epoch, position, member).

A permutation of the records is evaluated at the positions of a batch, in memory that does not grow with the
source. It is a balanced Feistel network (Luby and Rackoff 1988) over the smallest even number of bits that
can index the source, iterated until the result is inside the source (cycle walking: Black and Rogaway,
"Ciphers with Arbitrary Finite Domains", 2002). Its round function and round keys come from the 64-bit
finalizer of SplitMix (Steele, Lea and Flood 2014, with Stafford's thirteenth set of constants). The order
does not depend on the number of ranks.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from commplan.ir.types import Tail, Visit

MASK = (1 << 64) - 1  # the low 64 bits of an integer
_ROUNDS = 8  # Feistel rounds: four are pseudo-random for large halves; small sources need more
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio, the increment of SplitMix
_WINDOW = 2048  # positions permuted at once: NumPy needs about as long for fewer


def _mix(value: int) -> int:
    """The SplitMix finalizer of one integer modulo 2**64."""
    value &= MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def mixed_array(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The SplitMix finalizer of each of `values`: a permutation of the 64-bit numbers."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def folded(*numbers: int) -> int:
    """A 64-bit hash of `numbers` (modulo 2**64) that depends on their order."""
    state = 0
    for number in numbers:
        state = _mix((state + _GOLDEN) ^ _mix(number + _GOLDEN))
    return state


def permuted(
    positions: npt.NDArray[np.int64], length: int, seed: int, epoch: int, member: int | None = None
) -> npt.NDArray[np.int64]:
    """The records at `positions` of an epoch. Over all positions the result is a permutation.

    Args:
        positions: Positions in [0, length), of any shape.
        length: The number of records.
        seed: The seed of the load.
        epoch: The epoch.
        member: The member's index (row-major over several ensembles), or None for an order shared by all
            members.
    """
    half = max(1, ((length - 1).bit_length() + 1) // 2)  # bits of each half of the network
    shift = np.uint64(half)
    mask = np.uint64((1 << half) - 1)
    key = folded(seed, epoch, 0 if member is None else member + 1, length)
    keys = [np.uint64(folded(key, number)) for number in range(_ROUNDS)]

    def once(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """The network applied to each of `values`."""
        high, low = values >> shift, values & mask
        for round_key in keys:
            high, low = low, high ^ (mixed_array(low ^ round_key) & mask)
        return (high << shift) | low

    result = once(positions.astype(np.uint64).ravel())
    # Cycle walking: apply the network again to each result that is not a record.
    outside = np.flatnonzero(result >= length)
    while outside.size:
        result[outside] = once(result[outside])
        outside = outside[result[outside] >= length]
    return result.astype(np.int64).reshape(positions.shape)


@functools.lru_cache(maxsize=256)
def _window(number: int, length: int, seed: int, epoch: int, member: int | None) -> npt.NDArray[np.int64]:
    """The records at positions from `number * _WINDOW` on: `_WINDOW` of them, or those until `length`."""
    start = number * _WINDOW
    records = permuted(np.arange(start, min(start + _WINDOW, length)), length, seed, epoch, member)
    records.flags.writeable = False
    return records


@dataclass(frozen=True)
class Order:
    """The order of the records of one load, and the slots of each step that count as visits.

    With `exactly_once` and `at_most_once`, no record counts twice in an epoch. Slots past the end (tail
    `pad`) repeat records from the start of the epoch and do not count. With `at_least_once`, the order wraps
    around and every slot counts. Tail `drop` omits the records that do not fill a batch, and `short` makes
    the last batch shorter, except with `at_least_once`.

    Attributes:
        length: The number of records of the source.
        batch: The number of records per step, over all ranks.
        seed: The seed of the load.
        visit: How often each record counts in an epoch.
        tail: The handling of the records that do not fill a batch.
    """

    length: int
    batch: int
    seed: int
    visit: Visit = "exactly_once"
    tail: Tail = "pad"

    @property
    def steps(self) -> int:
        """The number of steps per epoch of this load alone."""
        return self.length // self.batch if self.tail == "drop" else -(-self.length // self.batch)

    def span(self, step: int) -> tuple[int, int]:
        """The positions [low, high) of the slots of `step`; positions from `length` on wrap around.

        There are `batch` slots, except in a short last step.
        """
        low = step * self.batch
        if self.tail != "short" or self.visit == "at_least_once":
            return low, low + self.batch
        return low, low + max(0, min(self.batch, self.length - low))

    def rows(self, step: int) -> int:
        """The number of slots in the global batch of `step`."""
        low, high = self.span(step)
        return high - low

    def counted(self, step: int) -> int:
        """The number of leading slots of `step` that count as visits."""
        low, high = self.span(step)
        return high - low if self.visit == "at_least_once" else max(0, min(high, self.length) - low)

    @property
    def filler(self) -> int:
        """The number of slots per epoch that do not count: the padding of the last batch (tail `pad`)."""
        return sum(self.rows(step) - self.counted(step) for step in range(max(0, self.steps - 1), self.steps))

    def counts(self, step: int) -> npt.NDArray[np.bool_]:
        """Whether each slot of `step` counts as a visit, [rows of the step]."""
        return np.arange(self.rows(step)) < self.counted(step)

    def records(self, epoch: int, step: int, member: int | None = None) -> npt.NDArray[np.int64]:
        """The record in each slot of the global batch of `step`, [rows of the step] int64.

        Args:
            epoch: The epoch.
            step: The step, from 0. Steps beyond `steps` repeat the order of the same epoch.
            member: The member's index, or None for an order shared by all members.
        """
        positions = np.arange(*self.span(step), dtype=np.int64) % self.length
        result = np.empty_like(positions)
        numbers = positions // _WINDOW
        for number in dict.fromkeys(numbers.tolist()):
            inside = numbers == number
            window = _window(number, self.length, self.seed, epoch, member)
            result[inside] = window[positions[inside] - number * _WINDOW]
        return result


def phase_steps(orders: Sequence[Order]) -> int:
    """The number of batches per epoch of a phase with these loads, at least one.

    It is the number of the first `exactly_once` load. Without one it is the largest number of the
    `at_least_once` loads, and without those the smallest of the `at_most_once` loads. The caller checks that
    the other loads are compatible with it.
    """
    steps: dict[Visit, list[int]] = {"exactly_once": [], "at_least_once": [], "at_most_once": []}
    for order in orders:
        steps[order.visit].append(order.steps)
    exact, least, most = steps.values()
    return exact[0] if exact else max(least) if least else min(most)


class _Streams(threading.local):
    """One bit generator per thread.

    Creating one costs five times as much as changing its stream. The first one imports numpy.random, which
    many processes do not need.
    """

    @functools.cached_property
    def philox(self) -> np.random.Philox:
        """The bit generator, whose state `generator` sets."""
        return np.random.Philox(0)


_STREAMS = _Streams()
_EMPTY_BUFFER = np.zeros(4, np.uint64)  # Philox computes four 64-bit numbers at a time
_folded_once = functools.cache(folded)  # one result per stage


def generator(seed: int, stage: int, epoch: int, step: int, record: int, member: int) -> np.random.Generator:
    """The random stream of one call of a random host function.

    Philox (Salmon et al. 2011) is a function of a key and a counter. Streams differ in the counter, so they
    cannot overlap within a stage. The generator is valid until the next call of this function in the same
    thread; functions must not keep it.

    Args:
        seed: The seed of the load.
        stage: The index of the map in the phase.
        epoch: The epoch, modulo 2**32.
        step: The step, modulo 2**32.
        record: The index of the record in the source.
        member: The member, or -1 if the stage is the same for all members.
    """
    # The first word of the counter is 0: it counts the blocks of four numbers within the stream.
    counter = (0, record & MASK, ((epoch & 0xFFFFFFFF) << 32) | (step & 0xFFFFFFFF), (member + 1) & MASK)
    _STREAMS.philox.state = {
        "bit_generator": "Philox",
        "state": {
            "counter": np.array(counter, np.uint64),
            "key": np.array((seed & MASK, _folded_once(stage)), np.uint64),
        },
        "buffer": _EMPTY_BUFFER,
        "buffer_pos": 4,  # the buffer is used up
        "has_uint32": 0,
        "uinteger": 0,
    }
    return np.random.Generator(_STREAMS.philox)
