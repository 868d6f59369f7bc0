"""Collectives under jit, over an mpi4py communicator, with one device per rank.

A `Channel` runs the collectives of one communicator. Their order is the order of their tokens: each
collective takes the token of the previous one and returns its own.

    channel = Channel(MPI.COMM_WORLD)
    token = channel.token()
    spec = Spec("all_reduce", algorithm=Algorithm("ring"))
    y, token = jax.jit(lambda x, t: channel.run(x, spec, t))(x, token)
"""

from __future__ import annotations

import functools
import warnings
import weakref
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from commplan.diagnostics import CommplanError, fail
from commplan.hang_limits import UNWATCHED, HangLimits, most_patient
from commplan.ir.collective_kinds import EXCHANGING, GATHERING, REDUCING, TAKES_BLOCKS
from commplan.ir.schedule import ReduceOp
from commplan.lowering.jax.backend import BufferLayout, BufferRun
from commplan.lowering.jax.collectives.bitcast import from_ordered, to_ordered
from commplan.lowering.mpi import build, primitives, rounds
from commplan.lowering.mpi.instructions import DTYPES, Instructions, instructions
from commplan.lowering.mpi.job import interruption, watchdog
from commplan.lowering.mpi.job.drain import at_exit, drain
from commplan.lowering.mpi.job.engine_errors import waiting_line
from commplan.lowering.mpi.job.groups import Groups
from commplan.lowering.mpi.job.release import Resources, drop, free_dropped
from commplan.lowering.mpi.job.rendezvous import Rendezvous
from commplan.lowering.mpi.lists import Settings, make_list, reduces
from commplan.lowering.mpi.tuning import KINDS, WINDOW, Spec, choose_program
from commplan.recorder.file import Details, Recording

_OPS: tuple[ReduceOp, ...] = ("sum", "max", "min")
LABELS = 1024  # number of labels in tags; equals `Channel::kLabels` of the engine
_issued: dict[int, Issued] = {}  # the collectives of all channels of this process, by number in the engine


class Issued(NamedTuple):
    """A collective with a number in the engine.

    Attributes:
        spec: Its parameters, with the axes spelled out.
        size: The number of elements of this rank's operand.
        dtype: The name of the dtype of the operand.
        groups: The ranks of its channel.
    """

    spec: Spec
    size: int
    dtype: str
    groups: Groups


def _forget(numbers: Mapping[Any, int], recording: Recording | None) -> None:
    """Remove the bookkeeping of a channel that all ranks have left."""
    for number in numbers.values():
        _issued.pop(number, None)
    if recording is not None:
        watchdog.forget(recording)


def issued(number: int) -> Issued | None:
    """The collective with this number in the engine; None if the number belongs to a request to servers."""
    return _issued.get(number)


class Pending(NamedTuple):
    """A collective that has been started. `finish` must be in the same jit as `start`.

    Attributes:
        xs: The operands, whose buffers must stay valid.
        results: The results, which have their values only once the collective is complete.
        handle: The engine's handle, i32[2]; None if the collective is complete.
        number: The number of the collective in the engine; -1 if it has none.
    """

    xs: Sequence[Array]
    results: list[Array]
    handle: Array | None
    number: int


class Channel:
    """A communicator for collectives under jit. All ranks of `comm` must create it together.

    If the engine is not available on some rank (CP0830), rank 0 warns, and every collective uses the form
    `rounds`.

    Args:
        comm: An mpi4py communicator, which is duplicated.
        sizes: The axes of the plan and their sizes; None for one axis (see `Groups`).
        limits: The times after which a wait ends with an error that names the blocking rank. If five times
            the median interval between two runs of the collective is longer than `watchdog_s`, it replaces
            `watchdog_s`. By default there is no watchdog.
        plan: The name of the plan, for the flight record.
        job: The name of the job, for the flight record. The name on rank 0 counts; if it is empty, one is
            generated.
        rendezvous: Runs blocking calls with a timeout; None for one with the default timeout.

    Attributes:
        groups: This rank's position among the ranks, and the communicators.
        resources: The communicators and the engine's channel, which are freed once the channel is dropped;
            None without the engine.
        recording: The flight record of this rank; None if the channel is not watched.

    Raises:
        CommplanError: CP0831 if the sizes do not match the communicator, CP0849 if a rank does not join.
    """

    def __init__(
        self,
        comm: Any,
        sizes: Mapping[str, int] | None = None,
        *,
        limits: HangLimits = UNWATCHED,
        plan: str = "",
        job: str = "",
        rendezvous: Rendezvous | None = None,
    ) -> None:
        self.groups = Groups(comm, sizes, rendezvous)
        self._library, watched = self._load_engine(limits, plan, job)
        self._channel: int | None = None
        self._numbers: dict[Any, int] = {}
        self.resources: Resources | None = None
        self.recording: Recording | None = None
        if self._library is not None:
            channel: int = self._library.commplan_channel_open(self.groups.comm.py2f(), 1)
            ranks = self.groups.comm.Get_size()
            if watched is not None and self.groups.concurrent and ranks > 1:
                self.recording = self.groups.rendezvous(
                    watchdog.start, self._library, channel, watched, self.groups.comm, self.groups.rank,
                    self.groups.sizes,
                )  # fmt: skip
            forget = functools.partial(_forget, self._numbers, self.recording)
            self._channel = channel
            self.resources = Resources(self._library, channel, self.groups, forget)
            weakref.finalize(self, drop, self.resources).atexit = False
        free_dropped()
        # By number of a list: `Instructions.last` and `Instructions.late`.
        self._completion: dict[int, tuple[Any, Any]] = {}
        at_exit(self._library)

    @property
    def engine(self) -> Any:
        """The engine, or None if it is not available on every rank."""
        return self._library

    def _load_engine(self, limits: HangLimits, plan: str, job: str) -> tuple[Any, watchdog.Watched | None]:
        """The engine and the watchdog settings, if all ranks have the engine: forms cannot be mixed."""
        library, problem = None, ""
        try:
            library = build.library()
            interruption.install(library)
        except CommplanError as error:
            problem = str(error)
        report = (problem, limits, job or watchdog.job())
        answers: list[tuple[str, HangLimits, str]]
        answers = self.groups.rendezvous(self.groups.comm.allgather, report)
        reasons = [reason for reason, *_ in answers if reason]
        if not reasons:
            watched = watchdog.Watched(most_patient([each for _, each, _ in answers]), answers[0][2], plan)
            return library, None if watched.limits.watchdog_s is None else watched
        if self.groups.rank == 0:
            message = f"collectives run message by message through mpi4jax, which is slower: {reasons[0]}"
            warnings.warn(message, RuntimeWarning, 3)
        return None, None

    def close(self) -> None:
        """Wait for dispatched operations, then close the channel.

        Programs that were compiled for this channel fail from now on. So do collectives that other ranks have
        begun on it and this rank has not.
        """
        if self._channel is not None:
            drain(this_thread=True)
            self._library.commplan_channel_close(self._channel)
            self._channel = None

    @staticmethod
    def token() -> Array:
        """The token for the first collective of a chain."""
        return jnp.zeros((1,), jnp.int32)

    def run(self, x: Array, spec: Spec, token: Array) -> tuple[Array, Array]:
        """Run the collective of `x`.

        Args:
            x: This rank's operand.
            spec: The collective.
            token: The token of the previous operation.

        Returns:
            The result, and the token for the next operation. The shape of the result depends on `spec.kind`:

            - all_reduce, broadcast, reduce, shift: the shape of `x`.
            - reduce_scatter, scatter: the leading dimension is divided by the number of ranks.
            - all_gather, gather: the leading dimension is multiplied by the number of ranks; a scalar becomes
              [ranks].
            - all_to_all, swap: the shape of `x`; the leading dimension is cut into one block per rank.

            Except on the root, the values of `reduce` and `gather` are unspecified.

        Raises:
            CommplanError: CP0831 if the kind, the axes, the shape or the dtype do not fit, CP0832 if the
                channel is closed, CP0833 for the form `split` if MPI allows only one thread; and the errors
                of `programs.program_of`.
        """
        shape = self._result_shape(x, spec)
        if self._is_trivial(x, spec):
            return x.reshape(shape), token
        if spec.form == "split" and self._library is not None:
            pending, token = self.start(x, spec, token)
            return self.finish(pending, token)
        if spec.form == "rounds" or self._library is None:
            y = self._rounds(rounds.tied(x, token), spec).reshape(shape)
            return y, rounds.after(token, y)
        result = jax.ShapeDtypeStruct(shape, x.dtype)
        (y,), after = primitives.call((x,), token, (result,), self._number_of(x, spec))
        return y, after

    def can_start_packed(self, spec: Spec, size: int) -> bool:
        """Whether `begin` supports this collective of `size` elements without a packed buffer."""
        has_work = size > 0 and self.groups.ways(self._axes(spec)) > 1
        is_allowed = spec.form == "call" or self.groups.concurrent
        return self._library is not None and spec.form != "rounds" and has_work and is_allowed

    def begin(
        self,
        xs: Sequence[Array],
        spec: Spec,
        operand_layout: BufferLayout,
        result_layout: BufferLayout,
        token: Array,
    ) -> tuple[Pending, Array]:
        """Begin the collective of a buffer without creating the buffer.

        Call it only if `can_start_packed` returns true.

        Args:
            xs: The arrays that make up the operand buffer, of one dtype; at least one.
            spec: The collective. With form `call` it is also completed, and the result has no handle.
            operand_layout: The positions of `xs` in the operand buffer.
            result_layout: The positions of the results in the result buffer.
            token: The token of the previous operation.

        Returns:
            The collective for `end`, and the token for the next operation.

        Raises:
            CommplanError: See `run`.
        """
        dtype = xs[0].dtype
        results = [jax.ShapeDtypeStruct(shape, dtype) for shape in result_layout.shapes]
        whole = self._number_of(jax.ShapeDtypeStruct((operand_layout.size,), dtype), spec)
        number = self._packed_number(whole, operand_layout, result_layout, np.dtype(dtype).itemsize)
        if spec.form == "split":
            return _start(xs, results, number, token)
        done, after = primitives.call(xs, token, results, number)
        return Pending(xs, done, None, number), after

    def start(self, x: Array, spec: Spec, token: Array) -> tuple[Pending, Array]:
        """Begin the collective of `x`. The engine's progress thread advances it in the background.

        Without the engine, or if there is nothing to move, the collective is complete on return.

        Args:
            x: This rank's operand.
            spec: The collective; its form is ignored.
            token: The token of the previous operation.

        Returns:
            The collective for `finish`, and the token for the next operation.

        Raises:
            CommplanError: See `run`.
        """
        if self._is_trivial(x, spec) or self._library is None:
            y, token = self.run(x, replace(spec, form="call"), token)
            return Pending((x,), [y], None, -1), token
        if not self.groups.concurrent:
            note = "initialize MPI with MPI_THREAD_MULTIPLE, or use another form than `split`"
            fail("CP0833", "form `split` needs two threads in MPI, and this MPI allows one", note)
        result = jax.ShapeDtypeStruct(self._result_shape(x, spec), x.dtype)
        return _start((x,), [result], self._number_of(x, spec), token)

    def end(self, pending: Pending, token: Array) -> tuple[Sequence[Array], Array]:
        """Wait for a pending collective. Returns its results and the token for the next operation."""
        return primitives.finish(pending.xs, pending.results, pending.handle, token, pending.number)

    def finish(self, pending: Pending, token: Array) -> tuple[Array, Array]:
        """Wait for a collective with one result. Returns the result and the token for the next operation."""
        (y,), after = self.end(pending, token)
        return y, after

    def _rounds(self, x: Array, spec: Spec) -> Array:
        """Run the collective message by message, without the engine."""
        if spec.op != "sum" and jnp.issubdtype(x.dtype, jnp.floating):  # XLA:CPU reads denormals as zero
            ordered = self._rounds(to_ordered(x, is_maximum=spec.op == "max"), spec)
            return from_ordered(ordered, dtype=x.dtype)
        axes = self._axes(spec)
        resolved = replace(spec, axes=axes)
        rank, comm = self.groups.index(axes), self.groups.blocking(axes)
        chosen = choose_program(resolved, self.groups, self._whole(x.size, resolved), x.dtype.itemsize)
        if chosen is None:
            return rounds.native(x, resolved, rank, comm)
        return rounds.run(chosen.program, x.reshape(-1), rank, spec.op, comm)

    def _whole(self, size: int, spec: Spec) -> int:
        """The number of elements of the whole buffer if each rank has `size`."""
        return size * self.groups.ways(self._axes(spec)) if spec.kind in GATHERING else size

    def _axes(self, spec: Spec) -> tuple[str, ...]:
        """The axes of `spec`, or all axes."""
        return tuple(self.groups.sizes) if spec.axes is None else spec.axes

    def _is_trivial(self, x: Array, spec: Spec) -> bool:
        """Whether nothing has to be moved."""
        return x.size == 0 or self.groups.ways(self._axes(spec)) == 1

    def _result_shape(self, x: Array, spec: Spec) -> tuple[int, ...]:
        """The shape of the result. Raises CP0831 if the kind or the shape of `x` does not fit."""
        if spec.kind not in KINDS:
            fail("CP0831", f"there is no collective `{spec.kind}`", f"expected one of: {', '.join(KINDS)}")
        ranks = len(self.groups.along(self._axes(spec)))
        shape = tuple(x.shape)
        if spec.kind in GATHERING:
            return (ranks * shape[0], *shape[1:]) if shape else (ranks,)
        if spec.kind not in TAKES_BLOCKS:
            return shape
        if not shape or shape[0] % ranks:
            described = f"a leading dimension of {shape[0]}" if shape else "a scalar"
            message = f"{spec.kind} over {ranks} ranks cannot divide {described}"
            fail("CP0831", message, f"pad the leading dimension to a multiple of {ranks}")
        return shape if spec.kind in EXCHANGING else (shape[0] // ranks, *shape[1:])

    def _number_of(self, x: Array | jax.ShapeDtypeStruct, spec: Spec) -> int:
        """The engine's number for this collective of an array like `x`; created on first use."""
        if self._channel is None:
            fail("CP0832", "this channel is closed")
        key = (replace(spec, axes=self._axes(spec), form="call"), x.size, str(x.dtype))
        if key not in self._numbers:
            number = self._create(key[0], x.size, np.dtype(x.dtype))
            self._numbers[key] = number
            primitives.owners[number] = self
            _issued[number] = Issued(*key, self.groups)
        return self._numbers[key]

    def _packed_number(
        self, number: int, operand_layout: BufferLayout, result_layout: BufferLayout, itemsize: int
    ) -> int:
        """The engine's number for collective `number` with these buffer layouts; created on first use."""
        key = (number, operand_layout, result_layout)
        if key not in self._numbers:
            tables = [_layout(layout, itemsize) for layout in (operand_layout, result_layout)]
            completion = self._completion.get(number, ((), ()))
            last, late = (_numbers(rows, np.int64) for rows in completion)
            self._numbers[key] = self._library.commplan_packed(
                number, tables[0].ctypes.data, len(operand_layout.runs), tables[1].ctypes.data,
                len(result_layout.runs), last.ctypes.data, len(last), late.ctypes.data, len(late),
            )  # fmt: skip
            primitives.owners[self._numbers[key]] = self
            if number in _issued:
                _issued[self._numbers[key]] = _issued[number]
        return self._numbers[key]

    def _create(self, spec: Spec, size: int, dtype: np.dtype[Any]) -> int:
        """Create the collective of `size` elements on each rank in the engine; returns its number."""
        if spec.kind in REDUCING and dtype.name not in DTYPES:
            supported = ", ".join(DTYPES)
            fail("CP0831", f"arrays of {dtype.name} cannot be reduced", f"supported dtypes: {supported}")
        whole, axes = self._whole(size, spec), spec.axes or ()
        chosen = choose_program(spec, self.groups, whole, dtype.itemsize)
        if chosen is None:
            return self._describe(self._create_native(spec, size, dtype), spec, whole, dtype)
        program = instructions(chosen.program, self.groups.index(axes), whole, dtype.itemsize, chosen.piece)
        label = _label(spec, whole, dtype)
        number = self._create_list(program, self.groups.along(axes), spec, dtype, label)
        self._describe(number, spec, whole, dtype)
        if spec.kind != "swap":
            return number
        # The slots of a swap hold the blocks of operand and result in other orders; packing permutes them.
        orders = chosen.program.targets, chosen.program.sources
        operand_layout, result_layout = (
            _in_slots(order[self.groups.index(axes)].tolist(), size) for order in orders
        )
        return self._packed_number(number, operand_layout, result_layout, dtype.itemsize)

    def _describe(self, number: int, spec: Spec, whole: int, dtype: np.dtype[Any]) -> int:
        """Attach the details for flight records to `number`, and return it.

        Args:
            number: The number of the collective in the engine.
            spec: The collective.
            whole: The number of elements of the whole buffer.
            dtype: The dtype of the operand.
        """
        nbytes, axes = whole * dtype.itemsize, spec.axes or ()
        algorithm = spec.algorithm.name
        details = Details(spec.kind, algorithm, nbytes, dtype.name, spec.root, spec.opens, axes)
        self._library.commplan_describe(number, details.text().encode())
        return number

    def _create_native(self, spec: Spec, size: int, dtype: np.dtype[Any]) -> int:
        """Create a collective that MPI's own function carries out; returns its number."""
        group = self.groups.native(spec.axes or ())
        parts = group.Get_size() if spec.kind in TAKES_BLOCKS else 1
        dtype_name, count = dtype.name, size // parts
        if dtype_name not in DTYPES:  # it is moved as bytes
            dtype_name, count = "uint8", count * dtype.itemsize
        kind = KINDS.index("all_to_all" if spec.kind == "swap" else spec.kind)
        dtype_code = DTYPES.index(dtype_name)
        op = _OPS.index(spec.op)
        table = _numbers((kind, group.py2f(), count, spec.root, dtype_code, op), np.int64)
        return self._library.commplan_native(self._channel, table.ctypes.data, _waiting(spec).encode())

    def _create_list(
        self, program: Instructions, ranks: tuple[int, ...], spec: Spec, dtype: np.dtype[Any], label: int
    ) -> int:
        """Create an instruction list among `ranks` of the channel; returns its number."""
        messages = max((row.message + 1 for row in program.code), default=0)
        dtype_code = DTYPES.index(dtype.name) if reduces(program) else 0
        op = _OPS.index(spec.op)
        settings = Settings(WINDOW, label, messages > WINDOW, dtype_code, op)
        peers = [ranks[peer] for peer in program.peers]
        number = make_list(self._library, self._channel or 0, program, peers, settings, _waiting(spec))
        self._completion[number] = program.last, program.late
        return number


def _label(spec: Spec, whole: int, dtype: np.dtype[Any]) -> int:
    """The label in the tags of this collective, which separates its messages from those of most others.

    All ranks must compute the same label, but their plan files may have different paths. `whole` is the
    number of elements of the whole buffer.
    """
    algorithm = str(spec.algorithm), spec.chunk
    fields = (spec.kind, spec.axes, spec.op, spec.root, *algorithm, spec.line, whole, dtype.name)
    return zlib.crc32("\0".join(map(str, fields)).encode()) % LABELS


def _waiting(spec: Spec) -> str:
    """The text that the engine appends to failures of this collective; empty without a plan."""
    return waiting_line(spec.line, spec.file) if spec.line else ""


def _start(xs: Sequence[Array], results: Sequence[Any], number: int, token: Array) -> tuple[Pending, Array]:
    pending, handle, after = primitives.start(xs, token, results, number)
    return Pending(xs, pending, handle, number), after


def _in_slots(blocks: Sequence[int], size: int) -> BufferLayout:
    """The layout of a buffer whose slots hold these equal blocks of one array of `size` elements."""
    length = size // len(blocks)
    runs = tuple(BufferRun(slot * length, 0, block * length, length) for slot, block in enumerate(blocks))
    return BufferLayout(size, runs, ((size,),))


def _layout(layout: BufferLayout, itemsize: int) -> Any:
    """The layout as integers for the engine: the size of the buffer in bytes, then four numbers per run."""
    rows = np.array(layout.runs, np.int64).reshape(-1, 4) * (itemsize, 1, itemsize, itemsize)
    return _numbers(np.concatenate(([layout.size * itemsize], rows.reshape(-1))), np.int64)


def _numbers(values: Any, dtype: Any) -> Any:
    """A contiguous array, whose address the engine reads."""
    return np.ascontiguousarray(np.asarray(values, dtype))
