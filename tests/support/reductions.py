"""Reductions against NumPy: cases with every kind of number, and a reference that imports nothing of ours.

A case is a plan of one or two stages and the values of each rank. It runs on the devices of a mesh or on the
ranks of a communicator, and every element is compared with what docs/reductions.md says.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np

import commplan

Array = np.ndarray[Any, Any]
FLOATS: dict[str, Any] = {
    "f32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f16": np.dtype(np.float16),
}
INTEGERS: dict[str, Any] = {"i32": np.dtype(np.int32), "u8": np.dtype(np.uint8), "bool": np.dtype(np.bool_)}
TYPES: dict[str, Any] = FLOATS | INTEGERS
WEIGHTS = ("i32", "u8", "f32", "bf16", "f16")
ROUNDOFF = {"f32": 2.0**-24, "bf16": 2.0**-8, "f16": 2.0**-11}
# The loss of a term below the normal numbers: of f32 and bf16 XLA:CPU reads denormals as zero.
UNDERFLOW = {"f32": 2.0**-126, "bf16": 2.0**-126, "f16": 2.0**-24}
LARGE = {"f32": 1e37, "bf16": 1e37, "f16": 60000.0}  # eight times the first two are finite


@dataclasses.dataclass(frozen=True)
class Case:
    """One reduction. op: as written after `by`. how: `via` and its algorithm. leaves: by path, a row for each
    rank. weight: one for each rank. form: which stages reduce."""

    name: str
    sizes: tuple[int, int]
    op: str
    leaves: Mapping[str, Array]
    how: str = ""
    options: tuple[tuple[str, str], ...] = ()
    weight: Array | None = None
    form: str = "reduce"

    def __str__(self) -> str:
        return self.name

    @property
    def axes(self) -> dict[str, int]:
        """The axes of the plan: those that it scatters over are one."""
        nodes, gpus = self.sizes
        return {"gpu": nodes * gpus} if self.form == "scatter" else {"node": nodes, "gpu": gpus}

    @property
    def text(self) -> str:
        """The plan. Shapes are bound when it is compiled."""
        braces = ", ".join(f"{key} = {value}" for key, value in self.options)
        by = f"by {self.op}{' ' + self.how if self.how else ''}{f' {{ {braces} }}' if braces else ''}"
        over = ", ".join(self.axes)
        stages = {
            "reduce": [f"y = reduce x over {over} {by}"],
            "by axis": [f"y = reduce x over gpu {by}", f"y = reduce y over node {by}"],
            "scatter": [f"y = scatter x over gpu {by}", "y = gather y over gpu"],
        }[self.form]
        placed = f"per {over}" if self.op in ("max", "min") else f"partial {over}"
        weight = [] if self.weight is None else [f"input n : {name_of(self.weight.dtype)} per {over}"]
        return "\n".join(
            [
                "plan reduction", *(f"axis {axis} = {size}" for axis, size in self.axes.items()),
                f"input x : tree {placed}", *weight,
                "each step {", *(f"    {line}" for line in stages), "    output y", "}", "",
            ]
        )  # fmt: skip

    def option(self, name: str) -> str | None:
        return dict(self.options).get(name)


def name_of(dtype: np.dtype[Any]) -> str:
    """The language's name of a NumPy type."""
    return next(name for name, numpy_type in TYPES.items() if numpy_type == dtype)


def run(case: Case, where: Any) -> dict[str, Array]:
    """The result of `case` on the mesh or communicator `where`, leaf by leaf."""
    rows: dict[str, Any] = {"x": dict(case.leaves)}
    if case.weight is not None:
        rows["n"] = case.weight
    types = tuple((path, each.shape[1:], each.dtype) for path, each in case.leaves.items())
    key = case.text, types, where if isinstance(where, jax.sharding.Mesh) else None
    if key not in _jitted:
        _jitted[key] = _step(case, where)
    return jax.tree.map(np.asarray, _jitted[key]({}, rows)[1])


_jitted: dict[tuple[Any, ...], Any] = {}  # steps by plan, types of leaves, and mesh


def _step(case: Case, where: Any) -> Any:
    """The jitted step of the case's plan."""
    shapes = {path: np.zeros(rows.shape[1:], rows.dtype) for path, rows in case.leaves.items()}
    bound = commplan.loads(case.text).compile(where, shapes={"x": shapes}).bind(where)
    on_mesh = isinstance(where, jax.sharding.Mesh)

    def step(state: Any, rows: Any) -> Any:
        rank = jax.lax.axis_index(tuple(case.axes)) if on_mesh else where.rank
        values = jax.tree.map(lambda leaf: bound.varying(leaf[rank]), rows)
        outputs, state = bound.step(state, **values)
        return state, outputs.y

    if on_mesh:
        step = bound.spmd(returns=("same",), rows="same")(step)
    return jax.jit(step)


# The reference


def check(case: Case, where: Any) -> None:
    """Raise AssertionError unless every element has the value that the manual defines."""
    for path, result in run(case, where).items():
        rows = case.leaves[path]
        assert result.dtype == rows.dtype, f"{case.name}: {path} is {result.dtype}, not {rows.dtype}"
        target, margin = expected(case, rows)
        good = same_numbers(result, target, margin)
        if not good.all():
            at = tuple(int(i) for i in np.argwhere(~good)[0])
            terms = rows[(slice(None), *at)]
            raise AssertionError(
                f"{case.name}: `{path}`{list(at)} of {int((~good).sum())} is {result[at]}, not {target[at]}"
                f" within {margin if margin is None else margin[at]}; terms {terms}, weights {case.weight}\n"
                f"{case.text}"
            )


def same_numbers(actual: Array, target: Array, margin: Array | None) -> Array:
    """Which elements agree: bit by bit without a margin, else within it; any two NaN do."""
    if actual.dtype.kind in "iub":
        return actual == target
    numbers = actual.astype(np.float64)
    both_nan = np.isnan(numbers) & np.isnan(target)
    if margin is None:
        return both_nan | ((numbers == target) & (np.signbit(numbers) == np.signbit(target)))
    with np.errstate(invalid="ignore"):
        return both_nan | (numbers == target) | (np.abs(numbers - target) <= margin)


def expected(case: Case, rows: Array) -> tuple[Array, Array | None]:
    """The reduction of `rows` in NumPy, and how far a result may be from it; None: not at all."""
    is_mean, integers = case.op.startswith("mean"), case.option("integers")
    if rows.dtype.kind in "iub":
        if is_mean:
            return (rows.max(0) if integers == "max" else rows[0]), None
        if case.op == "sum":
            return rows.sum(0, dtype=rows.dtype), None  # wraps around in its own type
        return (rows.max(0) if case.op == "max" else rows.min(0)), None
    name = name_of(rows.dtype)
    if case.op in ("max", "min"):
        return _extreme(case, rows, name), None
    return _total(case, rows, name, is_mean=is_mean)


def _extreme(case: Case, rows: Array, name: str) -> Array:
    """NaN if one is, otherwise the largest or least, with the sign of zero; in the wire type."""
    with np.errstate(over="ignore"):
        wire = FLOATS[case.option("wire") or name]
        sent = rows if wire.itemsize > rows.dtype.itemsize else rows.astype(wire)
        numbers = sent.astype(rows.dtype).astype(np.float64)
    best = numbers.max(0) if case.op == "max" else numbers.min(0)
    signs = np.signbit(numbers)
    is_negative = signs.all(0) if case.op == "max" else signs.any(0)
    return np.where(best == 0, np.where(is_negative, -0.0, 0.0), best)


def _total(case: Case, rows: Array, dtype: str, *, is_mean: bool) -> tuple[Array, Array]:
    """A sum or mean in f64; a term of weight zero is left out, whatever it is."""
    shape = (len(rows), *[1] * (rows.ndim - 1))
    share = np.ones(shape) if case.weight is None else case.weight.astype(np.float64).reshape(shape)
    counts = share != 0
    if is_mean:
        share = share / share.sum() if counts.any() else np.zeros_like(share)
    with np.errstate(invalid="ignore"):
        terms = np.where(counts, rows.astype(np.float64) * share, 0.0)
        total = terms.sum(0)
    used = [dtype, *(case.option(name) or dtype for name in ("wire", "accumulate"))]
    sized = np.abs(np.where(np.isfinite(terms), terms, 0.0)).sum(0)
    roundoff = max(ROUNDOFF[name] for name in used)
    # A term is rounded to the wire type, added, and rounded again at each level.
    margin = 4 * (len(rows) + 4) * roundoff * sized + len(rows) * max(UNDERFLOW[name] for name in used)
    return total, margin


# Cases


def numbers(random: np.random.Generator, ranks: int, dtype: str, limit: float, weight: Array | None) -> Array:
    """[ranks, n]: a column for each kind of number that a reduction may meet. limit: of the largest."""
    numpy_type = TYPES[dtype]
    if dtype == "bool":
        return random.integers(0, 2, (ranks, 16)).astype(numpy_type)
    if dtype in INTEGERS:
        info = np.iinfo(numpy_type)
        return random.integers(info.min, info.max, (ranks, 16), endpoint=True).astype(numpy_type)
    unit, zero = np.eye(1, ranks, int(random.integers(ranks)))[0] != 0, np.zeros(ranks)
    absent = zero != 0 if weight is None else weight == 0
    least = float(ml_dtypes.finfo(numpy_type).smallest_subnormal)
    columns = [
        *random.normal(size=(8, ranks)),
        *(random.choice((-1, 1), (4, ranks)) * 10.0 ** random.uniform(-3, 3, (4, ranks))),
        np.where(unit, np.nan, 1.0), zero + np.nan, np.where(unit, np.inf, 1.0), np.where(unit, -np.inf, 1.0),
        np.where(unit, np.inf, -np.inf), -zero, np.where(unit, 0.0, -0.0), np.where(unit, -0.0, 0.0),
        least * random.integers(-9, 9, ranks), zero + limit, zero - limit, np.where(unit, -limit, limit),
        np.where(absent, np.nan, 1.5), np.where(absent, np.inf, 1.5), np.where(unit, least, 0.0),
        zero + 1, zero + 1e-3,
    ]  # fmt: skip
    return np.stack(columns, 1).astype(numpy_type)


def weights(random: np.random.Generator, ranks: int, dtype: str, *, absent: int = 1) -> Array:
    """[ranks]: large ones, whose sum their own type does not hold; `absent` of them are zero."""
    low, high = {"i32": (2**29, 2**31 - 1), "u8": (100, 255), "f32": (1e6, 1e30)}.get(dtype, (1e3, 6e4))
    values = random.uniform(low, high, ranks)
    values[random.permutation(ranks)[:absent]] = 0
    return values.astype(TYPES[dtype])


def limit_of(dtype: str, op: str, ranks: int, options: Mapping[str, str]) -> float:
    """The largest number whose reduction is finite, in the narrowest range that it goes through."""
    if dtype in INTEGERS:
        return 0.0
    used = [dtype, *(options[name] for name in ("wire", "accumulate") if name in options)]
    limit = min(LARGE[name] for name in used)
    return limit / ranks if op == "sum" else limit


def systematic(sizes: tuple[int, int]) -> Iterator[Case]:
    """Each reduction of each type in each way that changes how it is carried out."""
    plain = ((), (("wire", "bf16"),), (("wire", "f16"),), (("wire", "f32"), ("accumulate", "f32")))
    mean = (*plain, (("accumulate", "f32"),), (("wire", "f16"), ("accumulate", "f32")))
    programs = ("via ring", "via native", "via recursive_doubling")
    ways = [("", options) for options in mean] + [(how, ()) for how in programs]
    for dtype, op, (how, options) in itertools.product(FLOATS, ("sum", "mean"), ways):
        yield one(sizes, op, {"x": dtype}, how, options)
    for dtype, op, how in itertools.product(TYPES, ("max", "min"), ("", *programs)):
        yield one(sizes, op, {"x": dtype}, how)
    for dtype, op, options in itertools.product(FLOATS, ("max", "min"), plain[1:3]):
        yield one(sizes, op, {"x": dtype}, "", options)
    for dtype, how in itertools.product(("i32", "u8"), ("", *programs)):
        yield one(sizes, "sum", {"x": dtype}, how)
    for dtype, weight in itertools.product(FLOATS, WEIGHTS):
        for how, options in (ways[0], ways[1], ways[3], ways[5], ways[6]):
            yield one(sizes, "mean(weight = n)", {"x": dtype}, how, options, weight)
    for dtype, absent in itertools.product(FLOATS, (0, 10**6)):  # no term is absent, and all are
        yield one(sizes, "mean(weight = n)", {"x": dtype}, weight="i32", absent=absent)
    for op, how in itertools.product(("mean", "mean(weight = n)"), ("max", "first")):
        for options in ((), (("wire", "bf16"),)):
            mixed = {"w": "f32", "h": "f16", "step": "i32", "done": "bool"}
            yield one(sizes, op, mixed, "", (("integers", how), *options), "i32" if "n)" in op else None)
    for dtype, op in itertools.product(FLOATS, ("sum", "mean", "mean(weight = n)")):
        for form in ("scatter", "by axis"):
            if form == "scatter" or "weight" not in op:
                yield one(sizes, op, {"x": dtype}, weight="i32" if "n)" in op else None, form=form)


def one(
    sizes: tuple[int, int], op: str, dtypes: Mapping[str, str], how: str = "",
    options: tuple[tuple[str, str], ...] = (), weight: str | None = None, *, seed: int = 0, absent: int = 1,
    form: str = "reduce",
) -> Case:  # fmt: skip
    """The case that is so written. dtypes: those of the leaves, by path. weight: the type of weights."""
    random, ranks = np.random.default_rng(seed), sizes[0] * sizes[1]
    weighting = None if weight is None else weights(random, ranks, weight, absent=absent)
    leaves = {
        path: numbers(random, ranks, dtype, limit_of(dtype, op, ranks, dict(options)), weighting)
        for path, dtype in dtypes.items()
    }
    words = [op, *sorted(dtypes.values()), how, *(f"{k}={v}" for k, v in options), weight or "", form]
    return Case(" ".join(filter(None, words)), sizes, op, leaves, how, options, weighting, form)


def drawn(seed: int, shapes: tuple[tuple[int, int], ...]) -> Case:
    """A random case: a tree of several types, on axes of sizes from `shapes`."""
    random = np.random.default_rng(seed)
    pick = lambda *from_: from_[int(random.integers(len(from_)))]  # noqa: E731
    sizes, op = pick(*shapes), pick("sum", "mean", "mean(weight = n)", "mean(weight = n)", "max", "min")
    dtypes = {f"w{n}": pick(*FLOATS) for n in range(int(random.integers(1, 4)))}
    options: list[tuple[str, str]] = []
    if op in ("sum", "max", "min") and random.random() < 0.4:
        dtypes |= {f"i{n}": pick("i32", "u8") for n in range(2)}
    if op.startswith("mean") and random.random() < 0.4:
        dtypes |= {"step": "i32", "done": "bool"}
        options.append(("integers", pick("max", "first")))
    how = pick("", "", "", "via ring", "via recursive_doubling", "via hierarchical(gpu, node)", "via native")
    if how != "via native" and random.random() < 0.6:
        options.append(("wire", pick("bf16", "f16", "f32")))
    if op in ("sum", "mean", "mean(weight = n)") and not how and random.random() < 0.5:
        options.append(("accumulate", "f32"))
    if random.random() < 0.3:
        options.append(("bucket", pick("1 KiB", "64 KiB")))
    form = pick("reduce", "reduce", "by axis", "scatter")
    if op in ("max", "min") or "hierarchical" in how or "integers" in dict(options) or how == "via ring":
        form = "reduce"
    if "weight" in op and form == "by axis":
        form = "scatter"
    if form == "scatter" and how != "via native":
        how = ""
    weight, absent = pick(*WEIGHTS) if "weight" in op else None, int(random.integers(0, 3))
    return one(sizes, op, dtypes, how, tuple(options), weight, seed=seed, absent=absent, form=form)


def refused(error: Exception) -> bool:
    """Whether the error is for an option of the plan without effect."""
    diagnostics = getattr(error, "diagnostics", ())
    return bool(diagnostics) and all(each.code in ("CP0610", "CP0613", "CP0614") for each in diagnostics)
