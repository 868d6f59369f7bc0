"""Creates instruction lists in the engine, and runs them outside of compiled programs."""

from __future__ import annotations

import atexit
import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from commplan.lowering.mpi import build
from commplan.lowering.mpi.instructions import RECEIVE_REDUCE, Instructions

_ERROR = 1000  # maximum number of bytes of an error
_LOOK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_int64)  # the callback of `commplan_run`


class Settings(NamedTuple):
    """How a list runs.

    Attributes:
        window: The maximum number of messages in flight to one rank.
        label: The label in the tags of its messages, below `LABELS` of `collectives`.
        synchronous: Whether a send completes only when its receive has started.
        dtype: The dtype of reductions, an index into `DTYPES`; ignored by a list without reductions.
        op: The reduction: 0 for a sum, 1 for the maximum, 2 for the minimum.
    """

    window: int
    label: int
    synchronous: bool
    dtype: int = 0
    op: int = 0


def make_list(
    library: Any,
    channel: int,
    program: Instructions,
    ranks: Sequence[int],
    settings: Settings,
    where: str = "",
) -> int:
    """Create a list in the engine and return its number.

    Args:
        library: The engine.
        channel: The engine's handle of the channel.
        program: The instructions.
        ranks: The ranks of `program.peers` in the channel.
        settings: How the list runs.
        where: The text with the line of the plan that waits for it, for errors (`waiting_line`); empty
            without a plan.
    """
    dependents: list[list[int]] = [[] for _ in program.code]  # the inverse of `program.waits`
    for i, before in enumerate(program.waits):
        for j in before:
            dependents[j].append(i)
    table = np.array(program.code, np.int64).reshape(len(program.code), -1)
    waits = np.array([len(before) for before in program.waits], np.int32)
    begins = np.cumsum([0, *map(len, dependents)], dtype=np.int64)
    after = np.array([i for later in dependents for i in later], np.int32)
    peers = np.array(ranks, np.int32)
    window, label, synchronous, dtype, op = settings
    rounds = program.rounds
    words = np.array((program.scratch, window, synchronous, dtype, op, label, len(rounds), *rounds), np.int64)
    pointers = [array.ctypes.data for array in (waits, begins, after, peers)]
    number: int = library.commplan_list(
        channel,
        table.ctypes.data,
        len(program.code),
        *pointers,
        len(peers),
        words.ctypes.data,
        where.encode(),
    )
    return number


def reduces(program: Instructions) -> bool:
    """Whether the list contains a reduction."""
    return any(row.kind == RECEIVE_REDUCE for row in program.code)


class PollIntervals(NamedTuple):
    """The polling intervals of a waiting thread, in nanoseconds.

    Attributes:
        spin: How long the thread yields to other threads between polls before it sleeps.
        shortest: The first sleep between polls. Sleeps become longer until there is progress.
        longest: The longest sleep.
        bulk: The first sleep, without yielding before, if many messages are in flight.
    """

    spin: int
    shortest: int
    longest: int
    bulk: int


class ListAbortedError(Exception):
    """The engine ended a list early. The text is the error of MPI or of another rank."""


@functools.cache
def _end_looks_at_exit(library: Any) -> None:
    """Stop callbacks before the interpreter shuts down.

    Otherwise a running thread would wait for the interpreter's lock, and MPI_Finalize for the thread.
    """
    atexit.register(library.commplan_end_looks)


class Runner:
    """Runs lists in the calling thread, without holding the interpreter's lock.

    Args:
        comm: An mpi4py communicator, which must not be freed before `close`.
        intervals: The polling intervals.

    Raises:
        CommplanError: CP0830 if the engine is not available.
    """

    def __init__(self, comm: Any, intervals: PollIntervals) -> None:
        self._library = build.library()
        _end_looks_at_exit(self._library)
        self._channel: int = self._library.commplan_channel_open(comm.py2f(), 0)
        self._intervals = (ctypes.c_int64 * 4)(*intervals)
        self._numbers: list[int] = []

    def add(self, program: Instructions, ranks: Sequence[int], settings: Settings) -> int:
        """Create a list and return its number; see `make_list` for the arguments."""
        number = make_list(self._library, self._channel, program, ranks, settings)
        self._numbers.append(number)
        return number

    def drop(self, number: int) -> None:
        """Delete a list that is not running."""
        self._numbers.remove(number)
        self._library.commplan_list_free(number)

    def run(
        self, number: int, address: int, look: Callable[[float, int], object], memory: object = None
    ) -> None:
        """Run a list without an operand. Its messages are at `address`, which is the list's result buffer.

        Args:
            number: The number of the list.
            address: The address of the messages.
            look: Called periodically with the seconds since the last progress, and the rank that blocks the
                list, or -1 if it is unknown. An exception ends the run.
            memory: The object that owns the messages. After an error it is never freed, since pending
                messages may still access it.

        Raises:
            ListAbortedError: If MPI or another rank reports an error. The channel cannot be used again.
            BaseException: The exception of `look`. The channel cannot be used again.
        """
        errors: list[BaseException] = []

        @_LOOK
        def call_look(idle: int, rank: int) -> int:
            try:
                look(idle * 1e-9, rank)
            except BaseException as error:  # noqa: BLE001  raised below
                errors.append(error)
            return bool(errors)

        text = ctypes.create_string_buffer(_ERROR + 1)
        if self._library.commplan_run(number, address, self._intervals, call_look, text, _ERROR):
            # MPI may access it until after Python has shut down.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
            raise errors[0] if errors else ListAbortedError(text.value.decode(errors="replace"))

    def close(self) -> None:
        """Delete all lists and close the channel. May be called twice."""
        for number in tuple(self._numbers):
            self.drop(number)
        self._library.commplan_channel_close(self._channel)
        self._library.commplan_channel_release(self._channel)
