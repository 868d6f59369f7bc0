"""The engine of a small MPI world, on terms: checks the tables of all ranks without running the engine.

Each rank lowers a phase separately, with a channel whose library is `Library`. It stores the tables for the
engine, and the ranks then execute each other's instruction lists in some order that respects their waits.
Messages in flight are not bounded; MPI's collectives have their standard meaning.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from commplan.lowering.mpi import instructions as lists
from commplan.lowering.mpi.tuning import KINDS

from . import terms
from .jaxpr_terms import Request, Values
from .terms import Array, lift

_DTYPES = (
    "bool",
    "uint8",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
)  # as engine.h has them
_OPS = ("sum", "max", "min")


@dataclasses.dataclass(frozen=True)
class List:
    """A list of instructions. after: those that wait for each; waits: for how many each waits."""

    code: Array
    waits: Array
    after: Sequence[Sequence[int]]
    peers: Sequence[int]
    scratch: int
    dtype: str
    op: str


@dataclasses.dataclass(frozen=True)
class Native:
    """A collective of MPI's own, over `ranks` of the world."""

    kind: str
    ranks: tuple[int, ...]
    nbytes: int
    root: int
    dtype: str
    op: str


@dataclasses.dataclass(frozen=True)
class Packed:
    """The collective `number` on arrays inside its buffers: their bytes, and rows of `Run`s."""

    number: int
    sources: Array
    targets: Array
    last: frozenset[int]
    late: Array


class Comm:
    """As much of a communicator as a channel asks of it."""

    def __init__(self, rank: int, size: int, groups: dict[int, tuple[int, ...]], handle: int = 0) -> None:
        self.tags: list[int] = []
        self.rank, self.size, self.groups, self.handle = rank, size, groups, handle

    def Dup(self) -> Comm:  # noqa: N802
        return self

    def Get_rank(self) -> int:  # noqa: N802
        return self.rank

    def Get_size(self) -> int:  # noqa: N802
        return self.size

    def Get_group(self) -> Comm:  # noqa: N802
        return self

    def Incl(self, ranks: Sequence[int]) -> tuple[int, ...]:  # noqa: N802
        return tuple(ranks)

    def Create_group(self, ranks: tuple[int, ...], tag: int) -> Comm:  # noqa: N802
        self.tags.append(tag)
        handle = len(self.groups) + 1
        self.groups[handle] = ranks
        return Comm(ranks.index(self.rank), len(ranks), self.groups, handle)

    def improbe(self, *_: object) -> None:
        """No message is there."""

    def allgather(self, value: Any) -> list[Any]:
        return [value] * self.size

    def py2f(self) -> int:
        return self.handle


def _read(address: int, count: int, dtype: Any) -> Array:
    kind = np.dtype(dtype)
    if not count:
        return np.zeros(0, kind)
    return np.frombuffer(ctypes.string_at(address, count * kind.itemsize), kind).copy()


class Library:
    """The engine's C functions, as a rank's channel calls them; numbers are places in `programs`."""

    def __init__(self, groups: Mapping[int, tuple[int, ...]]) -> None:
        self.groups, self.programs = groups, list[List | Native | Packed]()

    def _number(self, program: List | Native | Packed) -> int:
        self.programs.append(program)
        return len(self.programs) - 1

    def commplan_channel_open(self, comm: int, threads: int) -> int:
        del comm, threads
        return 1

    def commplan_channel_close(self, channel: int) -> None: ...

    def commplan_end_channels(self) -> None: ...

    def commplan_signals(self, *functions: Any) -> None: ...

    def commplan_channel_busy(self, channel: int) -> int:
        return 0

    def commplan_channel_release(self, channel: int) -> int:
        return 0

    def commplan_list(
        self, channel: int, code: int, count: int, waits: int, begins: int, after: int, peers: int,
        ways: int, settings: int, where: bytes,
    ) -> int:  # fmt: skip
        del channel, where
        starts = _read(begins, count + 1, np.int64)
        awaited = _read(after, int(starts[-1]), np.int32)
        scratch, _, _, dtype, op = _read(settings, 5, np.int64).tolist()
        return self._number(
            List(
                _read(code, count * 8, np.int64).reshape(count, 8),
                _read(waits, count, np.int32),
                [awaited[a:b].tolist() for a, b in itertools.pairwise(starts)],
                _read(peers, ways, np.int32).tolist(),
                scratch,
                _DTYPES[dtype],
                _OPS[op],
            )
        )

    def commplan_native(self, channel: int, settings: int, where: bytes) -> int:
        del channel, where
        kind, comm, count, root, dtype, op = _read(settings, 6, np.int64).tolist()
        nbytes = count * _itemsize(_DTYPES[dtype])
        return self._number(Native(KINDS[kind], self.groups[comm], nbytes, root, _DTYPES[dtype], _OPS[op]))

    def commplan_describe(self, number: int, details: bytes) -> None: ...

    def commplan_packed(
        self, number: int, inputs: int, takes: int, outputs: int, gives: int, last: int, lasts: int,
        late: int, lates: int,
    ) -> int:  # fmt: skip
        return self._number(
            Packed(
                number,
                _read(inputs, 1 + 4 * takes, np.int64),
                _read(outputs, 1 + 4 * gives, np.int64),
                frozenset(_read(last, lasts, np.int64).tolist()),
                _read(late, 2 * lates, np.int64).reshape(-1, 2),
            )
        )


def _itemsize(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


def _unset(count: int, state: str, dtype: str) -> Array:
    return terms.symbols(state, (count,), dtype)


@dataclasses.dataclass
class _Part:
    """One rank's part of a collective: its buffers, in elements of `dtype`, and its progress."""

    program: List | Native
    dtype: str
    buffers: tuple[Array, Array, Array]
    early: Array
    last: frozenset[int]
    waits: Array

    def span(self, place: int, offset: int, nbytes: int) -> Array:
        size = _itemsize(self.dtype)
        if offset % size or nbytes % size or offset + nbytes > len(self.buffers[place]) * size or offset < 0:
            raise AssertionError(f"bytes {offset} to {offset + nbytes} of a buffer of {self.dtype}")
        return self.buffers[place][offset // size : (offset + nbytes) // size]


class World:
    """The ranks of a world, each with its library, in their collectives one after another."""

    def __init__(self, libraries: Sequence[Library], seed: int = 0) -> None:
        self.libraries, self.chance = libraries, random.Random(seed)
        self.begun: dict[tuple[int, int], Values] = {}
        self.count = 0

    def together(self, requests: list[Request]) -> list[Values]:
        """The result of each rank from an entry point of the engine that all of them call."""
        names = {eqn.primitive.name for eqn, _ in requests}
        if len(names) != 1:
            raise AssertionError(f"ranks come to {sorted(names)} at one time")
        (name,) = names
        if name == "commplan_finish":
            return [self._finished(rank, eqn, xs) for rank, (eqn, xs) in enumerate(requests)]
        results = self._carried_out(requests)
        if name == "commplan_call":
            return [[*values, xs[-1]] for values, (_, xs) in zip(results, requests, strict=True)]
        self.count += 1
        answers: list[Values] = []
        for rank, (values, (_, xs)) in enumerate(zip(results, requests, strict=True)):
            self.begun[rank, self.count] = values
            early = [terms.each(lambda x: terms.atom("unfinished", [x], x.dtype), y) for y in values]
            answers.append([*early, np.array([self.count, rank], np.int32), xs[-1]])
        return answers

    def _finished(self, rank: int, eqn: Any, xs: Values) -> Values:
        del eqn
        count, mine = xs[-2].tolist()
        if mine != rank:
            raise AssertionError("a handle of another rank")
        return [*self.begun.pop((rank, count)), xs[-1]]

    def _carried_out(self, requests: list[Request]) -> list[Values]:
        parts: list[_Part] = []
        for rank, (eqn, xs) in enumerate(requests):
            parts.append(self._part(rank, eqn, xs))
        natives = [part for part in parts if isinstance(part.program, Native)]
        if natives:
            if len(natives) != len(parts):
                raise AssertionError("some ranks take MPI's own collective and others a list")
            _native(parts)
        else:
            self._lists(parts)
        return [
            self._results(rank, part, eqn)
            for rank, (part, (eqn, _)) in enumerate(zip(parts, requests, strict=True))
        ]

    def _part(self, rank: int, eqn: Any, xs: Values) -> _Part:
        programs = self.libraries[rank].programs
        program, dtype = programs[eqn.params["program"]], eqn.invars[0].aval.dtype.name
        arrays = [lift(x).reshape(-1) for x in xs[:-1]]
        size, last = _itemsize(dtype), frozenset[int]()
        results = eqn.params["results"]
        if isinstance(program, Packed):
            last, zero = program.last, terms.constant(0, dtype)
            operand = np.full(int(program.sources[0]) // size, zero, object)
            for offset, array, start, nbytes in program.sources[1:].reshape(-1, 4).tolist():
                part = arrays[array][start // size : (start + nbytes) // size]
                operand[offset // size : (offset + nbytes) // size] = part
            out, program = int(program.targets[0]) // size, programs[program.number]
        else:
            (operand,), out = arrays, int(np.prod(results[0][0], dtype=int))
        if isinstance(program, Packed):
            raise AssertionError("a packed collective of a packed one")
        scratch = program.scratch // size if isinstance(program, List) else 0
        self.count += 1
        unset = functools.partial(_unset, dtype=dtype)
        buffers = (operand, unset(out, f"unset{self.count}"), unset(scratch, f"scratch{self.count}"))
        waits = program.waits.copy() if isinstance(program, List) else np.zeros(0)
        return _Part(program, dtype, buffers, unset(out, f"early{self.count}"), last, waits)

    def _results(self, rank: int, part: _Part, eqn: Any) -> Values:
        program = self.libraries[rank].programs[eqn.params["program"]]
        results = eqn.params["results"]
        if not isinstance(program, Packed):
            return [part.buffers[lists.OUTPUT].reshape(results[0][0])]
        size = _itemsize(part.dtype)
        for offset, nbytes in program.late.tolist():
            part.early[offset // size : (offset + nbytes) // size] = part.span(lists.OUTPUT, offset, nbytes)
        whole = part.buffers[lists.OUTPUT] if isinstance(part.program, Native) else part.early
        count = len(eqn.outvars) - 1 - (eqn.primitive.name == "commplan_start")
        shapes = [shape for shape, _ in results[:count]]
        arrays = [_unset(int(np.prod(shape, dtype=int)), "ungiven", part.dtype) for shape in shapes]
        for offset, array, start, nbytes in program.targets[1:].reshape(-1, 4).tolist():
            arrays[array][start // size : (start + nbytes) // size] = whole[
                offset // size : (offset + nbytes) // size
            ]
        return [array.reshape(shape) for array, shape in zip(arrays, shapes, strict=True)]

    def _lists(self, parts: list[_Part]) -> None:
        arrived: dict[tuple[int, int, int], Array] = {}
        ready = [
            (rank, i) for rank, part in enumerate(parts) for i in np.flatnonzero(part.waits == 0).tolist()
        ]
        blocked: dict[tuple[int, int, int], tuple[int, int]] = {}
        remaining = sum(len(part.waits) for part in parts)
        while ready:
            at = self.chance.randrange(len(ready))
            ready[at], ready[-1] = ready[-1], ready[at]
            rank, i = ready.pop()
            part = parts[rank]
            assert isinstance(part.program, List)
            opcode, peer, message, src, src_offset, dst, dst_offset, nbytes = part.program.code[i].tolist()
            if opcode in (lists.RECEIVE, lists.RECEIVE_REDUCE):
                key = (part.program.peers[peer], rank, message)
                if key not in arrived:
                    blocked[key] = (rank, i)
                    continue
                came = arrived.pop(key)
                if len(came) * _itemsize(part.dtype) != nbytes:
                    raise AssertionError(f"message {key} has {len(came)} elements, not {nbytes} bytes")
                if opcode == lists.RECEIVE_REDUCE:
                    came = _combined(part.program, [part.span(src, src_offset, nbytes), came], part.dtype)
                part.span(dst, dst_offset, nbytes)[:] = came
            elif opcode == lists.SEND:
                key = (rank, part.program.peers[peer], message)
                if key in arrived:
                    raise AssertionError(f"two messages {key}")
                arrived[key] = part.span(src, src_offset, nbytes).copy()
                if key in blocked:
                    ready.append(blocked.pop(key))
            elif opcode == lists.COPY:
                part.span(dst, dst_offset, nbytes)[:] = part.span(src, src_offset, nbytes).copy()
            else:
                part.span(dst, dst_offset, nbytes)[:] = terms.constant(0, part.dtype)
            remaining -= 1
            if i in part.last:
                size = _itemsize(part.dtype)
                part.early[dst_offset // size : (dst_offset + nbytes) // size] = part.span(
                    dst, dst_offset, nbytes
                )
            for later in part.program.after[i]:
                part.waits[later] -= 1
                if part.waits[later] == 0:
                    ready.append((rank, later))
        if remaining or arrived:
            raise AssertionError(
                f"{remaining} instructions wait for ever, {len(arrived)} messages are never received"
            )


def _combined(how: List | Native, arrays: Sequence[Array], dtype: str) -> Array:
    """Arrays of `dtype` combined by the engine, which takes their bytes for those of `how.dtype`."""
    if how.dtype != dtype:
        return terms.each(lambda x: terms.atom(f"{dtype} taken for {how.dtype}", [x], dtype), arrays[0])
    word = "max" if dtype == "bool" and how.op == "sum" else how.op
    return terms.fold(word, arrays)


def _native(parts: list[_Part]) -> None:
    """MPI's own collectives, in groups."""
    for rank, part in enumerate(parts):
        how = part.program
        assert isinstance(how, Native)
        if how.ranks[0] != rank:
            continue
        group = [parts[i] for i in how.ranks]
        if any(each.program != how for each in group):
            raise AssertionError(f"ranks {how.ranks} call MPI each in another way")
        ways, count = len(group), how.nbytes // _itemsize(part.dtype)
        xs = [each.buffers[lists.INPUT] for each in group]
        length = count * ways if how.kind in ("reduce_scatter", "all_to_all", "scatter") else count
        if any(len(x) != length for x in xs):
            raise AssertionError(f"{how.kind} of {length} elements, and there are {[len(x) for x in xs]}")
        rows = [[x[i * count : (i + 1) * count] for i in range(ways)] for x in xs]
        match how.kind:
            case "all_reduce":
                results = [_combined(how, xs, part.dtype)] * ways
            case "reduce_scatter":
                results = [_combined(how, [row[i] for row in rows], part.dtype) for i in range(ways)]
            case "all_gather":
                results = [np.concatenate(xs)] * ways
            case "all_to_all":
                results = [np.concatenate([row[i] for row in rows]) for i in range(ways)]
            case "broadcast":
                results = [xs[how.root]] * ways
            case "reduce":
                results = [each.buffers[lists.OUTPUT] for each in group]
                results[how.root] = _combined(how, xs, part.dtype)
            case _:
                raise NotImplementedError(how.kind)
        for each, result in zip(group, results, strict=True):
            each.buffers[lists.OUTPUT][:] = result
