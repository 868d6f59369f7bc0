"""Collectives under jit, over an mpi4py communicator, one device for each rank.

A `Channel` is what a communicator is to this engine: messages of its own, in the order in which operations
are tied together by their tokens.

    channel = Channel(MPI.COMM_WORLD)
    token = channel.token()
    y, token = jax.jit(lambda x, t: channel.run(x, Spec("all_reduce", algorithm=RING), t))(x, token)
"""

from __future__ import annotations

import functools
import re
import warnings
import weakref
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from commplan.collectives.program import REDUCING
from commplan.diagnostics import CommplanError, fail
from commplan.ir.schedule import ReduceOp
from commplan.lowering.jax.backend import BufferLayout, Run
from commplan.lowering.jax.collectives.bitcast import from_ordered, to_ordered
from commplan.lowering.jax.typing_shim import jax, jnp
from commplan.lowering.mpi import build, primitives, rounds
from commplan.lowering.mpi.instructions import Instructions, instructions
from commplan.lowering.mpi.job import interruption, watchdog
from commplan.lowering.mpi.job.drain import at_exit, drain
from commplan.lowering.mpi.job.groups import Groups
from commplan.lowering.mpi.job.release import Resources, free_dropped
from commplan.lowering.mpi.job.rendezvous import Rendezvous
from commplan.lowering.mpi.lists import Settings, make_list, reduces
from commplan.lowering.mpi.tuning import KINDS, WINDOW, Spec, choice
from commplan.recorder.file import Details, Recording
from commplan.wait import BUSY_S

Array = Any
_DTYPES = ("bool", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
_OPS: tuple[ReduceOp, ...] = ("sum", "max", "min")
_LINE = re.compile(r"line \d+")
LABELS = 1024  # as many as the engine's tags tell apart
_issued: dict[int, Issued] = {}


class Issued(NamedTuple):
    """A collective as the engine's number for it stands for it: of a buffer of `size` elements."""

    spec: Spec
    size: int
    dtype: str
    groups: Groups


def _forget(numbers: Mapping[Any, int], recording: Recording | None) -> None:
    """What is kept of a channel that all ranks have left."""
    for number in numbers.values():
        _issued.pop(number, None)
    if recording is not None:
        watchdog.forget(recording)


def issued(number: int) -> Issued | None:
    """The collective that is `number` of the engine; None for a request to servers."""
    return _issued.get(number)


class Pending(NamedTuple):
    """A collective that has been started. `finish` must be in the same jit as `start`."""

    xs: Sequence[Array]
    results: list[Array]
    handle: Array | None  # None: there was nothing to do, or it is done
    number: int


class Channel:
    """A communicator for collectives under jit.

    comm: an mpi4py communicator, which is duplicated. sizes: the plan's axes (see `Groups`). watchdog_s: the
    seconds without progress after which a wait ends with an error that says who holds it, or five times
    what usually passes between two runs of the collective, whichever is longer; None waits for ever. busy_s:
    the seconds that ranks have which are alive and late; they are printed before. plan,
    job: their names, for the record; rank 0's job counts, or one that is made where it is empty. meet: see
    `Groups`. Every rank makes it alike. Raises CP0831 for sizes that do not fit, CP0849 where a rank does not
    come. Where a rank cannot have the engine (CP0830) there is a
    warning with the reason, and every collective takes the form `rounds`.
    """

    def __init__(
        self,
        comm: Any,
        sizes: Mapping[str, int] | None = None,
        *,
        watchdog_s: float | None = None,
        busy_s: float = BUSY_S,
        plan: str = "",
        job: str = "",
        meet: Rendezvous | None = None,
    ) -> None:
        self.groups = Groups(comm, sizes, meet)
        self._library, watched = self._engine(watchdog_s, busy_s, plan, job)
        self._channel: int | None = None
        self._numbers: dict[Any, int] = {}
        self.resources: Resources | None = None
        if self._library is not None:
            channel: int = self._library.commplan_channel_open(self.groups.own.py2f(), 1)
            ranks, recording = self.groups.own.Get_size(), None
            if watched is not None and self.groups.concurrent and ranks > 1:
                recording = self.groups.meet(
                    watchdog.start, self._library, channel, watched, self.groups.rank, self.groups.sizes
                )
            forget = functools.partial(_forget, self._numbers, recording)
            self._channel = channel
            self.resources = Resources(self._library, channel, self.groups, forget)
            weakref.finalize(self, self.resources.drop).atexit = False
        free_dropped()
        self._ends: dict[int, tuple[Any, Any]] = {}  # of lists: `Instructions.last` and `late`
        at_exit(self._library)

    def is_busy(self) -> bool:
        """Whether the engine carries out an operation."""
        return self._channel is not None and bool(self._library.commplan_channel_busy(self._channel))

    @property
    def engine(self) -> Any:
        """The engine, or None where some rank has none."""
        return self._library

    def _engine(
        self, watchdog_s: float | None, busy_s: float, plan: str, job: str
    ) -> tuple[Any, watchdog.Watched | None]:
        """The engine if all ranks have it: forms do not mix; watched with the longest times of all ranks."""
        library, why = None, ""
        try:
            library = build.library()
            interruption.let_in(library)
        except CommplanError as error:
            why = str(error)
        own = (why, watchdog_s, busy_s, job or watchdog.job())
        answers: list[tuple[str, float | None, float, str]] = self.groups.meet(self.groups.own.allgather, own)
        reasons = [reason for reason, *_ in answers if reason]
        if not reasons:
            bounds = [bound for _, bound, _, _ in answers if bound is not None]
            if len(bounds) < len(answers):
                return library, None
            longest = max(busy for _, _, busy, _ in answers)
            return library, watchdog.Watched(max(bounds), longest, answers[0][3], plan)
        if self.groups.rank == 0:
            warnings.warn(f"collectives run message by message, slower: {reasons[0]}", RuntimeWarning, 3)
        return None, None

    def close(self) -> None:
        """Wait for what has been dispatched. What was compiled for this channel fails from now on, and what
        other ranks have begun on it and this one has not fails there."""
        if self._channel is not None:
            drain(own=True)
            self._library.commplan_channel_close(self._channel)
            self._channel = None

    @staticmethod
    def token() -> Array:
        """What the first operation of a chain takes."""
        return jnp.zeros((1,), jnp.int32)

    def run(self, x: Array, spec: Spec, token: Array) -> tuple[Array, Array]:
        """The collective of `x`, and the token for what follows.

        all_reduce, broadcast, reduce: the shape of `x`. reduce_scatter, scatter, all_gather, gather: the
        leading dimension is divided, or multiplied, by the number of ranks, a scalar gathered as [ranks].
        all_to_all, swap: the leading dimension is cut into a row for each rank. Away from the root `reduce`
        and `gather` give what their rounds left behind. Raises CP0831 for what cannot be: axis, shape or
        dtype.
        """
        shape = self._result(x, spec)
        if self._nothing(x, spec):
            return x.reshape(shape), token
        if spec.form == "split" and self._library is not None:
            pending, token = self.start(x, spec, token)
            return self.finish(pending, token)
        if spec.form == "rounds" or self._library is None:
            y = self._rounds(rounds.tied(x, token), spec).reshape(shape)
            return y, rounds.after(token, y)
        result = jax.ShapeDtypeStruct(shape, x.dtype)
        (y,), after = primitives.call((x,), token, (result,), self._number(x, spec))
        return y, after

    def takes_lists(self, spec: Spec, size: int) -> bool:
        """Whether a collective of a buffer of `size` elements may be begun without the buffer (`begin`)."""
        moves = size > 0 and self.groups.ways(self._axes(spec)) > 1
        threads = spec.form == "call" or self.groups.concurrent
        return self._library is not None and spec.form != "rounds" and moves and threads

    def begin(
        self, xs: Sequence[Array], spec: Spec, taken: BufferLayout, given: BufferLayout, token: Array
    ) -> tuple[Pending, Array]:
        """The collective of a buffer in which `xs`, of one dtype, lie as `taken` says; what comes is cut as
        `given` says. Of form `split` it is only begun; of form `call` it is done, and has no handle."""
        dtype = xs[0].dtype
        results = [jax.ShapeDtypeStruct(shape, dtype) for shape in given.shapes]
        whole = self._number(jax.ShapeDtypeStruct((taken.size,), dtype), spec)
        number = self._packed(whole, taken, given, np.dtype(dtype).itemsize)
        if spec.form == "split":
            return _started(xs, results, number, token)
        done, after = primitives.call(xs, token, results, number)
        return Pending(xs, done, None, number), after

    def start(self, x: Array, spec: Spec, token: Array) -> tuple[Pending, Array]:
        """Begin the collective of `x`; a thread of this process moves it on meanwhile."""
        if self._nothing(x, spec) or self._library is None:
            y, token = self.run(x, replace(spec, form="call"), token)
            return Pending((x,), [y], None, -1), token
        if not self.groups.concurrent:
            fail("CP0833", "this MPI may be called by one thread at a time, and form `split` needs two")
        shaped = jax.ShapeDtypeStruct(self._result(x, spec), x.dtype)
        return _started((x,), [shaped], self._number(x, spec), token)

    def end(self, pending: Pending, token: Array) -> tuple[Sequence[Array], Array]:
        """Wait for what was begun: its results, and the token for what follows."""
        return primitives.finish(pending.xs, pending.results, pending.handle, token, pending.number)

    def finish(self, pending: Pending, token: Array) -> tuple[Array, Array]:
        """Wait for what `start` began: its result, and the token for what follows."""
        (y,), after = self.end(pending, token)
        return y, after

    def _rounds(self, x: Array, spec: Spec) -> Array:
        if spec.op != "sum" and jnp.issubdtype(x.dtype, jnp.floating):  # XLA:CPU reads denormals as zero
            ordered = self._rounds(to_ordered(x, is_maximum=spec.op == "max"), spec)
            return from_ordered(ordered, dtype=x.dtype)
        axes = self._axes(spec)
        own = replace(spec, axes=axes)
        rank, comm = self.groups.index(axes), self.groups.blocking(axes)
        choose = choice(own, self.groups, self._whole(x.size, own), x.dtype.itemsize)
        if choose is None:
            return rounds.native(x, own, rank, comm)
        return rounds.run(choose.program, x.reshape(-1), rank, spec.op, comm)

    def _whole(self, size: int, spec: Spec) -> int:
        """Elements of the whole buffer, where each rank has `size`."""
        return size * self.groups.ways(self._axes(spec)) if spec.kind in ("all_gather", "gather") else size

    def _axes(self, spec: Spec) -> tuple[str, ...]:
        return tuple(self.groups.sizes) if spec.axes is None else spec.axes

    def _nothing(self, x: Array, spec: Spec) -> bool:
        return x.size == 0 or self.groups.ways(self._axes(spec)) == 1

    def _result(self, x: Array, spec: Spec) -> tuple[int, ...]:
        if spec.kind not in KINDS:
            fail("CP0831", f"there is no collective `{spec.kind}`", f"there are {', '.join(KINDS)}")
        ranks, shape = len(self.groups.along(self._axes(spec))), tuple(x.shape)
        if spec.kind in ("all_gather", "gather"):
            return (ranks * shape[0], *shape[1:]) if shape else (ranks,)
        if spec.kind not in ("reduce_scatter", "scatter", "all_to_all", "swap"):
            return shape
        if not shape or shape[0] % ranks:
            described = f"a leading dimension of {shape[0]}" if shape else "a scalar"
            fail("CP0831", f"{spec.kind} over {ranks} ranks cannot cut {described}", "pad it to a multiple")
        return shape if spec.kind in ("all_to_all", "swap") else (shape[0] // ranks, *shape[1:])

    def _number(self, x: Array, spec: Spec) -> int:
        """The engine's number for this collective of an array like `x`, made where there is none yet."""
        if self._channel is None:
            fail("CP0832", "this channel is closed")
        key = (replace(spec, axes=self._axes(spec), form="call"), x.size, str(x.dtype))
        if key not in self._numbers:
            number = self._make(key[0], x.size, np.dtype(x.dtype))
            self._numbers[key] = number
            primitives.owners[number] = self
            _issued[number] = Issued(*key, self.groups)
        return self._numbers[key]

    def _packed(self, number: int, taken: BufferLayout, given: BufferLayout, itemsize: int) -> int:
        """The engine's number for `number` on arrays that lie so in its buffers."""
        key = (number, taken, given)
        if key not in self._numbers:
            tables = [_layout(lay, itemsize) for lay in (taken, given)]
            last, late = (_numbers(each, np.int64) for each in self._ends.get(number, ((), ())))
            self._numbers[key] = self._library.commplan_packed(
                number, tables[0].ctypes.data, len(taken.runs), tables[1].ctypes.data, len(given.runs),
                last.ctypes.data, len(last), late.ctypes.data, len(late),
            )  # fmt: skip
            primitives.owners[self._numbers[key]] = self
            if number in _issued:
                _issued[self._numbers[key]] = _issued[number]
        return self._numbers[key]

    def _make(self, spec: Spec, size: int, dtype: np.dtype[Any]) -> int:
        if spec.kind in REDUCING and dtype.name not in _DTYPES:
            fail("CP0831", f"arrays of {dtype.name} cannot be reduced", f"what can: {', '.join(_DTYPES)}")
        whole, axes = self._whole(size, spec), spec.axes or ()
        choose = choice(spec, self.groups, whole, dtype.itemsize)
        if choose is None:
            return self._described(self._make_native(spec, size, dtype), spec, whole, dtype)
        program = instructions(choose.program, self.groups.index(axes), whole, dtype.itemsize, choose.piece)
        label = _label(spec, whole, dtype)
        number = self._make_list(program, self.groups.along(axes), spec, dtype, label)
        self._described(number, spec, whole, dtype)
        if spec.kind != "swap":
            return number
        orders = choose.program.targets, choose.program.sources
        taken, given = (_in_slots(order[self.groups.index(axes)].tolist(), size) for order in orders)
        return self._packed(number, taken, given, dtype.itemsize)

    def _described(self, number: int, spec: Spec, whole: int, dtype: np.dtype[Any]) -> int:
        """`number`, a list or MPI's own, with what the record says of it. whole: see `_label`."""
        nbytes, axes = whole * dtype.itemsize, spec.axes or ()
        algorithm = spec.algorithm.name
        details = Details(spec.kind, algorithm, nbytes, dtype.name, spec.root, spec.opens, axes)
        self._library.commplan_describe(number, details.text().encode())
        return number

    def _make_native(self, spec: Spec, size: int, dtype: np.dtype[Any]) -> int:
        group = self.groups.native(spec.axes or ())
        in_parts = spec.kind in ("reduce_scatter", "scatter", "all_to_all", "swap")
        parts = group.Get_size() if in_parts else 1
        code, count = dtype.name, size // parts
        if code not in _DTYPES:
            code, count = "uint8", count * dtype.itemsize
        kind = KINDS.index("all_to_all" if spec.kind == "swap" else spec.kind)
        dtype_code, op = _DTYPES.index(code), _OPS.index(spec.op)
        table = _numbers((kind, group.py2f(), count, spec.root, dtype_code, op), np.int64)
        return self._library.commplan_native(self._channel, table.ctypes.data, spec.where.encode())

    def _make_list(
        self, program: Instructions, ranks: tuple[int, ...], spec: Spec, dtype: np.dtype[Any], label: int
    ) -> int:
        messages = max((row.message + 1 for row in program.code), default=0)
        code, op = _DTYPES.index(dtype.name) if reduces(program) else 0, _OPS.index(spec.op)
        settings = Settings(WINDOW, label, messages > WINDOW, code, op)
        peers = [ranks[peer] for peer in program.peers]
        number = make_list(self._library, self._channel or 0, program, peers, settings, spec.where)
        self._ends[number] = program.last, program.late
        return number


def _label(spec: Spec, whole: int, dtype: np.dtype[Any]) -> int:
    """What tells the messages of this collective from those of most others: the same on all ranks, whose
    plans may lie under other paths. whole: elements of the whole buffer."""
    line = _LINE.search(spec.where)
    own = replace(spec, where=line[0] if line else "")
    return zlib.crc32(f"{own} {whole} {dtype}".encode()) % LABELS


def _started(xs: Sequence[Array], results: Sequence[Any], number: int, token: Array) -> tuple[Pending, Array]:
    pending, handle, after = primitives.start(xs, token, results, number)
    return Pending(xs, pending, handle, number), after


def _in_slots(blocks: Sequence[int], size: int) -> BufferLayout:
    """Slots that hold these equal blocks of one array of `size` elements."""
    own = size // len(blocks)
    runs = tuple(Run(slot * own, 0, block * own, own) for slot, block in enumerate(blocks))
    return BufferLayout(size, runs, ((size,),))


def _layout(lay: BufferLayout, itemsize: int) -> Any:
    """The bytes of the buffer, and its runs as the engine's rows."""
    rows = np.array(lay.runs, np.int64).reshape(-1, 4) * (itemsize, 1, itemsize, itemsize)
    return _numbers(np.concatenate(([lay.size * itemsize], rows.reshape(-1))), np.int64)


def _numbers(values: Any, dtype: Any) -> Any:
    return np.ascontiguousarray(np.asarray(values, dtype))
