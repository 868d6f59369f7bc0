"""The messages of one host in the transfers of a batch, derived from chunk programs.

The moves of a division are collectives between hosts: an all-gather whose blocks are the rows that each host
made, or a broadcast of one host's rows. Each is a program of `commplan.collectives` over blocks of any
lengths: `ring`, and `chain` in slices that follow each other down the line of hosts. A block is all that a
host contributes, array after array and copy after copy, as if it were contiguous. Messages are sent from the
memory of the arrays: one window or, across array boundaries, several.

Nothing here calls MPI: the result is a list of instructions that the engine runs.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from commplan.collectives.layout import MESSAGE
from commplan.collectives.program import ChunkProgram, Ints, Kind
from commplan.collectives.registry import program
from commplan.input.work_partition import HostTransfer
from commplan.lowering.mpi.instructions import (
    COPY,
    OUTPUT,
    RECEIVE,
    SCRATCH,
    SEND,
    Instruction,
    Instructions,
    transfers_of_rank,
)

MOST_SLICES = 512  # of a block: larger blocks have larger messages, which use the rendezvous protocol
_ALGORITHM: dict[Kind, str] = {"all_gather": "ring", "broadcast": "chain"}


class Window(NamedTuple):
    """Bytes `low` to `high` - 1 of a slot."""

    low: int
    high: int


@dataclass(frozen=True)
class Form:
    """The shape of one array (see `RowSlices`).

    Attributes:
        copies: the number of copies.
        rows: the rows of each copy.
        row_nbytes: the bytes of a row.
        bounds: the first row of each part, and the end.
        at: the array's first byte in its slot.
    """

    copies: int
    rows: int
    row_nbytes: int
    bounds: tuple[int, ...]
    at: int = 0

    def windows(self, parts: Sequence[int]) -> list[Window]:
        """The windows of the rows of `parts`, in order, in each copy; adjacent rows form one window."""
        windows: list[Window] = []
        for copy in range(self.copies):
            for part in parts:
                low, high = (
                    self.at + (copy * self.rows + self.bounds[edge]) * self.row_nbytes
                    for edge in (part, part + 1)
                )
                if low == high:
                    continue
                if windows and windows[-1].high == low:
                    windows[-1] = Window(windows[-1].low, high)
                else:
                    windows.append(Window(low, high))
        return windows


class _Transfer(NamedTuple):
    """A message without a number yet.

    Attributes:
        order: the round and the number of the move, equal at both ends.
    """

    order: tuple[int, int]
    outgoing: bool
    host: int
    windows: tuple[Window, ...]

    @property
    def rows(self) -> int:
        """The number of its instructions: the message, and a copy of each window if there are several."""
        return 1 if len(self.windows) == 1 else 1 + len(self.windows)


def transfer_list(
    moves: Sequence[HostTransfer], host: int, forms: Sequence[Form], piece: int = MESSAGE
) -> Instructions:
    """The instructions of `host` for `moves` on a slot with arrays of `forms`, in place.

    Short arrays share messages with their neighbors. All hosts must pass the same arguments except `host`.

    Args:
        moves: the collectives.
        host: the host.
        forms: the arrays of the slot.
        piece: the approximate maximum of the bytes of a message.

    Returns:
        A list whose output is the slot and whose peers are hosts.
    """
    transfers = [
        transfer
        for index, move in enumerate(moves)
        if host in move.hosts
        for transfer in _transfers(move, index, move.hosts.index(host), forms, piece)
    ]
    transfers.sort(key=lambda transfer: transfer.order)
    builder = _Builder(transfers)
    for transfer in transfers:
        builder.send(transfer) if transfer.outgoing else builder.receive(transfer)
    return builder.instructions()


class _Builder:
    """Builds the list. Messages of several windows go through scratch memory."""

    def __init__(self, transfers: Sequence[_Transfer]) -> None:
        starts = itertools.accumulate((transfer.rows for transfer in transfers), initial=0)
        self._brought = _Brought(
            (at if transfer.rows == 1 else at + 1 + index, window)
            for at, transfer in zip(starts, transfers, strict=False)
            if not transfer.outgoing
            for index, window in enumerate(transfer.windows)
        )
        self._code: list[Instruction] = []
        self._waits: list[tuple[int, ...]] = []
        self._peers: dict[int, int] = {}
        self._messages: Counter[tuple[bool, int]] = Counter()
        self._scratch = 0

    def instructions(self) -> Instructions:
        return Instructions(tuple(self._code), tuple(self._waits), tuple(self._peers), self._scratch)

    def send(self, transfer: _Transfer) -> None:
        if transfer.rows == 1:
            self._message(transfer, OUTPUT, transfer.windows[0].low, self._brought.by(transfer.windows[0]))
            return
        at, first = self._scratch, len(self._code)
        for (low, high), where in self._pack_windows(transfer):
            copy = Instruction(COPY, 0, 0, OUTPUT, low, SCRATCH, where, high - low)
            self._add(copy, self._brought.by(Window(low, high)))
        self._message(transfer, SCRATCH, at, tuple(range(first, len(self._code))))

    def receive(self, transfer: _Transfer) -> None:
        if transfer.rows == 1:
            self._message(transfer, OUTPUT, transfer.windows[0].low, ())
            return
        message = len(self._code)
        self._message(transfer, SCRATCH, self._scratch, ())
        for (low, high), where in self._pack_windows(transfer):
            self._add(Instruction(COPY, 0, 0, SCRATCH, where, OUTPUT, low, high - low), (message,))

    def _pack_windows(self, transfer: _Transfer) -> Iterator[tuple[Window, int]]:
        """The windows of a message, each with its offset in newly reserved scratch memory."""
        for window in transfer.windows:
            yield window, self._scratch
            self._scratch += window.high - window.low

    def _message(self, transfer: _Transfer, buffer: int, at: int, waits: tuple[int, ...]) -> None:
        peer = self._peers.setdefault(transfer.host, len(self._peers))
        number = self._messages[transfer.outgoing, peer]
        self._messages[transfer.outgoing, peer] += 1
        nbytes = sum(high - low for low, high in transfer.windows)
        kind = SEND if transfer.outgoing else RECEIVE
        self._add(Instruction(kind, peer, number, buffer, at, buffer, at, nbytes), waits)

    def _add(self, row: Instruction, waits: tuple[int, ...]) -> None:
        self._code.append(row)
        self._waits.append(waits)


class _Brought:
    """The instruction that writes each window. Windows do not overlap, because no host receives rows that it
    has. An instruction precedes the sends of its window, also across moves."""

    def __init__(self, rows: Iterable[tuple[int, Window]]) -> None:
        self._windows = sorted((*window, row) for row, window in rows)

    def by(self, window: Window) -> tuple[int, ...]:
        """The instructions that write any part of `window`."""
        rows: list[int] = []
        index = max(0, bisect.bisect_left(self._windows, (window.low, window.low, 0)) - 1)
        while index < len(self._windows) and self._windows[index][0] < window.high:
            if window.low < self._windows[index][1]:
                rows.append(self._windows[index][2])
            index += 1
        return tuple(sorted(rows))


def _transfers(
    move: HostTransfer, index: int, rank: int, forms: Sequence[Form], piece: int
) -> list[_Transfer]:
    blocks = [[w for form in forms for w in form.windows(parts)] for parts in move.parts]
    lengths = [sum(window.high - window.low for window in block) for block in blocks]
    slices = min(MOST_SLICES, max(1, -(-max(lengths) // piece)))
    windows = [window for block in blocks for window in block]
    starts = [0, *itertools.accumulate(window.high - window.low for window in windows)]
    bounds = _bounds(lengths, slices)
    transfers: list[_Transfer] = []
    for number, sends in enumerate(_program(move.kind, len(move.hosts), slices).rounds):
        for send in sends:
            for outgoing, peer, low, high in transfers_of_rank(send, rank, bounds):
                cut = _cut_windows(windows, starts, low, high)
                transfers.append(_Transfer((number, index), outgoing, move.hosts[peer], cut))
    return transfers


@functools.lru_cache(maxsize=64)
def _program(kind: Kind, ranks: int, slices: int) -> ChunkProgram:
    return program(_ALGORITHM[kind], kind, ranks, slices=slices)


def _bounds(lengths: Sequence[int], slices: int) -> Ints:
    """The first byte of each chunk, for concatenated blocks of `lengths` bytes, each cut into `slices`."""
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    inside = np.arange(slices, dtype=np.int64)
    cuts = starts[:-1, None] + np.asarray(lengths, np.int64)[:, None] * inside // slices
    return np.append(cuts.reshape(-1), starts[-1])


def _cut_windows(windows: Sequence[Window], starts: Sequence[int], low: int, high: int) -> tuple[Window, ...]:
    """Bytes `low` to `high` - 1 of the concatenated `windows`, which begin at `starts`."""
    pieces: list[Window] = []
    at = bisect.bisect_right(starts, low) - 1
    while low < high:
        first = windows[at].low
        end = min(high, starts[at + 1])
        pieces.append(Window(first + low - starts[at], first + end - starts[at]))
        low, at = end, at + 1
    return tuple(pieces)
