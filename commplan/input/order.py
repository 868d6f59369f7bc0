"""Which record stands where: a pure function of (seed, epoch, position, member).

A permutation of the records is evaluated at the positions that a batch needs, in memory that does not
grow with the source. It is a balanced Feistel network (Luby and Rackoff 1988) over the smallest even
number of bits that holds the source, walked along its cycle until it lands inside the source (cycle
walking: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). Its round function and its
round keys come from the 64-bit finaliser of SplitMix (Steele, Lea and Flood 2014, with Stafford's
thirteenth set of constants). Nothing here knows how many ranks there are.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Visit = Literal["exactly_once", "at_least_once", "at_most_once"]
Tail = Literal["pad", "short", "drop"]

_MASK = (1 << 64) - 1
_ROUNDS = 8  # four make it pseudo-random for large halves; small sources want a few more
_GOLDEN = 0x9E3779B97F4A7C15
_WINDOW = 2048  # positions that are permuted at once: a small array costs NumPy as much as this


def _mixed(value: int) -> int:
    """The SplitMix finaliser of one integer modulo 2**64."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def mixed_array(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The SplitMix finaliser of each of `values`: a permutation of the 64-bit numbers."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def folded(*numbers: int) -> int:
    """64 bits that depend on each of `numbers` (taken modulo 2**64) and on their order."""
    state = 0
    for number in numbers:
        state = _mixed((state + _GOLDEN) ^ _mixed(number + _GOLDEN))
    return state


def permuted(
    positions: npt.NDArray[np.int64], length: int, seed: int, epoch: int, member: int | None = None
) -> npt.NDArray[np.int64]:
    """The records at `positions` of epoch `epoch`.

    positions: any shape, each in [0, length). member: None for the order that all members share, else
    the member's index (row-major over several ensembles). Over 0..length-1 the result is a permutation.
    """
    half = max(1, ((length - 1).bit_length() + 1) // 2)
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    key = folded(seed, epoch, 0 if member is None else member + 1, length)
    keys = [np.uint64(folded(key, number)) for number in range(_ROUNDS)]

    def once(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = values >> shift, values & mask
        for round_key in keys:
            left, right = right, left ^ (mixed_array(right ^ round_key) & mask)
        return (left << shift) | right

    result = once(positions.astype(np.uint64).ravel())
    outside = np.flatnonzero(result >= length)
    while outside.size:
        result[outside] = once(result[outside])
        outside = outside[result[outside] >= length]
    return result.astype(np.int64).reshape(positions.shape)


@functools.lru_cache(maxsize=256)
def _window(number: int, length: int, seed: int, epoch: int, member: int | None) -> npt.NDArray[np.int64]:
    """The records at positions number * _WINDOW and on, at most _WINDOW of them."""
    start = number * _WINDOW
    records = permuted(np.arange(start, min(start + _WINDOW, length)), length, seed, epoch, member)
    records.flags.writeable = False
    return records


@dataclass(frozen=True)
class Order:
    """The visits of one load: `batch` global records a step out of `length`.

    `exactly_once` and `at_most_once` number each record once an epoch; slots past the end (tail pad)
    repeat records from the start of the epoch and do not count. `at_least_once` goes round again, and
    every slot counts. `drop` leaves out the records that do not fill a batch, `short` makes the last
    batch shorter.
    """

    length: int
    batch: int
    seed: int
    visit: Visit = "exactly_once"
    tail: Tail = "pad"

    @property
    def steps(self) -> int:
        """Steps of one epoch, from this load's point of view."""
        return self.length // self.batch if self.tail == "drop" else -(-self.length // self.batch)

    def span(self, step: int) -> tuple[int, int]:
        """Positions [low, high) of the slots of `step`; those from `length` on stand for `position % length`.

        `batch` slots, but for a short last step."""
        low = step * self.batch
        if self.tail != "short" or self.visit == "at_least_once":
            return low, low + self.batch
        return low, low + max(0, min(self.batch, self.length - low))

    def rows(self, step: int) -> int:
        """Slots of the global batch of `step`."""
        low, high = self.span(step)
        return high - low

    def counted(self, step: int) -> int:
        """How many slots of `step`, the first ones, count as records by the visit's contract."""
        low, high = self.span(step)
        return high - low if self.visit == "at_least_once" else max(0, min(high, self.length) - low)

    @property
    def filler(self) -> int:
        """Slots of an epoch that do not count: those with which `tail pad` fills the last batch."""
        return sum(self.rows(step) - self.counted(step) for step in range(max(0, self.steps - 1), self.steps))

    def counts(self, step: int) -> npt.NDArray[np.bool_]:
        """[rows]: which slots of `step` count."""
        return np.arange(self.rows(step)) < self.counted(step)

    def records(self, epoch: int, step: int, member: int | None = None) -> npt.NDArray[np.int64]:
        """[rows]: the record indices of the global batch of `step`, the same for any number of ranks."""
        positions = np.arange(*self.span(step), dtype=np.int64) % self.length
        result = np.empty_like(positions)
        numbers = positions // _WINDOW
        for number in dict.fromkeys(numbers.tolist()):
            inside = numbers == number
            window = _window(number, self.length, self.seed, epoch, member)
            result[inside] = window[positions[inside] - number * _WINDOW]
        return result


def phase_steps(orders: Sequence[Order]) -> int:
    """Batches of an epoch of a phase with these loads, if they agree on it.

    `exactly_once` loads set the number, `at_least_once` ones ask for at least theirs, `at_most_once` ones
    allow at most theirs.
    """
    steps: dict[Visit, list[int]] = {"exactly_once": [], "at_least_once": [], "at_most_once": []}
    for order in orders:
        steps[order.visit].append(order.steps)
    exact, least, most = steps.values()
    return exact[0] if exact else max(least) if least else min(most)


class _Streams(threading.local):
    """One bit generator per thread: making one costs five times as much as moving it to another stream. The
    first one loads numpy.random, which many a process does without."""

    @functools.cached_property
    def philox(self) -> np.random.Philox:
        return np.random.Philox(0)


_STREAMS = _Streams()
_NOTHING = np.zeros(4, np.uint64)
_folded_once = functools.cache(folded)


def generator(seed: int, stage: int, epoch: int, step: int, record: int, member: int) -> np.random.Generator:
    """The random stream of one call of a random host function.

    Philox (Salmon et al. 2011) is a function of a key and a counter, so streams are told apart by where
    they stand in the counter and cannot overlap within a stage. stage: which map of the phase it is.
    member: -1 where the stage does not differ between members. The generator is good until the next call
    of this function in the same thread: a function must not keep it.
    """
    counter = (0, record & _MASK, ((epoch & 0xFFFFFFFF) << 32) | (step & 0xFFFFFFFF), (member + 1) & _MASK)
    _STREAMS.philox.state = {
        "bit_generator": "Philox",
        "state": {
            "counter": np.array(counter, np.uint64),
            "key": np.array((seed & _MASK, _folded_once(stage)), np.uint64),
        },
        "buffer": _NOTHING,
        "buffer_pos": 4,
        "has_uint32": 0,
        "uinteger": 0,
    }
    return np.random.Generator(_STREAMS.philox)
