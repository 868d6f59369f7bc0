"""What one host sends and receives so that all hosts have all rows: chunk programs, read for one of them.

The moves of a division are collectives between hosts: an all-gather whose blocks are the rows that each
host made, or a broadcast of one host's rows. Each is a program of `commplan.collectives` over blocks of any
lengths: `ring`, and `chain` in slices that follow each other down the line of hosts. A block is all that a
host brings, array after array and copy after copy, as if it lay in one piece; what is sent lies where it
lies, in one window of memory or, across the seams, in several.

Nothing here calls MPI: a script says what to post and what each send waits for.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from commplan.collectives.layout import MESSAGE
from commplan.collectives.program import Ints, Kind, Program
from commplan.collectives.registry import program
from commplan.input.work_partition import Move
from commplan.lowering.mpi.instructions import of_rank

MOST_SLICES = 512  # of a block: larger ones have larger messages, which take an answer before they leave
_ALGORITHM: dict[Kind, str] = {"all_gather": "ring", "broadcast": "chain"}


class Window(NamedTuple):
    """Bytes `low` to `high` - 1 of an array, counted from its first byte."""

    array: int
    low: int
    high: int


@dataclass(frozen=True)
class Message:
    """One message to or from `host`; `number` counts those from one host to another.

    windows: where its bytes lie, in order. waits: the messages of the script that bring what it sends on.
    """

    outgoing: bool
    host: int
    number: int
    windows: tuple[Window, ...]
    waits: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(window.high - window.low for window in self.windows)


@dataclass(frozen=True)
class TransferPlan:
    """What one host does in one batch. Sends are tried in the order in which they stand here."""

    messages: tuple[Message, ...]

    def nbytes(self, *, outgoing: bool) -> int:
        """Bytes that are sent, or received."""
        return sum(message.nbytes for message in self.messages if message.outgoing == outgoing)


@dataclass(frozen=True)
class Form:
    """The shape of one array, see `RowSlices`: copies, rows, bytes of a row, and where parts begin."""

    copies: int
    rows: int
    row_nbytes: int
    bounds: tuple[int, ...]

    def windows(self, array: int, parts: Sequence[int]) -> list[Window]:
        """Where the rows of `parts`, in order, lie in each copy; neighbours are one window."""
        windows: list[Window] = []
        for copy in range(self.copies):
            for part in parts:
                low, high = (
                    (copy * self.rows + self.bounds[at]) * self.row_nbytes for at in (part, part + 1)
                )
                if low == high:
                    continue
                if windows and windows[-1].high == low:
                    windows[-1] = Window(array, windows[-1].low, high)
                else:
                    windows.append(Window(array, low, high))
        return windows


class _Transfer(NamedTuple):
    """A message before it has a number. order: (round, move), alike at both ends."""

    order: tuple[int, int]
    outgoing: bool
    host: int
    windows: tuple[Window, ...]


def script(moves: Sequence[Move], host: int, forms: Sequence[Form], piece: int = MESSAGE) -> TransferPlan:
    """What `host` does to carry out `moves` on arrays of `forms`; messages are of about `piece` bytes at
    most.

    All hosts must be given the same but `host`. Arrays that are short travel in the messages of their
    neighbours.
    """
    transfers = [
        transfer
        for place, move in enumerate(moves)
        if host in move.hosts
        for transfer in _transfers(move, place, move.hosts.index(host), forms, piece)
    ]
    transfers.sort(key=lambda transfer: transfer.order)
    brought = _Brought((at, t.windows) for at, t in enumerate(transfers) if not t.outgoing)
    numbers: dict[tuple[bool, int], int] = {}
    messages: list[Message] = []
    for _, outgoing, peer, windows in transfers:
        number = numbers.get((outgoing, peer), 0)
        numbers[outgoing, peer] = number + 1
        waits = brought.by(windows) if outgoing else ()
        messages.append(Message(outgoing, peer, number, windows, waits))
    return TransferPlan(tuple(messages))


class _Brought:
    """Which messages bring what. No host is sent what it has: no two bring the same, and whatever brings
    something that is sent on comes first, be it of another move."""

    def __init__(self, messages: Iterable[tuple[int, tuple[Window, ...]]]) -> None:
        self._windows = sorted((*window, at) for at, windows in messages for window in windows)

    def by(self, windows: Sequence[Window]) -> tuple[int, ...]:
        """The messages that bring any of `windows`."""
        sources: set[int] = set()
        for array, low, high in windows:
            place = max(0, bisect.bisect_left(self._windows, (array, low, low, 0)) - 1)
            while place < len(self._windows):
                other, first, end, at = self._windows[place]
                if (other, first) >= (array, high):
                    break
                if other == array and low < end:
                    sources.add(at)
                place += 1
        return tuple(sorted(sources))


def _transfers(move: Move, place: int, rank: int, forms: Sequence[Form], piece: int) -> list[_Transfer]:
    blocks = [[w for i, form in enumerate(forms) for w in form.windows(i, parts)] for parts in move.parts]
    lengths = [sum(window.high - window.low for window in block) for block in blocks]
    slices = min(MOST_SLICES, max(1, -(-max(lengths) // piece)))
    windows = [window for block in blocks for window in block]
    starts = [0, *itertools.accumulate(window.high - window.low for window in windows)]
    bounds = _bounds(lengths, slices)
    transfers: list[_Transfer] = []
    for number, sends in enumerate(_program(move.kind, len(move.hosts), slices).rounds):
        for send in sends:
            for outgoing, peer, low, high in of_rank(send, rank, bounds):
                cut = _cut(windows, starts, low, high)
                transfers.append(_Transfer((number, place), outgoing, move.hosts[peer], cut))
    return transfers


@functools.lru_cache(maxsize=64)
def _program(kind: Kind, ranks: int, slices: int) -> Program:
    return program(_ALGORITHM[kind], kind, ranks, slices=slices)


def _bounds(lengths: Sequence[int], slices: int) -> Ints:
    """Where the chunks begin when blocks of `lengths` bytes stand one behind the other, each cut into
    `slices`."""
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    inside = np.arange(slices, dtype=np.int64)
    cuts = starts[:-1, None] + np.asarray(lengths, np.int64)[:, None] * inside // slices
    return np.append(cuts.reshape(-1), starts[-1])


def _cut(windows: Sequence[Window], starts: Sequence[int], low: int, high: int) -> tuple[Window, ...]:
    """Bytes `low` to `high` - 1 of `windows` one behind the other, which begin at `starts`."""
    pieces: list[Window] = []
    at = bisect.bisect_right(starts, low) - 1
    while low < high:
        array, first, _ = windows[at]
        end = min(high, starts[at + 1])
        pieces.append(Window(array, first + low - starts[at], first + end - starts[at]))
        low, at = end, at + 1
    return tuple(pieces)
