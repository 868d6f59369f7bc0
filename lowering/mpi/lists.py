"""Instruction lists in the engine: made there, and run by a thread that waits for them."""

from __future__ import annotations

import atexit
import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from commplan.lowering.mpi import build
from commplan.lowering.mpi.instructions import RECEIVE_REDUCE, Instructions

_ERROR = 1000  # bytes of one, at most
_LOOK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class Settings(NamedTuple):
    """How a list runs. window: messages in flight to one rank. label: part of its tags. synchronous: whether
    a send ends when its receiver has begun to take it. dtype, op: of what it reduces, as the engine's
    numbers."""

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
    """The engine's number for a list. ranks: of its peers. where: the line that waits for it, for errors."""
    awaited: list[list[int]] = [[] for _ in program.code]
    for i, before in enumerate(program.waits):
        for j in before:
            awaited[j].append(i)
    table = np.array(program.code, np.int64).reshape(len(program.code), -1)
    waits = np.array([len(before) for before in program.waits], np.int32)
    begins = np.cumsum([0, *map(len, awaited)], dtype=np.int64)
    after = np.array([i for each in awaited for i in each], np.int32)
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
    return any(row.what == RECEIVE_REDUCE for row in program.code)


class WaitPace(NamedTuple):
    """How often a thread looks whether messages have come: nanoseconds. It gives way to others for `spin`,
    then it sleeps, from `shortest` to `longest`; for `bulk` where many messages are under way."""

    spin: int
    shortest: int
    longest: int
    bulk: int


class BrokenOffError(Exception):
    """The engine ended a list: what MPI, or another rank, said."""


@functools.cache
def _end_looks_at_exit(library: Any) -> None:
    """A thread that nobody has joined must not wait for the interpreter's lock once that has ended, nor MPI
    at its end for that thread."""
    atexit.register(library.commplan_end_looks)


class Runner:
    """Runs lists in the calling thread, which lets others run meanwhile, Python's too.

    comm: an mpi4py communicator that nobody frees before `close`. Raises CP0830 where there is no engine.
    """

    def __init__(self, comm: Any, pace: WaitPace) -> None:
        self._library = build.library()
        _end_looks_at_exit(self._library)
        self._channel: int = self._library.commplan_channel_open(comm.py2f(), 0)
        self._pace = (ctypes.c_int64 * 4)(*pace)
        self._numbers: list[int] = []

    def add(self, program: Instructions, ranks: Sequence[int], settings: Settings) -> int:
        """The number of a list. ranks: of its peers in `comm`."""
        number = make_list(self._library, self._channel, program, ranks, settings)
        self._numbers.append(number)
        return number

    def drop(self, number: int) -> None:
        """Forget a list that is not under way."""
        self._numbers.remove(number)
        self._library.commplan_list_free(number)

    def run(
        self, number: int, address: int, look: Callable[[float, int], object], memory: object = None
    ) -> None:
        """Run a list where its messages lie, from `address` on, which is in `memory`.

        look: called now and then with the seconds since anything has moved, and the rank that is waited for,
        -1 where that cannot be said; what it raises ends the run. Raises that, or `BrokenOffError`; then
        nothing can be run again, and the memory is kept: messages may still touch it.
        """
        errors: list[BaseException] = []

        @_LOOK
        def looked(idle: int, rank: int) -> int:
            try:
                look(idle * 1e-9, rank)
            except BaseException as error:  # noqa: BLE001  raised below
                errors.append(error)
            return bool(errors)

        text = ctypes.create_string_buffer(_ERROR + 1)
        if self._library.commplan_run(number, address, self._pace, looked, text, _ERROR):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))  # while MPI lives, which ends after Python
            raise errors[0] if errors else BrokenOffError(text.value.decode(errors="replace"))

    def close(self) -> None:
        """Forget all lists; nothing is run any more. May be called twice."""
        for number in tuple(self._numbers):
            self.drop(number)
        self._library.commplan_channel_close(self._channel)
        self._library.commplan_channel_release(self._channel)
