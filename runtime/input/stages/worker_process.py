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
from commplan.runtime.input.shm.arena import HEADER, Cells
from commplan.runtime.input.stages.batch_builder import BatchBuilder, BatchFactory
from commplan.runtime.input.stages.records import stages

STACK_SIGNAL = signal.SIGUSR1  # makes a worker write its stack to stderr
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG, prctl(2)
# The progress of a worker, in the arena's header: the number of the op in the program (-1: none), and the
# index of the record (-1: several).
PROGRESS = struct.Struct("<qq")
PROGRESS_NBYTES = 64  # bytes of the header per worker: a cache line, which no other worker writes
MAIN = "__mp_main__"  # the name of the main module in children of `multiprocessing`

inside: bool = False  # whether this process is a worker


class Setup(NamedTuple):
    """The initialization of a worker.

    Attributes:
        main: how to import the program: ("name", module) or ("path", file); None if nothing that the worker
            needs is defined in it.
        argv: the arguments of the program.
        pieces: (offset, bytes) of the pickle and its buffers in the arena.
        arena: the descriptor of the arena.
        slots: the descriptor of the shared slots; -1 for none.
        number: the worker's index in the arena's header.
        block: the maximum number of records in a job.
    """

    main: tuple[str, str] | None
    argv: list[str]
    pieces: list[tuple[int, int]]
    arena: int
    slots: int
    number: int
    block: int


class Job(NamedTuple):
    """A block of rows to make.

    Attributes:
        number: the number of the batch.
        epoch, step: the position of the batch.
        flow: the index of the flow in the program.
        before: whether to run the stages before the transfer between processes, or those after it.
        low, high: the first row of the block, and the row after the last one.
        rows: the number of rows of the batch in this process.
        records: the record indices of the block, per load and variant.
        valid: bool [variants of the flow, high - low], whether the rows are valid.
        arrays: the arrays of the batch to fill; empty before the transfer.
        moved: the arrays of shared values in the slot.
    """

    number: int
    epoch: int
    step: int
    flow: int
    before: bool
    low: int
    high: int
    rows: int
    records: dict[tuple[Ref, Coords], list[int]]
    valid: bytes
    arrays: dict[Ref, Cells]
    moved: dict[Ref, Cells]


class Failure(NamedTuple):
    """An error of a worker.

    Attributes:
        diagnostics: those of a CommplanError; empty for any other exception.
        cause: the pickled cause of a CommplanError, or the pickled exception; empty if there is none or it
            cannot be pickled.
        traceback: the text of its traceback; empty if there is none.
    """

    diagnostics: tuple[Diagnostic, ...]
    cause: bytes
    traceback: str


class Done(NamedTuple):
    """The result of a job. The rows themselves are in shared memory.

    Attributes:
        valid: as in `Job`, after the stages.
        spent: the reports of the stages to their meter: the key of a line, and its costs.
        cpu_s: user and system CPU seconds of the whole process since the last job.
        system_s: the system's part of `cpu_s`.
        failure: the error of the job; None if there is none.
    """

    valid: bytes
    spent: list[tuple[str, dict[str, float]]]
    cpu_s: float
    system_s: float
    failure: Failure | None


class Tally(Meter):
    """Collects costs for the parent process.

    Attributes:
        spent: see `Done`.
    """

    def __init__(self, phase: str) -> None:
        super().__init__(phase)
        self.spent: list[tuple[str, dict[str, float]]] = []

    def add(self, key: str, **costs: float) -> None:
        """See `Meter.add`."""
        self.spent.append((key, costs))


class WorkerLoop:
    """Makes blocks from jobs.

    Attributes:
        program: the host program.
        tally: the costs of the current job.
        progress: the memory for `PROGRESS` of this worker, which the parent reads.
        maker: the factory for builders of batches.

    Args:
        setup: the first message of the parent.

    Raises:
        Exception: any error of the user's program, or of unpickling its sources and functions.
    """

    def __init__(self, setup: Setup) -> None:
        if setup.main is not None:
            _import_program(*setup.main, setup.argv)

        # Unpickle from private pages: a source may write to its arrays. Workers share pages that none writes.
        end = max(offset + nbytes for offset, nbytes in setup.pieces)
        memory = memoryview(mmap.mmap(setup.arena, end, access=mmap.ACCESS_COPY))
        pickled, *buffers = [memory[offset : offset + nbytes] for offset, nbytes in setup.pieces]
        program, sources, functions = pickle.loads(pickled, buffers=buffers)
        self.program: HostProgram = program
        self.tally = Tally(self.program.phase.name)

        # Stages that write their progress.
        stage_of = stages(self.program, sources, functions, self.tally)
        header = memoryview(mmap.mmap(setup.arena, HEADER))
        offset = setup.number * PROGRESS_NBYTES
        progress = header[offset : offset + PROGRESS_NBYTES]
        watched = {
            ref: dataclasses.replace(stage, begins=functools.partial(PROGRESS.pack_into, progress, 0, number))
            for number, (ref, stage) in enumerate(stage_of.items())
        }
        self.progress = progress
        self.maker = BatchFactory(self.program, {}, watched, self.tally, setup.block)

        self._arena, self._arena_nbytes = setup.arena, 0  # the descriptor, and the bytes that are mapped
        self._memories: dict[int, mmap.mmap] = {}  # by `Cells.memory`: 0 for the arena, 1 for the slots
        if setup.slots >= 0:
            self._memories[1] = mmap.mmap(setup.slots, os.fstat(setup.slots).st_size)
        self._last_cpu = _process_cpu()

    def do(self, job: Job) -> Done:
        """Make a block. Its error is a part of the result, except `SystemExit`, which ends the worker."""
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
            failure = _failure_of(error)
        PROGRESS.pack_into(self.progress, 0, -1, -1)
        before, self._last_cpu = self._last_cpu, _process_cpu()
        return Done(
            state.valid[:, job.low : job.high].tobytes(), list(self.tally.spent),
            self._last_cpu[0] - before[0], self._last_cpu[1] - before[1], failure,
        )  # fmt: skip

    def _state(self, job: Job) -> FlowState:
        """The state of a job's flow. Only the rows of the block are set."""
        flow = self.program.flows[job.flow]
        records: dict[tuple[Ref, Coords], Any] = {}
        for key, ids in job.records.items():
            records[key] = np.zeros(job.rows, np.int64)
            records[key][job.low : job.high] = ids
        valid = np.zeros((len(self.program.variants(flow.per)), job.rows), bool)
        block = np.frombuffer(job.valid, bool).reshape(len(valid), job.high - job.low)
        valid[:, job.low : job.high] = block
        return FlowState(flow, np.arange(job.rows), records, {}, self._arrays(job.arrays), valid)

    def _arrays(self, cells_by_ref: dict[Ref, Cells]) -> dict[Ref, Any]:
        """The arrays in shared memory."""
        return {ref: cells.array(self._memory(cells)) for ref, cells in cells_by_ref.items()}

    def _memory(self, cells: Cells) -> mmap.mmap:
        """The mapped file in which an array is."""
        if cells.memory:
            return self._memories[cells.memory]
        size = os.fstat(self._arena).st_size
        if size > self._arena_nbytes:
            # The arena grew: map all of it again; the old mapping is released with its arrays.
            self._memories[0] = mmap.mmap(self._arena, size)
            self._arena_nbytes = size
        return self._memories[0]


def _process_cpu() -> tuple[float, float]:
    """CPU seconds of this process: user and system together, and system alone."""
    return time.process_time(), os.times().system


def _failure_of(error: BaseException) -> Failure:
    """An exception as it is sent to the parent process."""
    diagnostics: tuple[Diagnostic, ...] = getattr(error, "diagnostics", ())
    root = error.__cause__ if diagnostics else error
    cause = b""
    if root is not None:
        with contextlib.suppress(Exception):
            cause = pickle.dumps(root)
            pickle.loads(cause)
    text = "".join(traceback.format_exception(root)) if root is not None else ""
    return Failure(diagnostics, cause, text)


def _import_program(kind: str, program: str, argv: list[str]) -> None:
    """Import the user's program as `__main__`, where pickle looks for the definitions in it.

    Args:
        kind: "name" if `program` is the name of a module, "path" if it is a file.
        program: see `kind`.
        argv: the arguments of the program.
    """
    sys.argv[:] = argv
    run = runpy.run_module if kind == "name" else runpy.run_path
    names = run(program, run_name=MAIN)
    module = types.ModuleType(MAIN)
    module.__dict__.update(names)
    sys.modules["__main__"] = sys.modules[MAIN] = module


def _end_with(parent: int) -> None:
    """Make the kernel end this process with the thread that started it. Exits if `parent` has ended."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def main(descriptor: int, parent: int) -> None:
    """Serve jobs from a socket until it closes.

    Receives a `Setup`, and answers None or a `Failure`. Then receives `Job` messages, and answers each with a
    `Done`.

    Args:
        descriptor: the descriptor of the socket.
        parent: the process number of the parent.
    """
    global inside  # noqa: PLW0603  a property of this process
    inside = True
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    with contextlib.suppress(AttributeError, ValueError):  # no stderr, or one without a file
        faulthandler.register(STACK_SIGNAL, all_threads=False)
    _end_with(parent)
    with Connection(descriptor) as link, contextlib.suppress(EOFError, ConnectionError):
        setup = link.recv()
        try:
            loop = WorkerLoop(setup)
        except Exception as error:  # noqa: BLE001  sent to the parent process
            link.send(_failure_of(error))
            return
        link.send(None)
        while True:
            link.send(loop.do(link.recv()))
