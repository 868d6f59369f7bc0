"""The effect of a schedule, in numbers that distinguish every change from mere rounding.

The oracle runs it, with three changes. *Arithmetic is exact*: floats of every type are held in float64 and
rounded by the ops `cast` alone (and when inputs enter and functions return), so that sums in another order
agree to 1e-12 and a cast to a narrower type shows. *Functions are made up*: any declared name is a fixed,
uneven mixture of all its operands, element by element if it is `elementwise`, and linear if the plan says so.
*Nothing is left out*: records are numbers that depend on the source, the reader and the step, and exchanges
with servers take their workers in a fixed order.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from commplan.ir import schedule as ir
from commplan.ir.plan import name_of
from commplan.ir.stages.builtins import Builtin
from commplan.ir.types import DType
from commplan.pytree import nest

from .oracle import Oracle, numbers
from .oracle import ops as oracle_ops
from .oracle import programs as oracle_programs
from .oracle import run as oracle_run
from .oracle.layout import Held, Rank, global_shape

Array = np.ndarray[Any, Any]
MANTISSA = {DType.F64: 52, DType.F32: 23, DType.F16: 10, DType.BF16: 7}


# arithmetic


def rounded(array: Any, dtype: DType) -> Array:
    """`array` as the nearest numbers of `dtype`; floats are then held in float64."""
    stored = numbers.convert(array, dtype)
    return stored.astype(np.float64) if dtype.is_float else stored


def _as_held(array: Any, dtype: DType) -> Array:
    return np.asarray(array, np.float64) if dtype.is_float else numbers.convert(array, dtype)


def _storage(dtype: DType) -> np.dtype[Any]:
    return np.dtype(np.float64) if dtype.is_float else numbers.storage(dtype)


def _combine(op: Any, first: Array, second: Array, dtype: DType) -> Array:
    if not dtype.is_float:
        return numbers.combine(op, first, second, dtype)
    with np.errstate(all="ignore"):
        return {"sum": np.add, "max": np.maximum, "min": np.minimum}[op](first, second)


def _multiply(array: Array, factor: Any, dtype: DType) -> Array:
    if not dtype.is_float:
        return numbers.multiply(array, factor, dtype)
    with np.errstate(all="ignore"):
        return array * np.float64(factor)


def _divide(array: Array, divisor: Any, dtype: DType) -> Array:
    if not dtype.is_float:
        return numbers.divide(array, divisor, dtype) if divisor else np.zeros_like(array)
    with np.errstate(all="ignore"):
        return array / np.float64(divisor) if divisor else np.zeros_like(array)


def _weighted(array: Array, part: Any, whole: Any, dtype: DType) -> Array:
    """See `oracle.numbers.weighted`."""
    if not dtype.is_float:
        return array
    return array * (np.float64(part) / np.float64(whole)) if part and whole else np.zeros_like(array)


@contextlib.contextmanager
def exact() -> Generator[None]:
    """The oracle's arithmetic without its rounding, see above."""
    with contextlib.ExitStack() as stack:
        for module, names in (
            (oracle_ops, {"storage": _storage, "convert": _as_held, "combine": _combine,
                          "multiply": _multiply, "divide": _divide, "weighted": _weighted}),
            (oracle_programs, {"combine": _combine}),
            (oracle_run, {"storage": _storage, "convert": rounded}),
        ):  # fmt: skip
            for name, function in names.items():
                stack.enter_context(mock.patch.object(module, name, function))
        stack.enter_context(np.errstate(all="ignore"))
        yield


# made-up data and functions


def number(*words: Any) -> float:
    """A number in [1, 2) that depends on `words`."""
    return 1 + zlib.crc32(repr(words).encode()) / 2**32


def _made(shape: Sequence[int], dtype: DType, scale: float, *words: Any) -> Array:
    """Values that no narrower type holds, none of them zero; scalars, which may be weights, are positive."""
    rng = np.random.default_rng(zlib.crc32(repr(words).encode()))
    if dtype.is_float:
        signs = rng.choice((-1.0, 1.0), tuple(shape)) if shape else 1.0
        return rounded(scale * signs * rng.uniform(0.25, 2, tuple(shape)), dtype)
    if dtype is DType.BOOL:
        return rng.random(tuple(shape)) > 0.5
    # A scalar may be a weight or a rate: small, but for once.
    low, high = (1, 9) if not shape and scale == 1 else (1, 2 ** (8 * dtype.nbytes - (dtype is not DType.U8)))
    return rng.integers(low, high, tuple(shape)).astype(numbers.storage(dtype))


class Operand(NamedTuple):
    """An operand of a function: one rank's part of one value."""

    value: ir.Value
    leaves: Sequence[Array]


def _plain(array: Array) -> Array:
    return array if array.dtype == np.float64 else array.astype(np.float64) / 2**20


def _shaped(mixed: Array, dtype: DType, scale: float) -> Array:
    """Floats as `dtype`: whole numbers keep a few digits."""
    if dtype.is_float:
        return rounded(mixed, dtype)
    with np.errstate(all="ignore"):
        steps = np.floor(np.nan_to_num(mixed / scale) * 64).astype(np.int64)
    return steps % 2 == 0 if dtype is DType.BOOL else steps.astype(numbers.storage(dtype))


def _bent(mixed: Array, scale: float) -> Array:
    """Neither linear nor affine, and never steep."""
    return mixed + 0.3 * np.sqrt(scale * scale + mixed * mixed)


def ends_with(path: str, end: str) -> bool:
    """Whether the keys of `path` end with those of `end`; every path ends with none at all."""
    return not end or f"/{path}".endswith(f"/{end}")


def _beside(leaf: ir.Leaf, other: ir.Leaf, shape: tuple[int, ...]) -> bool:
    goes = ends_with(leaf.path, other.path) or ends_with(other.path, leaf.path)
    return goes and other.shape in (shape, ())


def _prefix(first: str, second: str) -> str:
    """The keys that the longer path has before the shorter one."""
    short, long = sorted((first, second), key=len)
    return long[: len(long) - len(short)].strip("/") if short else ""


def elementwise(
    fn: str, place: int, leaf: ir.Leaf, operands: Sequence[Operand], linear: bool, scale: float, drawn: float
) -> Array:
    """One leaf of a result of an elementwise function; a random one adds `drawn`."""
    terms: list[tuple[float, Array]] = []
    for index, (value, leaves) in enumerate(operands):
        for other, array in zip(value.leaves, leaves, strict=True):
            if _beside(leaf, other, leaf.shape):
                terms.append((number(fn, place, index, _prefix(leaf.path, other.path)), array))
    if not leaf.dtype.is_float and all(array.dtype != np.float64 for _, array in terms):
        terms.append((1.0, np.array(int(drawn * 2**16))))
        return _whole(leaf, terms, linear)
    mixed = np.full(leaf.shape, drawn * scale)
    with np.errstate(all="ignore"):
        for factor, array in terms:
            mixed = mixed + factor * _plain(array)
        mixed = mixed if linear else _bent(mixed + number(fn, place) * scale, scale)
    return _shaped(mixed, leaf.dtype, scale)


def _whole(leaf: ir.Leaf, terms: Iterable[tuple[float, Array]], linear: bool) -> Array:
    """The same for whole numbers, which wrap around."""
    mixed = np.zeros(leaf.shape, np.int64)
    with np.errstate(all="ignore"):
        for factor, array in terms:
            mixed = mixed + (int(factor * 2**16) | 1) * array.astype(np.int64)
        mixed = mixed if linear else mixed + (mixed >> 3) + 12345
    if leaf.dtype is DType.BOOL:
        return mixed % 2 == 0
    return mixed.astype(numbers.storage(leaf.dtype))


def _digest(fn: str, place: int, arrays: Iterable[Array], linear: bool, scale: float) -> float:
    """A number that every element of `arrays` has its own part in."""
    total = 0.0
    with np.errstate(all="ignore"):
        for index, array in enumerate(arrays):
            flat = _plain(array).reshape(-1)
            weights = number(fn, place, index) + (np.arange(flat.size) * 7919 % 31) / 31
            each = flat if linear else _bent(flat, scale)
            total = total + float((weights * each).sum()) / max(flat.size, 1)
    return total


def mixed(
    fn: str,
    place: int,
    leaf: ir.Leaf,
    shape: tuple[int, ...],
    arrays: Iterable[Array],
    linear: bool,
    scale: float,
) -> Array:
    """One leaf of a result of any other function: every element depends on all there is."""
    pattern = 1 + (np.arange(math.prod(shape)) * 31 % 17) / 17
    total = _digest(fn, place, arrays, linear, scale)
    with np.errstate(all="ignore"):
        values = pattern.reshape(shape) * (total if linear else total + number(fn, place, leaf.path) * scale)
    return _shaped(values, leaf.dtype, scale)


def _built_in(body: Builtin, operands: Sequence[Sequence[Array]]) -> list[tuple[Array, ...]]:
    """The leaves of each result of a built-in function; floats are exact."""
    columns = [_on_arrays(body, column) for column in zip(*operands, strict=True)]
    count = len(columns[0]) if columns else body.definition.results
    return [tuple(column[number] for column in columns) for number in range(count)]


def _on_arrays(body: Builtin, xs: Sequence[Array]) -> list[Array]:
    if body.dtype is not None:
        return [rounded(xs[0], body.dtype)]
    is_float = xs[0].dtype == np.float64
    with np.errstate(all="ignore"):
        results = body.apply(xs, float if is_float else int)
        return [np.asarray(y * np.ones_like(x), x.dtype) for y, x in zip(results, xs, strict=False)]


# the interpreter


class Exactly(Oracle):
    """Runs every op of a phase, see above; within `exact()` only."""

    def __init__(
        self,
        schedule: ir.Schedule,
        fns: Sequence[ir.FnType],
        linear: frozenset[str],
        scale: float,
        rounding: bool = True,
    ) -> None:
        super().__init__(schedule)
        self.fns = {fn.name: fn for fn in fns}  # what users bind, whatever the schedule says of it
        self.linear, self.scale, self.rounding = linear, scale, rounding
        self.step = 0

    def entering(self, value: ir.Value, *words: Any) -> Any:
        """Data for an input or state: a tree in the global layout, padding zero."""
        arrays: list[Array] = []
        for leaf, mask in zip(value.leaves, masks(self.grid.sizes, value), strict=True):
            shape = global_shape(self.grid, value, leaf)
            array = _made(shape, leaf.dtype, self.scale, value.id, leaf.path, *words)
            arrays.append(array if mask is None else np.where(mask, array, np.zeros((), array.dtype)))
        return nest(tuple(leaf.path for leaf in value.leaves), arrays)

    def phase(
        self, name: str, state: Mapping[str, Any], inputs: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        phase = self.schedule.phase(name)
        values = {value.id: value for value in (*self.schedule.entry, *phase.values)}
        env = self._enter({name_of(ref): ref for ref in phase.inputs}, inputs, values)
        for ref in phase.states:
            env[ref] = self._spread(values[ref], state[name_of(ref)])
        outputs = [binding.value for binding in (*phase.outputs, *phase.updates)]
        for place, op in oracle_run.needed(phase.ops, outputs, env):
            env |= self._run(op, values, env, (self.step, place), self.step)
        self.step += 1
        results = {b.name: self._leaving(values[b.value], env[b.value]) for b in phase.outputs}
        new = {b.name: self._collect(values[b.value], env[b.value]) for b in phase.updates}
        return results, dict(state) | new

    def leaves(self, value: ir.Value, tree: Any) -> list[Any]:
        return self._leaves(value, tree)

    def _leaving(self, value: ir.Value, buffers: Held) -> Any:
        """An output; of records without leaves (`bytes`) their numbers."""
        if value.leaves or not any(buffers.values()):
            return self._collect(value, buffers)
        return np.stack([buffers[rank][0] for rank in self.grid.ranks])

    def _run(
        self, op: Any, values: Mapping[str, ir.Value], env: Mapping[str, Held], place: tuple[int, int],
        number: int = 0,
    ) -> dict[str, Held]:  # fmt: skip
        match op:
            case ir.Cast():
                return {op.result: self._cast(op, values[op.operand], env[op.operand])}
            case ir.Read():
                return self._read(op, values)
            case ir.Put():
                return {
                    op.result: {
                        rank: env[op.operand][self._first(values[op.result], rank)]
                        for rank in self.grid.ranks
                    }
                }
            case ir.Get():
                return {op.result: env[op.operand]}
            case ir.Exchange():
                return self._exchange(op, values, env)
            case ir.Elastic() if op.mode != "sync":
                return self._elastic(op, values, env)
            case _:
                return super()._run(op, values, env, place, number)

    def _cast(self, op: ir.Cast, value: ir.Value, buffers: Held) -> Held:
        def each(leaf: ir.Leaf, dtype: DType, array: Array) -> Array:
            wider = leaf.dtype.is_float and MANTISSA.get(dtype, 0) >= MANTISSA[leaf.dtype]
            exactly = not self.rounding and dtype.is_float and leaf.dtype.is_float
            same = dtype is leaf.dtype or exactly or (wider and dtype is not DType.F16)
            return array if same else rounded(array, dtype)

        dtypes = op.types(value.leaves)
        return {rank: tuple(map(each, value.leaves, dtypes, leaves)) for rank, leaves in buffers.items()}

    def _first(self, value: ir.Value, rank: Rank) -> Rank:
        """The first rank in the group of `rank` with a separate copy of `value`."""
        varying = value.placement.varying
        return tuple(at if name in varying else 0 for name, at in zip(self.grid.names, rank, strict=True))

    def _read(self, op: ir.Read, values: Mapping[str, ir.Value]) -> dict[str, Held]:
        value = values[op.result]
        words = (op.source, op.batch, op.visit, op.seed, op.clock, op.split, op.per, op.tail, self.step)
        local = max(op.batch) // self.grid.size(op.split)
        results: dict[str, Held] = {ref: {} for ref in ir.results(op)}
        for rank in self.grid.ranks:
            coords = [rank[self.grid.names.index(axis)] for axis in op.per]
            first = self.grid.position(rank, op.split) * local
            ids = [number(words, coords, first + row) for row in range(local)]
            results[op.result][rank] = tuple(
                np.stack([_made(leaf.shape[1:], leaf.dtype, 1.5, each, leaf.path) for each in ids])
                for leaf in value.leaves
            ) or (np.array(ids),)  # fmt: skip
            if op.count is not None:
                results[op.count][rank] = (np.array(1 + int(number(words, coords, first) * 1000), np.int32),)
        return results

    def _map(
        self, op: ir.Map, values: Mapping[str, ir.Value], env: Mapping[str, Held], place: tuple[int, int]
    ) -> dict[str, Held]:
        fn = self.fns[op.fn]
        linear = op.fn in self.linear
        results: dict[str, Held] = {ref: {} for ref in op.results}
        if fn.body is not None:
            for rank in self.grid.ranks:
                operands = [env[ref][rank] for ref in op.operands]
                for ref, leaves in zip(op.results, _built_in(fn.body, operands), strict=True):
                    results[ref][rank] = leaves
            return results
        for rank in self.grid.ranks:
            operands = [Operand(values[ref], env[ref][rank]) for ref in op.operands]
            drawn = 0.0
            if op.random:
                members = [rank[self.grid.names.index(name)] for name in op.per]
                drawn = number(op.fn, op.span.line, place[0], members)
            for at, ref in enumerate(op.results):
                results[ref][rank] = tuple(
                    elementwise(op.fn, at, leaf, operands, linear, self.scale, drawn)
                    if fn.elementwise
                    else self._applied(op, at, values[ref], leaf, operands, drawn, linear)
                    for leaf in values[ref].leaves
                )
        return results

    def _applied(
        self,
        op: ir.Map,
        at: int,
        value: ir.Value,
        leaf: ir.Leaf,
        operands: Sequence[Operand],
        drawn: float,
        linear: bool,
    ) -> Array:
        batched = [
            operand.value.kind == "records" and (op.per_record or op.lane != "device") for operand in operands
        ]
        noise = np.array([drawn * self.scale])
        if not any(batched):
            arrays = [noise, *(array for operand in operands for array in operand.leaves)]
            return mixed(op.fn, at, leaf, leaf.shape, arrays, linear, self.scale)
        rows: list[Array] = []
        for row in range(leaf.shape[0]):
            arguments = [
                array[row] if split else array
                for operand, split in zip(operands, batched, strict=True)
                for array in operand.leaves
            ]
            rows.append(mixed(op.fn, at, leaf, leaf.shape[1:], [noise, *arguments], linear, self.scale))
        return np.stack(rows)

    def _exchange(
        self, op: ir.Exchange, values: Mapping[str, ir.Value], env: Mapping[str, Held]
    ) -> dict[str, Held]:
        """The states after the sum or mean of the gradients; requests are answered in the order of ranks."""
        gradient, results = values[op.gradient], dict[str, Held]({ref: {} for ref in op.results})
        late = 1 + (op.hints.staleness or 0) / 8
        for group in self.grid.groups(op.axes):
            weights = [float(env[op.weight][rank][0]) if op.weight else 1.0 for rank in group]
            share = late / (1 if op.op == "sum" else sum(weights) or 1)
            sums: list[Array] = []
            for at, leaf in enumerate(gradient.leaves):
                sent = [self._sent(op, leaf, env[op.gradient][rank][at]) for rank in group]
                sums.append(np.multiply(share, sum(w * each for w, each in zip(weights, sent, strict=True))))
            for rank in group:
                operands = [Operand(values[ref], env[ref][rank]) for ref in op.states]
                operands.append(Operand(gradient, sums))
                for at, ref in enumerate(op.results):
                    results[ref][rank] = tuple(
                        elementwise(op.fn, at, leaf, operands, False, self.scale, 0.0)
                        for leaf in values[ref].leaves
                    )
        return results

    def _sent(self, op: ir.Exchange, leaf: ir.Leaf, array: Array) -> Array:
        wire = op.hints.wire
        return _plain(array if wire is None or wire is leaf.dtype else rounded(array, wire))

    def _elastic(
        self, op: ir.Elastic, values: Mapping[str, ir.Value], env: Mapping[str, Held]
    ) -> dict[str, Held]:
        """The center moves after each worker: in rank order, or in reverse if the order is open."""
        results: dict[str, Held] = {ref: {} for ref in ir.results(op)}
        leaves = values[op.operand].leaves
        for group in self.grid.groups(op.axes):
            center = list(env[op.center][group[0]])
            for rank in group if op.mode == "round_robin" else sorted(group, reverse=True):
                eta, rho = (float(env[x][rank][0]) if isinstance(x, str) else x for x in (op.eta, op.rho))
                late = 1 + (op.mode == "hogwild") / 8 + (op.hints.staleness or 0) / 16
                pulls = [
                    late * eta * rho * (member - at)
                    for member, at in zip(env[op.operand][rank], center, strict=True)
                ]
                results[op.pull][rank] = tuple(
                    _as_held(p, leaf.dtype) for p, leaf in zip(pulls, leaves, strict=True)
                )
                center = [at + pull for at, pull in zip(center, pulls, strict=True)]
            if op.result is not None:
                arrays = tuple(
                    _as_held(array, leaf.dtype) for array, leaf in zip(center, leaves, strict=True)
                )
                results[op.result] |= dict.fromkeys(group, arrays)
        return results


def masks(sizes: Mapping[str, int], value: ir.Value) -> list[Array | None]:
    """Masks of the elements of each leaf of `value`, in the global layout, that are not padding; None without
    padding."""
    split = value.placement.split
    rows: list[Array | None] = []
    for at, leaf in enumerate(value.leaves):
        if not split or not leaf.shape or at >= len(value.whole):
            rows.append(None)
            continue
        whole = np.ones(value.whole[at].shape, bool)
        pieces = [whole.reshape(-1) if value.kind == "tree" else whole]
        for axis in split:
            ways = sizes[axis]
            pieces = [part for piece in pieces for part in _pieces(piece, ways)]
        mask = np.concatenate(pieces)
        rows.append(mask if mask.shape[1:] == leaf.shape[1:] else None)
    return rows


def _pieces(piece: Array, ways: int) -> list[Array]:
    short = -len(piece) % ways
    return np.split(np.pad(piece, [(0, short)] + [(0, 0)] * (piece.ndim - 1)), ways)
