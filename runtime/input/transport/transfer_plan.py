"""The messages of one host in the transfers of a batch, derived from chunk programs.

The moves of a division are collectives between hosts: an all-gather whose blocks are the rows that each host
made, or a broadcast of one host's rows. Each is a program of `commplan.collectives` over blocks of any
lengths: `ring`, and `chain` in slices that follow each other from host to host. A block consists of all bytes
that a host contributes, array after array and copy after copy, as if they were contiguous. A message is one
window of the arrays' memory or, across array boundaries, several.

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

# Maximum number of slices of a block. Larger blocks have larger messages, which use the rendezvous protocol.
MOST_SLICES = 512
_ALGORITHM: dict[Kind, str] = {"all_gather": "ring", "broadcast": "chain"}


class Window(NamedTuple):
    """Bytes `low` to `high` - 1 of a slot."""

    low: int
    high: int


@dataclass(frozen=True)
class Form:
    """The shape and the position of one array of a slot (see `RowSlices`).

    Attributes:
        copies: the number of copies.
        rows: the rows of each copy.
        row_nbytes: the bytes of a row.
        bounds: the first row of each part, then the number of rows in all parts.
        offset: the offset in bytes of the array in its slot.
    """

    copies: int
    rows: int
    row_nbytes: int
    bounds: tuple[int, ...]
    offset: int = 0

    def windows(self, parts: Sequence[int]) -> list[Window]:
        """The windows of the rows of `parts`, copy by copy, and in the order of `parts`.

        Adjacent rows form one window. Parts without rows have none.
        """
        windows: list[Window] = []
        for copy in range(self.copies):
            for part in parts:
                low, high = (
                    self.offset + (copy * self.rows + self.bounds[edge]) * self.row_nbytes
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
    """A message that has no number yet.

    Attributes:
        order: the round and the index of the collective, equal at both ends.
        outgoing: whether this host sends it, or receives it.
        host: the other host.
        windows: the bytes of the slot, in the order of the message.
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
    """The instructions of `host` for collectives between hosts on a slot, in place.

    Short arrays share messages with their neighbors. All hosts must pass the same arguments except `host`.

    Args:
        moves: the collectives. A later one may send rows that an earlier one brings.
        host: the host. If it takes part in no collective, the list is empty.
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
    """Builds the list of instructions. Messages of several windows go through scratch memory.

    Args:
        transfers: all messages, in the order in which `send` and `receive` will be called.
    """

    def __init__(self, transfers: Sequence[_Transfer]) -> None:
        # The number of the first instruction of each message. A received window is written by the message, or
        # by its copy after the message.
        starts = itertools.accumulate((transfer.rows for transfer in transfers), initial=0)
        self._writers = _Writers(
            (start if transfer.rows == 1 else start + 1 + index, window)
            for start, transfer in zip(starts, transfers, strict=False)
            if not transfer.outgoing
            for index, window in enumerate(transfer.windows)
        )
        self._code: list[Instruction] = []
        self._waits: list[tuple[int, ...]] = []  # see `Instructions.waits`
        self._peers: dict[int, int] = {}  # the index of each host
        self._messages: Counter[tuple[bool, int]] = Counter()  # by direction and peer
        self._scratch = 0  # bytes

    def instructions(self) -> Instructions:
        """The list of all messages so far."""
        return Instructions(tuple(self._code), tuple(self._waits), tuple(self._peers), self._scratch)

    def send(self, transfer: _Transfer) -> None:
        """Add the instructions of an outgoing message, after those that write its windows."""
        if transfer.rows == 1:
            window = transfer.windows[0]
            self._message(transfer, OUTPUT, window.low, self._writers.find(window))
            return
        start, first = self._scratch, len(self._code)
        for (low, high), offset in self._pack_windows(transfer):
            copy = Instruction(COPY, 0, 0, OUTPUT, low, SCRATCH, offset, high - low)
            self._add(copy, self._writers.find(Window(low, high)))
        self._message(transfer, SCRATCH, start, tuple(range(first, len(self._code))))

    def receive(self, transfer: _Transfer) -> None:
        """Add the instructions of an incoming message."""
        if transfer.rows == 1:
            self._message(transfer, OUTPUT, transfer.windows[0].low, ())
            return
        message = len(self._code)
        self._message(transfer, SCRATCH, self._scratch, ())
        for (low, high), offset in self._pack_windows(transfer):
            self._add(Instruction(COPY, 0, 0, SCRATCH, offset, OUTPUT, low, high - low), (message,))

    def _pack_windows(self, transfer: _Transfer) -> Iterator[tuple[Window, int]]:
        """The windows of a message, each with its offset in newly reserved scratch memory."""
        for window in transfer.windows:
            yield window, self._scratch
            self._scratch += window.high - window.low

    def _message(self, transfer: _Transfer, buffer: int, offset: int, waits: tuple[int, ...]) -> None:
        """Add a message from or to `offset` of a buffer, after the instructions `waits`."""
        peer = self._peers.setdefault(transfer.host, len(self._peers))
        number = self._messages[transfer.outgoing, peer]
        self._messages[transfer.outgoing, peer] += 1
        nbytes = sum(high - low for low, high in transfer.windows)
        kind = SEND if transfer.outgoing else RECEIVE
        self._add(Instruction(kind, peer, number, buffer, offset, buffer, offset, nbytes), waits)

    def _add(self, instruction: Instruction, waits: tuple[int, ...]) -> None:
        """Add an instruction, after the instructions `waits`."""
        self._code.append(instruction)
        self._waits.append(waits)


class _Writers:
    """The numbers of the instructions that write received windows.

    Windows do not overlap, because no host receives rows that it has. An instruction precedes the sends of
    its window, also across collectives.

    Args:
        writers: the number of the instruction that writes each window.
    """

    def __init__(self, writers: Iterable[tuple[int, Window]]) -> None:
        self._windows = sorted((*window, number) for number, window in writers)  # (low, high, number)

    def find(self, window: Window) -> tuple[int, ...]:
        """The instructions that write any part of `window`, in ascending order."""
        numbers: list[int] = []
        # The window before the first one that begins in `window` may reach into it.
        index = max(0, bisect.bisect_left(self._windows, (window.low, window.low, 0)) - 1)
        while index < len(self._windows) and self._windows[index][0] < window.high:
            if window.low < self._windows[index][1]:
                numbers.append(self._windows[index][2])
            index += 1
        return tuple(sorted(numbers))


def _transfers(
    move: HostTransfer, index: int, rank: int, forms: Sequence[Form], piece: int
) -> list[_Transfer]:
    """The messages of a host in a collective, in the order of rounds.

    Args:
        move: the collective.
        index: its index among the collectives of the batch.
        rank: the index of the host in `move.hosts`.
        forms: the arrays of the slot.
        piece: see `transfer_list`.
    """
    blocks = [[window for form in forms for window in form.windows(parts)] for parts in move.parts]
    lengths = [sum(window.high - window.low for window in block) for block in blocks]
    slices = min(MOST_SLICES, max(1, -(-max(lengths) // piece)))
    windows = [window for block in blocks for window in block]
    starts = [0, *itertools.accumulate(window.high - window.low for window in windows)]
    bounds = _bounds(lengths, slices)
    transfers: list[_Transfer] = []
    for round_number, sends in enumerate(_program(move.kind, len(move.hosts), slices).rounds):
        for send in sends:
            for outgoing, peer, low, high in transfers_of_rank(send, rank, bounds):
                pieces = _cut_windows(windows, starts, low, high)
                transfers.append(_Transfer((round_number, index), outgoing, move.hosts[peer], pieces))
    return transfers


@functools.lru_cache(maxsize=64)
def _program(kind: Kind, ranks: int, slices: int) -> ChunkProgram:
    """The chunk program of a collective, with `slices` chunks of each block."""
    return program(_ALGORITHM[kind], kind, ranks, slices=slices)


def _bounds(lengths: Sequence[int], slices: int) -> Ints:
    """The first byte of each chunk, then the total, i64 [blocks * slices + 1].

    Args:
        lengths: the bytes of each block; the blocks are concatenated.
        slices: the number of chunks of each block.
    """
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    numbers = np.arange(slices, dtype=np.int64)
    cuts = starts[:-1, None] + np.asarray(lengths, np.int64)[:, None] * numbers // slices
    return np.append(cuts.reshape(-1), starts[-1])


def _cut_windows(windows: Sequence[Window], starts: Sequence[int], low: int, high: int) -> tuple[Window, ...]:
    """Bytes `low` to `high` - 1 of the concatenated `windows`, as windows of the slot.

    Args:
        windows: windows of the slot.
        starts: the position of each window in the concatenation, then the total of bytes.
        low, high: positions in the concatenation.
    """
    pieces: list[Window] = []
    index = bisect.bisect_right(starts, low) - 1
    while low < high:
        first = windows[index].low
        end = min(high, starts[index + 1])
        pieces.append(Window(first + low - starts[index], first + end - starts[index]))
        low, index = end, index + 1
    return tuple(pieces)
