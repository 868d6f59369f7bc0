"""A worker process: makes blocks of records for the process that started it, in memory that both map.

It is a fresh interpreter. It receives the sources and functions by `pickle` and runs the same code on a block
as a thread would. It ends when its socket closes, and the kernel ends it with the thread that started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import faulthandler
import functools
import mmap
import os
import pickle
import runpy
import signal
import struct
import sys
import time
import traceback
import types
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from commplan.diagnostics import Diagnostic
from commplan.ir.plan import Ref
from commplan.runtime.input.host_batch import FlowState
from commplan.runtime.input.observe.accounting import Meter
from commplan.runtime.input.program import Coords, HostProgram
from commplan.runtime.input.shm.arena import Cells
from commplan.runtime.input.stages.batch_builder import BatchBuilder, BatchFactory
from commplan.runtime.input.stages.records import stages

STACK_SIGNAL = signal.SIGUSR1  # makes a worker write its stack to stderr
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG, prctl(2)
PROGRESS = struct.Struct("<qq")  # the op's number in its program (-1: none), the record (-1: several)
PROGRESS_NBYTES = 64
MAIN = "__mp_main__"  # the name of the main module in children of `multiprocessing`

inside: bool = False  # whether this process is a worker


class Setup(NamedTuple):
    """The initialization of a worker.

    Attributes:
        main: how to import the program; None if nothing is defined in it.
        argv: the arguments of the program.
        pieces: (offset, bytes) of the pickle and its buffers in the arena.
        arena: the descriptor of the arena.
        slots: the descriptor of the shared slots; -1 for none.
        number: the worker's index in the arena's header.
        block: the number of records in a job, at most.
    """

    main: tuple[str, str] | None  # ("name" or "path", which)
    argv: list[str]
    pieces: list[tuple[int, int]]
    arena: int
    slots: int  # -1: none
    number: int
    block: int


class Job(NamedTuple):
    """A block: rows low..high of the flow `flow`, through the stages before the transfer (`before`) or after
    it."""

    number: int
    epoch: int
    step: int
    flow: int
    before: bool
    low: int
    high: int
    rows: int
    records: dict[tuple[Ref, Coords], list[int]]
    valid: bytes  # [variants, high - low], bool
    arrays: dict[Ref, Cells]
    moved: dict[Ref, Cells]


class Failure(NamedTuple):
    """An error of a worker.

    Attributes:
        cause: the pickled exception, empty if it cannot be pickled.
        traceback: the text of the traceback.
    """

    diagnostics: tuple[Diagnostic, ...]
    cause: bytes
    traceback: str


class Done(NamedTuple):
    """The result of a job.

    Attributes:
        spent: the reports of the stages to their meter.
        cpu_s, system_s: CPU seconds of the whole process since the last block.
    """

    valid: bytes
    spent: list[tuple[str, dict[str, float]]]
    cpu_s: float
    system_s: float
    failure: Failure | None


class Tally(Meter):
    """Records costs, to be sent to the parent process."""

    def __init__(self, phase: str) -> None:
        super().__init__(phase)
        self.spent: list[tuple[str, dict[str, float]]] = []

    def add(self, key: str, **costs: float) -> None:
        self.spent.append((key, costs))


class WorkerLoop:
    """Makes blocks from jobs."""

    def __init__(self, setup: Setup) -> None:
        if setup.main is not None:
            _import_program(*setup.main, setup.argv)
        end = max(offset + nbytes for offset, nbytes in setup.pieces)
        # Private pages: a source may write to its arrays, and all workers share the pages that are not
        # written.
        memory = memoryview(mmap.mmap(setup.arena, end, access=mmap.ACCESS_COPY))
        pickled, *buffers = [memory[offset : offset + nbytes] for offset, nbytes in setup.pieces]
        program, sources, functions = pickle.loads(pickled, buffers=buffers)
        self.program: HostProgram = program
        self.tally = Tally(self.program.phase.name)
        stage_of = stages(self.program, sources, functions, self.tally)
        header = memoryview(mmap.mmap(setup.arena, 1 << 16))
        offset = setup.number * PROGRESS_NBYTES
        progress = header[offset : offset + PROGRESS_NBYTES]
        watched = {
            ref: dataclasses.replace(stage, begins=functools.partial(PROGRESS.pack_into, progress, 0, number))
            for number, (ref, stage) in enumerate(stage_of.items())
        }
        self.progress = progress
        self.maker = BatchFactory(self.program, {}, watched, self.tally, setup.block)
        self._arena, self._arena_nbytes = setup.arena, 0
        self._memories: dict[int, mmap.mmap] = {}
        if setup.slots >= 0:
            self._memories[1] = mmap.mmap(setup.slots, os.fstat(setup.slots).st_size)
        self._last_cpu = _process_cpu()

    def do(self, job: Job) -> Done:
        self.tally.spent.clear()
        state = self._state(job)
        failure = None
        try:
            batch = BatchBuilder(self.maker, job.number, job.epoch, job.step, [state])
            batch.moved = self._arrays(job.moved)
            batch.block(state, job.before, job.low, job.high)
        except SystemExit:
            raise
        except BaseException as error:  # noqa: BLE001  sent to the parent process
            failure = _traceback_of(error)
        PROGRESS.pack_into(self.progress, 0, -1, -1)
        before, self._last_cpu = self._last_cpu, _process_cpu()
        return Done(
            state.valid[:, job.low : job.high].tobytes(), list(self.tally.spent),
            self._last_cpu[0] - before[0], self._last_cpu[1] - before[1], failure,
        )  # fmt: skip

    def _state(self, job: Job) -> FlowState:
        flow = self.program.flows[job.flow]
        records: dict[tuple[Ref, Coords], Any] = {}
        for key, ids in job.records.items():
            records[key] = np.zeros(job.rows, np.int64)
            records[key][job.low : job.high] = ids
        valid = np.zeros((len(self.program.variants(flow.per)), job.rows), bool)
        block = np.frombuffer(job.valid, bool).reshape(len(valid), job.high - job.low)
        valid[:, job.low : job.high] = block
        return FlowState(flow, np.arange(job.rows), records, {}, self._arrays(job.arrays), valid)

    def _arrays(self, cells: dict[Ref, Cells]) -> dict[Ref, Any]:
        return {ref: cell.array(self._memory(cell)) for ref, cell in cells.items()}

    def _memory(self, cells: Cells) -> mmap.mmap:
        if cells.memory:
            return self._memories[cells.memory]
        size = os.fstat(self._arena).st_size
        if size > self._arena_nbytes:
            # The arena grew: map all of it again; the old mapping is released with its arrays.
            self._memories[0] = mmap.mmap(self._arena, size)
            self._arena_nbytes = size
        return self._memories[0]


def _process_cpu() -> tuple[float, float]:
    times = os.times()
    return time.process_time(), times.system


def _traceback_of(error: BaseException) -> Failure:
    diagnostics: tuple[Diagnostic, ...] = getattr(error, "diagnostics", ())
    root = error.__cause__ if diagnostics else error
    cause = b""
    if root is not None:
        with contextlib.suppress(Exception):
            cause = pickle.dumps(root)
            pickle.loads(cause)
    text = "".join(traceback.format_exception(root)) if root is not None else ""
    return Failure(diagnostics, cause, text)


def _import_program(kind: str, which: str, argv: list[str]) -> None:
    """Import the user's program as `__main__`, so that pickle finds the definitions in it."""
    sys.argv[:] = argv
    names = runpy.run_module(which, run_name=MAIN) if kind == "name" else runpy.run_path(which, run_name=MAIN)
    module = types.ModuleType(MAIN)
    module.__dict__.update(names)
    sys.modules["__main__"] = sys.modules[MAIN] = module


def _end_with(parent: int) -> None:
    """Make the kernel end this process with the thread that started it."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def main(descriptor: int, parent: int) -> None:
    """Serve jobs from the socket `descriptor` until it closes."""
    global inside  # noqa: PLW0603  a property of this process
    inside = True
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    with contextlib.suppress(AttributeError, ValueError):  # no stderr, or one without a file
        faulthandler.register(STACK_SIGNAL, all_threads=False)
    _end_with(parent)
    with Connection(descriptor) as link, contextlib.suppress(EOFError, ConnectionError):
        setup = link.recv()
        try:
            bench = WorkerLoop(setup)
        except Exception as error:  # noqa: BLE001  sent to the parent process
            link.send(_traceback_of(error))
            return
        link.send(None)
        while True:
            link.send(bench.do(link.recv()))
