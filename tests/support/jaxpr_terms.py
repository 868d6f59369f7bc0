"""Interpret a jaxpr on terms: for every rank of a mesh, element by element, without running it.

The devices of a `shard_map` step through its jaxpr together; a collective combines the operands of all. The
meaning of JAX's primitives is defined here again, in NumPy on arrays of terms (see `terms`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import numpy as np

from commplan.lowering.jax._compat import scan_operands

from . import terms
from .terms import Array, Term, is_known, lift

Values = list[Array]
Request = tuple[Any, Values]  # an equation that all ranks execute together, and this one's operands
Walk = Generator[Request, Values, Values]
OPAQUE = "opaque:"  # names of jitted functions that stand for those of users


def opaque(name: str, results: int = 1, *, linear: bool = False) -> Callable[..., Any]:
    """A user function with no known property except elementwise, or linear. On arrays of terms it returns
    unknowns, and under JAX equations that this interpreter recognizes."""
    from commplan.pytree import flatten  # noqa: PLC0415 - JAX and the plan stay apart

    def function(*trees: Any) -> Any:
        flat = [flatten(tree) for tree in trees]
        columns = list(zip(*([leaf for _, leaf in pairs] for pairs, _ in flat), strict=True))
        leaves = [
            flat[0][1]([_opaque_leaf(f"{name}.{number}", linear, column) for column in columns])
            for number in range(results)
        ]
        return leaves[0] if results == 1 else tuple(leaves)

    return function


def _opaque_leaf(name: str, linear: bool, column: Sequence[Any]) -> Any:
    if all(isinstance(x, np.ndarray | np.generic | Term) for x in column):
        return unknown(name, [lift(np.asarray(x)) for x in column], linear=linear)

    import jax  # noqa: PLC0415
    import jax.numpy as jnp  # noqa: PLC0415

    def body(first: Any, *operands: Any) -> Any:
        for x in (first, *operands):
            first = jnp.where(x == x, first, first)
        return first

    body.__name__ = f"{OPAQUE}{'linear' if linear else ''}:{name}"
    return jax.jit(body)(*column)


def unknown(name: str, column: Sequence[Array], *, linear: bool = False) -> Array:
    """The results of function `name` for arrays of terms, element by element."""
    if linear:
        return terms.each(functools.partial(terms.times_unknown, name), *column)
    return terms.each(lambda *xs: terms.atom(name, xs, xs[0].dtype), *column)


class Walker:
    """One rank stepping through a jaxpr. `place`: its position along each axis of `sizes`."""

    def __init__(self, sizes: Mapping[str, int], place: Mapping[str, int]) -> None:
        self.sizes, self.place = sizes, place

    def walk(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> Walk:
        """The results of `jaxpr`; yields requests that involve all ranks."""
        env: dict[Any, Array] = {}

        def read(atom: Any) -> Array:
            return np.asarray(atom.val) if hasattr(atom, "val") else env[atom]

        env |= zip(jaxpr.constvars, map(np.asarray, consts), strict=True)
        env |= zip(jaxpr.invars, map(np.asarray, args), strict=True)
        for eqn in jaxpr.eqns:
            results = yield from self._equation(eqn, [read(x) for x in eqn.invars])
            for var, value in zip(eqn.outvars, results, strict=True):
                if value.shape != var.aval.shape:
                    raise AssertionError(f"{eqn.primitive.name} gives {value.shape}, not {var.aval.shape}")
                env[var] = value
        return [read(x) for x in jaxpr.outvars]

    def _equation(self, eqn: Any, xs: Values) -> Walk:
        name, how = eqn.primitive.name, eqn.params
        if name in _TOGETHER or (name.startswith("commplan_") and name not in _SAME):
            return (yield eqn, xs)
        if name == "shard_map":
            return on_mesh(how, xs)
        if name == "axis_index":
            axes = how["axis_name"]
            axes = (axes,) if isinstance(axes, str) else axes
            return [np.asarray(position(self.sizes, self.place, axes), np.int32)]
        if name in ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call"):
            if str(how.get("name", "")).startswith(OPAQUE):
                _, kind, function = how["name"].split(":")
                return [unknown(function, [lift(x) for x in xs], linear=kind == "linear")]
            if how.get("name") in ("to_ordered", "from_ordered"):
                return xs  # floats as integers in the same order, and the way back
            inner = how.get("jaxpr", how.get("call_jaxpr"))
            return (yield from self.walk(inner.jaxpr, inner.consts, xs))
        if name == "scan":
            return (yield from self._scan(how, xs))
        if all(map(is_known, xs)) and name not in _SHAPES and name not in _SAME:
            results = eqn.primitive.bind(*xs, **how)
            return [np.asarray(x) for x in (results if eqn.primitive.multiple_results else [results])]
        rule = _SHAPES.get(name) or _SAME.get(name) or _ARITHMETIC.get(name)
        if rule is None:
            raise NotImplementedError(f"{name} of {[x.aval.dtype for x in eqn.invars]}")
        results = rule(how, *xs)
        return results if isinstance(results, list) else [results]

    def _scan(self, how: Mapping[str, Any], xs: Values) -> Walk:
        fixed, carried = scan_operands(how)
        consts, carry, each = xs[:fixed], xs[fixed:][:carried], xs[fixed + carried :]
        inner, rows = how["jaxpr"], list[Values]()
        for number in range(how["length"]):
            results = yield from self.walk(
                inner.jaxpr, inner.consts, [*consts, *carry, *(x[number] for x in each)]
            )
            carry, row = results[: len(carry)], results[len(carry) :]
            rows.append(row)
        return [*carry, *(np.stack(column) for column in zip(*rows, strict=True))]


def position(sizes: Mapping[str, int], place: Mapping[str, int], axes: Sequence[str]) -> int:
    """The position of a rank among those along `axes`, first named major."""
    at = 0
    for axis in axes:
        at = at * sizes[axis] + place[axis]
    return at


def interpret(closed: Any, args: Sequence[Any]) -> Values:
    """The results of a closed jaxpr that itself is no part of a mesh."""
    walk = Walker({}, {}).walk(closed.jaxpr, closed.consts, args)
    try:
        eqn, _ = next(walk)
    except StopIteration as end:
        return end.value
    raise AssertionError(f"{eqn.primitive.name} outside of a shard_map")


def in_step(walks: Sequence[Walk], exchange: Callable[[list[Request]], list[Values]]) -> list[Values]:
    """Run all ranks from one request to the next; `together` computes the result of each."""
    ends: list[Values | None] = [None] * len(walks)
    answers: list[Values | None] = [None] * len(walks)
    while True:
        requests: list[Request] = []
        for i, walk in enumerate(walks):
            try:
                requests.append(walk.send(answers[i]) if answers[i] is not None else next(walk))
            except StopIteration as end:
                ends[i] = end.value
        if not requests:
            return [end for end in ends if end is not None]
        if len(requests) != len(walks) or any(end is not None for end in ends):
            raise AssertionError(f"{len(requests)} of {len(walks)} ranks come to {requests[0][0]}")
        answers = list(exchange(requests))


def on_mesh(how: Mapping[str, Any], xs: Values) -> Values:
    """A shard_map: every device walks through its jaxpr with its pieces."""
    sizes = dict(how["mesh"].shape)
    places = [
        dict(zip(sizes, at, strict=True)) for at in itertools.product(*(range(n) for n in sizes.values()))
    ]
    walks = [
        Walker(sizes, place).walk(
            how["jaxpr"],
            (),
            [x[_piece(x.shape, spec, sizes, place)] for x, spec in zip(xs, how["in_specs"], strict=True)],
        )
        for place in places
    ]
    ends = in_step(walks, functools.partial(_collective, sizes, places))
    results: Values = []
    for number, spec in enumerate(how["out_specs"]):
        results.append(_joined([end[number] for end in ends], spec, sizes, places))
    return results


def _ways(axes: Any) -> tuple[str, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def _piece(
    shape: tuple[int, ...], spec: Any, sizes: Mapping[str, int], place: Mapping[str, int]
) -> tuple[slice, ...]:
    cuts: list[slice] = []
    for n, axes in zip(shape, spec, strict=False):
        names = _ways(axes)
        rows = n // int(np.prod([sizes[axis] for axis in names], dtype=int))
        at = position(sizes, place, names)
        cuts.append(slice(at * rows, (at + 1) * rows))
    return tuple(cuts)


def _joined(
    pieces: Values, spec: Any, sizes: Mapping[str, int], places: Sequence[Mapping[str, int]]
) -> Array:
    """The global array; raises where ranks differ along an axis that the spec does not name."""
    if not all(map(is_known, pieces)):
        pieces = [lift(piece) for piece in pieces]
    shape = tuple(
        n * int(np.prod([sizes[a] for a in _ways(axes)], dtype=int))
        for n, axes in itertools.zip_longest(pieces[0].shape, spec, fillvalue=None)
    )
    whole, first = np.zeros(shape, pieces[0].dtype), dict[Any, Any]()
    for piece, place in zip(pieces, places, strict=True):
        cut = _piece(shape, spec, sizes, place)
        whole[cut] = piece
        key = tuple((part.start, part.stop) for part in cut)
        rank, other = first.setdefault(key, (place, piece))
        for a, b in zip(other.reshape(-1), piece.reshape(-1), strict=True):
            if a is not b and (isinstance(a, Term) or a != b):
                raise AssertionError(f"ranks {rank} and {place} differ in what is the same: {a} and {b}")
    return whole


# Collectives


def _groups(
    sizes: Mapping[str, int], places: Sequence[Mapping[str, int]], axes: Sequence[str], cut: Any
) -> list[list[int]]:
    """The ranks of each group in order, as numbers of `places`."""
    numbers: dict[tuple[int, ...], list[int]] = {}
    for number, place in enumerate(places):
        numbers.setdefault(tuple(place[axis] for axis in sizes if axis not in axes), []).append(number)
    groups = [sorted(each, key=lambda i: position(sizes, places[i], axes)) for each in numbers.values()]
    return groups if cut is None else [[group[i] for i in part] for group in groups for part in cut]


_SUMS = {"psum": "sum", "psum_invariant": "sum", "pmax": "max", "pmin": "min"}
_TOGETHER = {
    *_SUMS, "all_gather", "all_gather_invariant", "reduce_scatter", "all_to_all", "ppermute"
}  # fmt: skip


def _collective(
    sizes: Mapping[str, int], places: Sequence[Mapping[str, int]], requests: list[Request]
) -> list[Values]:
    eqn = requests[0][0]
    if any(other is not eqn for other, _ in requests):
        raise AssertionError("ranks of one program are at two places")
    name, how = eqn.primitive.name, eqn.params
    axes = _ways(how.get("axes", how.get("axis_name")))
    results: list[Values] = [[] for _ in places]
    for number in range(len(requests[0][1])):
        brought = [xs[number] for _, xs in requests]
        if not all(map(is_known, brought)):
            brought = [lift(x) for x in brought]
        for group in _groups(sizes, places, axes, how.get("axis_index_groups")):
            for i, values in zip(group, _moved(name, how, [brought[i] for i in group]), strict=True):
                results[i].append(values)
    return results


def _moved(name: str, how: Mapping[str, Any], xs: Values) -> Values:
    """The result of each rank of a group."""
    ways = len(xs)
    if name in _SUMS:
        return [terms.fold(_SUMS[name], [lift(x) for x in xs])] * ways
    if name == "ppermute":
        blank = np.zeros(xs[0].shape, xs[0].dtype) if is_known(xs[0]) else None
        if blank is None:
            dtype = next((x.reshape(-1)[0].dtype for x in xs if x.size), "float32")
            blank = terms.each(lambda _: terms.constant(0, dtype), xs[0])
        came = {dst: xs[src] for src, dst in how["perm"]}
        return [came.get(i, blank) for i in range(ways)]
    if name.startswith("all_gather"):
        join = np.concatenate if how["tiled"] else np.stack
        return [join(xs, how["all_gather_dimension"])] * ways
    if not how["tiled"]:
        raise NotImplementedError(f"{name} that is not tiled")
    if name == "reduce_scatter":
        return np.split(terms.fold("sum", [lift(x) for x in xs]), ways, how["scatter_dimension"])
    rows = [np.split(x, ways, how["split_axis"]) for x in xs]
    return [np.concatenate([row[i] for row in rows], how["concat_axis"]) for i in range(ways)]


# The actions of a single rank


def _alike(*xs: Array) -> Values:
    """Arrays of terms, if any argument is one."""
    return list(xs) if all(map(is_known, xs)) else [lift(x) for x in xs]


def _broadcast(how: Any, x: Array) -> Array:
    shape = [1] * len(how["shape"])
    for dim, n in zip(how["broadcast_dimensions"], x.shape, strict=True):
        shape[dim] = n
    return np.broadcast_to(x.reshape(shape), how["shape"])


def _pad(how: Any, x: Array, value: Array) -> Array:
    x, value = _alike(x, value)
    config = how["padding_config"]
    if any(inside for _, _, inside in config):
        raise NotImplementedError("padding between elements")
    shape = [max(0, low) + n + max(0, high) for n, (low, high, _) in zip(x.shape, config, strict=True)]
    padded = np.full(shape, value[()], x.dtype)
    padded[tuple(slice(low, low + n) for n, (low, _, _) in zip(x.shape, config, strict=True))] = x
    return padded


def _starts(x: Array, sizes: Sequence[int], starts: Sequence[Array]) -> tuple[slice, ...]:
    at = [min(max(int(i), 0), n - size) for i, n, size in zip(starts, x.shape, sizes, strict=True)]
    return tuple(slice(i, i + size) for i, size in zip(at, sizes, strict=True))


def _slice(how: Any, x: Array) -> Array:
    steps = how["strides"] or [1] * x.ndim
    bounds = zip(how["start_indices"], how["limit_indices"], steps, strict=True)
    return x[tuple(slice(low, high, step) for low, high, step in bounds)]


def _updated(how: Any, x: Array, new: Array, *starts: Array) -> Array:
    del how
    x, new = _alike(x, new)
    x = x.copy()
    x[_starts(x, new.shape, starts)] = new
    return x


def _select(how: Any, which: Array, *cases: Array) -> Array:
    del how
    chosen = _alike(*cases)
    which = np.broadcast_to(which, chosen[0].shape).astype(int)
    return np.choose(which, chosen) if is_known(chosen[0]) else terms.each(lambda i, *x: x[i], which, *chosen)


def _cast(how: Any, x: Array) -> Array:
    dtype = np.dtype(how["new_dtype"])
    if is_known(x):
        return x.astype(dtype)
    return terms.each(lambda each: terms.cast(each, dtype.name), x)


def _bits(how: Any, x: Array) -> Array:
    dtype = np.dtype(how["new_dtype"])
    return x.view(dtype) if is_known(x) else terms.each(lambda each: terms.bits(each, dtype.name), x)


def _total(word: str) -> Callable[..., Array]:
    def total(how: Any, x: Array) -> Array:
        return terms.fold_along(word, x, how["axes"])

    return total


def _elementwise(function: Callable[..., Any]) -> Callable[..., Array]:
    return lambda _, *xs: terms.each(function, *np.broadcast_arrays(*_alike(*xs)))


def _compared(how: Any, x: Array, y: Array, *, equal: bool) -> Array:
    """A term is no constant. Of a bool that was held as a byte `!= 0` is the bool."""
    del how
    if not equal and is_known(y) and not y.any() and all(element.dtype == "uint8" for element in x.flat):
        return terms.each(lambda each: terms.cast(each, "bool"), x)
    same = terms.each(lambda a, b: a is b, *np.broadcast_arrays(*_alike(x, y))).astype(bool)
    return same if equal else ~same


_SHAPES: Mapping[str, Callable[..., Any]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": lambda how, x: x.reshape(how["new_sizes"]),
    "squeeze": lambda how, x: np.squeeze(x, tuple(how["dimensions"])),
    "expand_dims": lambda how, x: np.expand_dims(x, tuple(how["dimensions"])),
    "transpose": lambda how, x: np.transpose(x, how["permutation"]),
    "concatenate": lambda how, *xs: np.concatenate(_alike(*xs), how["dimension"]),
    "rev": lambda how, x: np.flip(x, tuple(how["dimensions"])),
    "pad": _pad,
    "slice": _slice,
    "dynamic_slice": lambda how, x, *at: x[_starts(x, how["slice_sizes"], at)],
    "dynamic_update_slice": _updated,
    "select_n": _select,
    "convert_element_type": _cast,
    "bitcast_convert_type": _bits,
}  # fmt: skip
OURS_SAME = ("commplan_same", "commplan_warning")
_SAME: Mapping[str, Callable[..., Any]] = dict.fromkeys(
    ("pvary", "pcast", "stop_gradient", "copy", "copy_p", "reduce_precision", *OURS_SAME), lambda how, x: x
) | {"optimization_barrier": lambda how, *xs: list(xs)}
_ARITHMETIC: Mapping[str, Callable[..., Any]] = {
    "add": _elementwise(terms.add),
    "add_any": _elementwise(terms.add),
    "sub": _elementwise(terms.subtract),
    "mul": _elementwise(terms.multiply),
    "div": _elementwise(terms.divide),
    "max": _elementwise(functools.partial(terms.extreme, "max")),
    "min": _elementwise(functools.partial(terms.extreme, "min")),
    "reduce_sum": _total("sum"),
    "reduce_max": _total("max"),
    "reduce_min": _total("min"),
    "eq": functools.partial(_compared, equal=True),
    "ne": functools.partial(_compared, equal=False),
}
