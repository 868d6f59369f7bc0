"""Host functions in worker processes, for functions that hold the interpreter lock.

Each thread of the ring drives one worker process: it sends a block of records and waits until the worker has
filled the rows, in memory that both map. Orders, random streams, checks and errors equal those of threads,
because the same code makes the block. `cores` therefore bounds processes as it bounds threads.

`concurrent.futures.ProcessPoolExecutor` cannot replace the processes here. It does not report how a process
ended, starts no process with a separate environment (OMP_NUM_THREADS), does not end one whose function hangs,
and leaves its processes running after kill -9 of the program. loky has the last defect, too. On Python 3.11,
a job without work takes 32 us here, 172 us in ProcessPoolExecutor and 284 us in loky 3.7.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import spawn
from multiprocessing.connection import Connection
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from commplan.diagnostics import CommplanError, Diagnostic, Note, fail, type_of
from commplan.ir.schedule import Map, Read, Share, results
from commplan.runtime.input.host_batch import FlowState
from commplan.runtime.input.layout import Array
from commplan.runtime.input.observe.accounting import Meter
from commplan.runtime.input.observe.wait_log import ClosedError
from commplan.runtime.input.program import HostProgram
from commplan.runtime.input.shm.arena import HEADER, Arena, Cells
from commplan.runtime.input.shm.slots import Slots
from commplan.runtime.input.stages import worker_process as _worker
from commplan.runtime.input.stages.batch_builder import BatchBuilder
from commplan.runtime.input.stages.user_calls import Call
from commplan.wait import until_done

if TYPE_CHECKING:
    from commplan.runtime.machines.pinned import Pinning

GRACE_S = 0.5  # seconds for a worker to end after this process has closed its socket, before it is killed
_FATE_S = 10.0  # seconds for a worker that has closed its socket to end: its libraries may clean up
_STACK_S = 0.1  # seconds for a worker to write its stack
_LOOK_S = 1.0  # seconds between two checks that a worker is alive; the socket usually reports its end first
_ENDED_MOST = 3  # maximum number of workers that may end on one block, under `on_failure = continue`
# glibc's default thresholds return every large array to the system: hundreds of page faults for the next one.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 25), "MALLOC_TRIM_THRESHOLD_": str(1 << 29)}
# A worker should use one core: the threads of libraries would multiply with the workers.
_THREADS = (
    "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS", "OPENCV_FOR_THREADS_NUM", "RAYON_NUM_THREADS", "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
)  # fmt: skip
# Prefixes of variables that are omitted: a worker is not a rank of an MPI job.
_OF_MPI = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "MPI_LOCAL", "HYDRA_")


def environment() -> dict[str, str]:
    """The environment of a worker: one thread per library, tuned malloc, no accelerator, no rank of a job."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(_OF_MPI)}
    return {**_MALLOC, **variables, **dict.fromkeys(_THREADS, "1"), "JAX_PLATFORMS": "cpu"}


class EndedError(Exception):
    """The worker process has ended."""


@dataclass(eq=False)
class _Process:
    """One worker process.

    Attributes:
        number: its index in the header of the arena, unique among the living workers.
        process: the process.
        link: the socket to it.
    """

    number: int
    process: subprocess.Popen[bytes]
    link: Connection[Any, Any]

    def ask(self, message: object) -> Any:
        """Send `message` and wait for the reply. Raises EndedError if the process ends first."""

        def look(_: float) -> None:
            if self.process.poll() is not None:  # a child process of it may keep the socket open
                raise EndedError

        try:
            self.link.send(message)
            until_done(self.link.poll, look, _LOOK_S)
            return self.link.recv()
        except (EOFError, OSError):
            raise EndedError from None

    def end(self) -> None:
        """End the worker: kill it if it does not finish its block within `GRACE_S`.

        The link closes with its last reference: another thread may be about to call `hang_up`.
        """
        self.hang_up()
        for seconds in (GRACE_S, _FATE_S):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
                return
            self.process.kill()

    def hang_up(self) -> None:
        """Shut the socket down: a wait in `ask` ends, and so does the worker after its block."""
        with (
            contextlib.suppress(OSError),  # it has ended already
            socket.fromfd(self.link.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as link,
        ):
            link.shutdown(socket.SHUT_RDWR)

    def fate(self) -> str:
        """Wait until the process has ended, and return the predicate of a message about its end."""
        try:
            code = self.process.wait(_FATE_S)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        if code >= 0:
            return f"ended with exit code {code}"
        try:
            return f"was ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"was ended by signal {-code}"


@dataclass
class Workers:
    """The worker processes of a phase, one per thread that calls `run`.

    Attributes:
        program, sources, functions, block, meter, pinning: see `functions.workers_of`.
        most: the maximum number of busy workers.

    Raises:
        CommplanError: CP0952 for a source or function that cannot be pickled, CP0954 in a worker process,
            CP0955 if `most` is too large. From `run`: CP0953 for a worker that ended, CP0954 if none can be
            started, and any error of the block.
        ClosedError: from `run`, after `stop`.
    """

    program: HostProgram
    sources: Mapping[str, object]
    functions: Mapping[str, Callable[..., Any]]
    block: int
    most: int
    meter: Meter
    pinning: Pinning | None = None
    _arena: Arena = field(init=False)  # the memory that workers map
    _payload: list[Array] = field(init=False)  # the result of `packed`, in the arena
    _needs_program: bool = field(init=False)  # whether workers import the user's program
    _slots: tuple[Slots, ...] = ()  # see `share`
    _local: threading.local = field(default_factory=threading.local)  # `worker`: that of the thread
    _lock: threading.RLock = field(default_factory=threading.RLock)  # a finalizer may run while it is held
    _busy: threading.Semaphore = field(init=False)
    _living: set[_Process] = field(default_factory=set[_Process])
    _stopped: bool = False

    def __post_init__(self) -> None:
        _refuse_nesting()
        self._busy = threading.Semaphore(self.most)
        if self.most > HEADER // _worker.PROGRESS_NBYTES:
            fail("CP0955", f"{self.most} worker processes are more than {HEADER // _worker.PROGRESS_NBYTES}")
        data = packed(self.program, self.sources, self.functions)
        self._needs_program = b"__main__" in data[0]
        self._arena = Arena(self.pinning)
        self._payload = [self._arena.fresh((len(piece),), np.dtype(np.uint8)) for piece in data]
        for array, piece in zip(self._payload, data, strict=True):
            array[:] = memoryview(piece)

    def share(self, *slots: Slots) -> None:
        """Set the mappings of the file that holds shared batches."""
        self._slots = slots

    # --- called by the batch builder ---

    def fresh(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        """A page-aligned array that workers can fill."""
        return self._arena.fresh(shape, dtype)

    def run(self, batch: BatchBuilder, state: FlowState, before: bool, low: int, high: int) -> None:
        """Run a block in this thread's worker. For the arguments, see `BatchBuilder.block`."""
        job = self._job(batch, state, before, low, high)
        goes_on = any(read.hints.on_failure == "continue" for read in state.flow.reads)
        for ended in range(1, _ENDED_MOST + 1):
            worker = self._mine(again=goes_on and ended < _ENDED_MOST)
            if worker is None:
                self.meter.restarted()
                continue
            try:
                with self._busy:  # a thread that makes another process's parts has a worker, too
                    done = worker.ask(job)
            except EndedError:
                error = self._end_error(worker, job, state, ended)
                self._drop(worker)
                if self._stopped:
                    raise ClosedError from None
                if not goes_on or ended == _ENDED_MOST:
                    raise error from None
                self.meter.restarted()
                continue
            self._apply(done, state, before, low, high)
            return

    # --- called by producers ---

    def stop(self) -> None:
        """Make every wait for a worker return."""
        with self._lock:
            self._stopped = True
            living = list(self._living)
        for worker in living:
            worker.hang_up()

    def leave(self) -> None:
        """End the worker of the calling thread, which ends, too."""
        worker = getattr(self._local, "worker", None)
        if worker is not None:
            self._drop(worker)

    def close(self) -> None:
        """End all workers, for good. Batches in use stay valid."""
        self.stop()
        for worker in list(self._living):  # workers of other threads
            self._drop(worker)
        self._arena.close()

    # --- one block ---

    def _job(self, batch: BatchBuilder, state: FlowState, before: bool, low: int, high: int) -> _worker.Job:
        return _worker.Job(
            batch.number, batch.epoch, batch.step, self.program.flows.index(state.flow), before, low, high,
            len(state.rows),
            {key: ids[low:high].tolist() for key, ids in state.records.items()},
            np.ascontiguousarray(state.valid[:, low:high]).tobytes(),
            {} if before else {ref: self._cells(array) for ref, array in state.arrays.items()},
            {ref: self._cells(batch.moved[ref]) for ref in state.flow.moved},
        )  # fmt: skip

    def _cells(self, array: Array) -> Cells:
        """The location of an array in memory that workers map: in the slots or in the arena."""
        offsets = (slots.offset(array.__array_interface__["data"][0]) for slots in self._slots)
        offset = next((offset for offset in offsets if offset is not None), None)
        memory = 0 if offset is None else 1
        offset = self._arena.find(array) if offset is None else offset
        if offset is None:
            raise RuntimeError("a batch is in memory that is not shared with worker processes")
        return Cells(memory, offset, array.shape, array.strides, array.dtype)

    def _apply(self, done: _worker.Done, state: FlowState, before: bool, low: int, high: int) -> None:
        """Apply the results and costs of a block, and raise its error, if any."""
        state.valid[:, low:high] = np.frombuffer(done.valid, bool).reshape(len(state.valid), high - low)
        for key, usage in done.spent:
            self.meter.add(key, **usage)
        # The costs of a worker outside of its stages count for the line of the first stage.
        cpu = done.cpu_s - sum(usage.get("cpu_s", 0.0) for _, usage in done.spent)
        system = done.system_s - sum(usage.get("system_s", 0.0) for _, usage in done.spent)
        ops = state.flow.before if before else state.flow.after
        first = next((results(op)[0] for op in ops if not isinstance(op, Share)), None)
        if first is not None:
            self.meter.add(first, cpu_s=max(0.0, cpu), system_s=max(0.0, min(system, cpu)))
        if done.failure is not None:
            _raise(done.failure)

    def _end_error(self, worker: _Process, job: _worker.Job, state: FlowState, times: int) -> CommplanError:
        """CP0953 for a worker that ended during `job`. times: how many workers have ended on it."""
        op, record = self._doing(worker, state)
        doing = f"reading source `{op.source}`" if isinstance(op, Read) else f"host function `{op.fn}`"
        which = f" worked on record {record}" if record >= 0 else ""
        ids: list[int] = next(iter(job.records.values()), list[int]())
        shown = ", ".join(map(str, ids[:16])) + (", ..." if len(ids) > 16 else "")
        notes = [
            f"the block: epoch {job.epoch}, step {job.step}, rows {job.low}-{job.high - 1}: records {shown}",
            "with `on_failure = continue` on the load another process makes the block"
            if times < _ENDED_MOST
            else f"{times} processes in a row ended on this block",
        ]
        fate = worker.fate()
        if fate.endswith("SIGKILL"):
            notes.append("the system ends processes in this way if memory is short")
        message = f"worker process {worker.process.pid} {fate} while {doing}{which}"
        file = self.program.schedule.file
        return CommplanError(Diagnostic("CP0953", message, op.span, tuple(map(Note, notes)), file=file))

    def _doing(self, worker: _Process, state: FlowState) -> tuple[Read | Map, int]:
        """The stage that a worker runs, else the flow's load, and the record's index; -1 for several."""
        progress = _worker.PROGRESS.unpack_from(self._arena.header, worker.number * _worker.PROGRESS_NBYTES)
        ops = [op for flow in self.program.flows for op in flow.ops if isinstance(op, Read | Map)]
        at = int(progress[0])
        return ops[at] if 0 <= at < len(ops) else state.flow.reads[0], int(progress[1])

    def call_in(self, frame: FrameType | None) -> Call | None:
        """The call that the worker of a thread runs; None if there is none, or while it starts.

        Args:
            frame: the innermost frame of the thread; None if it has ended.
        """
        while frame is not None and frame.f_code is not Workers._greet.__code__:
            if frame.f_code is Workers.run.__code__ and "worker" in frame.f_locals:
                worker: _Process | None = frame.f_locals["worker"]
                if worker is None:
                    return None
                return Call(*self._doing(worker, frame.f_locals["state"]), worker.process.pid)
            frame = frame.f_back
        return None

    @staticmethod
    def ask_stack(process: int) -> None:
        """Make a worker, by its process number, write its stack to stderr, and wait for `_STACK_S`."""
        with contextlib.suppress(OSError):
            os.kill(process, _worker.STACK_SIGNAL)
            time.sleep(_STACK_S)

    # --- processes ---

    def _mine(self, *, again: bool) -> _Process | None:
        """The worker of the calling thread, started if it has none.

        The thread must outlive the worker: the kernel ends a worker with the thread that started it.

        Returns:
            The worker; None if a signal ended it before it was ready and `again` permits another one.
        """
        worker: _Process | None = getattr(self._local, "worker", None)
        if worker is None:
            worker = self._start()
            if not self._greet(worker, again=again):
                return None
            self._local.worker = worker
        return worker

    def _start(self) -> _Process:
        """Start a worker, without its program. Raises CP0954 if that fails."""
        parent_end, child_end = multiprocessing.Pipe()
        descriptors = [self._arena.descriptor, *(slots.descriptor for slots in self._slots[:1])]
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from {_worker.__name__} import main; "
            f"main({child_end.fileno()}, {os.getpid()})"
        )
        # The command ends in `-c`, code and an argument: keep the interpreter and its options.
        *interpreter, _, _, _ = spawn.get_command_line()
        with child_end:
            try:
                process = subprocess.Popen(
                    [*interpreter, "-c", code],
                    stdin=subprocess.DEVNULL,
                    env=environment(),
                    pass_fds=(child_end.fileno(), *descriptors),
                    process_group=0,  # Ctrl-C reaches the program only, which ends its workers
                )
            except OSError as error:
                parent_end.close()
                fail("CP0954", f"a worker process cannot be started: {error.strerror}")
        with self._lock:
            numbers = {worker.number for worker in self._living}
            number = next(n for n in range(len(numbers) + 1) if n not in numbers)
            worker = _Process(number, process, parent_end)
            self._living.add(worker)
            stopped = self._stopped
        if stopped:
            worker.hang_up()
        return worker

    def _greet(self, worker: _Process, *, again: bool) -> bool:
        """Send the worker its program, and wait until it is ready.

        Returns:
            Whether it is ready. False if a signal ended it and `again` is set: an exit would happen again.

        Raises:
            CommplanError: CP0954 if it cannot be made ready, or the error that it reports.
            ClosedError: After `stop`.
        """
        setup = _worker.Setup(
            _program() if self._needs_program else None, sys.argv,
            [(self._arena.find(array) or 0, array.nbytes) for array in self._payload],
            self._arena.descriptor, self._slots[0].descriptor if self._slots else -1,
            worker.number, self.block,
        )  # fmt: skip
        try:
            problem: _worker.Failure | None = worker.ask(setup)
        except EndedError:
            fate = worker.fate()
            self._drop(worker)
            if self._stopped:
                raise ClosedError from None
            if again and (worker.process.returncode or 0) < 0:
                return False
            fail("CP0954", f"a worker process {fate} before it was ready", "its own message stands above")
        if problem is not None:
            self._drop(worker)
            lines = problem.traceback.strip().splitlines() or ["it reported no reason"]
            if problem.diagnostics:
                raise CommplanError(*problem.diagnostics)
            fail("CP0954", f"a worker process cannot be made ready: {lines[-1]}", *lines[-5:-1])
        return True

    def _drop(self, worker: _Process) -> None:
        """End a worker, which may be that of this thread."""
        if getattr(self._local, "worker", None) is worker:
            self._local.worker = None
        worker.end()
        with self._lock:
            self._living.discard(worker)


def _raise(failure: _worker.Failure) -> None:
    """Raise the exception of a worker's block, as a thread would."""
    cause: BaseException | None = None
    if failure.cause:
        cause = cast("BaseException", pickle.loads(failure.cause))
        cause.add_note(f"in a worker process:\n{failure.traceback}")
    elif failure.traceback:
        cause = RuntimeError(failure.traceback)
    if failure.diagnostics:
        raise CommplanError(*failure.diagnostics) from cause
    raise cause or RuntimeError("a worker process failed and reported no reason")


def _program() -> tuple[str, str] | None:
    """How a fresh interpreter can import the running program, see `Setup.main`; None if it is not a file."""
    module = sys.modules.get("__main__")
    spec = getattr(module, "__spec__", None)
    if spec is not None and spec.name != "__main__":
        return "name", str(spec.name)
    path = getattr(module, "__file__", None)
    return None if path is None else ("path", os.path.abspath(path))  # noqa: PTH100  links stay as they are


def packed(
    program: HostProgram, sources: Mapping[str, object], functions: Mapping[str, Callable[..., Any]]
) -> list[Any]:
    """The pickle of the program, sources and functions, followed by the buffers of large arrays.

    Raises:
        CommplanError: CP0952, all in one error, for each source or function that cannot be pickled, or that
            was defined at a prompt.
    """
    buffers: list[Any] = []
    try:
        data = pickle.dumps(
            (program, dict(sources), dict(functions)), protocol=5, buffer_callback=buffers.append
        )
    except Exception as error:
        problems = _unpicklable(program, sources, functions)
        if not problems:
            raise
        raise CommplanError(*problems) from error
    if b"__main__" in data and _program() is None:
        typed = [name for name, value in functions.items() if getattr(value, "__module__", "") == "__main__"]
        fail(
            "CP0952",
            f"{', '.join(f'`{name}`' for name in typed) or 'a source'} was defined at a prompt or in a "
            "notebook, where a worker process cannot find it",
            "write it to a module and import it from there",
        )
    return [data, *(buffer.raw() for buffer in buffers)]


def _unpicklable(
    program: HostProgram, sources: Mapping[str, object], functions: Mapping[str, object]
) -> list[Diagnostic]:
    """CP0952 for each source and function that cannot be pickled."""
    ops = [op for flow in program.flows for op in flow.ops]
    spans = {op.source: op.span for op in ops if isinstance(op, Read)}
    spans |= {op.fn: op.span for op in ops if isinstance(op, Map)}
    problems: list[Diagnostic] = []
    for kind, group in (("source", sources), ("host function", functions)):
        for name, value in group.items():
            try:
                pickle.dumps(value, protocol=5)
            except Exception as error:  # noqa: BLE001  pickling may raise anything
                message = f"{kind} `{name}` cannot be sent to worker processes: {error}"
                note = Note(f"it is {type_of(value)}; only top-level definitions can be sent")
                file = program.schedule.file
                problems.append(Diagnostic("CP0952", message, spans.get(name), (note,), file=file))
    return problems


def _refuse_nesting() -> None:
    """Raise CP0954 in a worker process."""
    if _worker.inside:
        fail(
            "CP0954",
            "a worker process that imports the program reached the call that starts workers",
            'put what the program does when it is run below `if __name__ == "__main__":`',
        )
