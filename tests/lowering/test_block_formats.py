"""Block formats: NumPy and JAX make the bits of the oracle, of hard numbers too, and whole phases agree."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support.agreement import Ways, inputs_of, values_of
from support.campaign import parameters
from support.oracle.codec import from_bytes, to_bytes
from support.oracle.layout import collect, spread
from support.random_case import Case

import commplan
from commplan.diagnostics import Span
from commplan.ir import schedule as ir
from commplan.ir.codec import Codec
from commplan.ir.types import DType
from commplan.lowering import numpy as numpy_backend
from commplan.lowering.jax.ops import converted
from commplan.lowering.numpy import ops
from commplan.pytree import flatten

Array = np.ndarray[Any, Any]
SPAN = Span(1, 1, 1, 2)
FORMATS = ("int8", "int4", "f8e4m3")
TYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
CODECS = [Codec(name, block) for name in FORMATS for block in (8, 32)]


def hard_numbers(seed: int, size: int) -> Array:
    """Numbers of many magnitudes, halves between two numbers of a format, zeros, denormals and others."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(size).astype(np.float32) * np.float32(10.0 ** rng.integers(-12, 12))
    kinds = int(rng.integers(0, 12))
    special = {0: np.nan, 1: np.inf, 2: -np.inf, 3: 1e-40, 4: 3.4e38, 5: 0.0, 6: -0.0}
    if kinds in special:
        x[rng.integers(0, size, max(1, size // 9))] = special[kinds]
    if kinds == 7:  # ties: the scale is 1 if the largest is that of the format
        x = rng.integers(-14, 15, size).astype(np.float32) / 2
        x[0] = rng.choice([7.0, 127.0, 448.0])
    if kinds == 8:
        x = (rng.standard_normal(size) * 1e-38).astype(np.float32)
    return x


def ops_of(codec: Codec, rows: int, width: int, dtype: str) -> tuple[ir.Encode, ir.Decode]:
    encode = ir.Encode("c.0", "x.0", codec, SPAN, rows)
    return encode, ir.Decode("y.0", "c.0", codec, width, DType(dtype), SPAN, rows)


def same_bits(first: Any, second: Any) -> bool:
    """Whether both are equal bit by bit; any two NaN are."""
    ours, theirs = np.asarray(first), np.asarray(second)
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    view = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[ours.itemsize]
    equal = ours.view(view) == theirs.view(view)
    if ours.dtype != np.uint8:
        with np.errstate(invalid="ignore"):
            equal |= np.isnan(ours) & np.isnan(theirs)
    return bool(equal.all())


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("seed", parameters(range(8), range(8, 400)))
def test_backends_make_the_bits_of_the_oracle(codec: Codec, seed: int) -> None:
    rng = np.random.default_rng(1000 + seed)
    rows, width, dtype = int(rng.integers(1, 4)), int(rng.integers(1, 70)), str(rng.choice(list(TYPES)))
    with np.errstate(all="ignore"):
        x = hard_numbers(seed, rows * width).astype(TYPES[dtype])
    encode, decode = ops_of(codec, rows, width, dtype)
    with np.errstate(all="ignore"):
        code = np.concatenate([to_bytes(row, codec) for row in x.reshape(rows, -1)])
        y = np.concatenate([from_bytes(row, codec, width, DType(dtype)) for row in code.reshape(rows, -1)])
    assert len(code) == rows * codec.nbytes(width)
    by_jax = jax.jit(lambda x: converted(encode, x, ""))(jnp.asarray(x))
    assert same_bits(ops.encode(x, encode), code)
    assert same_bits(by_jax, code)
    assert same_bits(ops.decode(code, decode), y)
    assert same_bits(jax.jit(lambda x: converted(decode, x, ""))(by_jax), y)


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("dtype", TYPES)
def test_the_error_is_half_a_step_and_finite_values_stay_finite(codec: Codec, dtype: str) -> None:
    steps = {"int8": 1 / 127, "int4": 1 / 7, "f8e4m3": 32 / 448}[codec.name]
    for seed in range(20):
        x = np.random.default_rng(seed).standard_normal(64)
        x = (x * float(ml_dtypes.finfo(TYPES[dtype]).max) / 8).clip(-6e4 * 8, None) if seed % 2 else x
        with np.errstate(all="ignore"):
            x = np.clip(
                x, -float(ml_dtypes.finfo(TYPES[dtype]).max), float(ml_dtypes.finfo(TYPES[dtype]).max)
            )
            x = x.astype(TYPES[dtype])
        encode, decode = ops_of(codec, 1, 64, dtype)
        y = ops.decode(ops.encode(x, encode), decode)
        assert np.isfinite(y.astype(np.float64)).all()
        largest = np.abs(x.astype(np.float64).reshape(-1, codec.block)).max(1, keepdims=True)
        margin = largest * (steps * (1 + 2**-7) / 2 + 2 * float(ml_dtypes.finfo(TYPES[dtype]).eps))
        error = np.abs((x.astype(np.float64) - y.astype(np.float64)).reshape(-1, codec.block))
        assert (error <= margin).all()


def test_integers_up_to_the_largest_are_exact() -> None:
    x = np.arange(-127, 129, dtype=np.float32)
    x[-1] = 127
    encode, decode = ops_of(Codec("int8", 256), 1, 256, "f32")
    assert np.array_equal(ops.decode(ops.encode(x, encode), decode), x)


def test_a_derivative_is_refused() -> None:
    encode, decode = ops_of(Codec("int8", 8), 1, 8, "f32")

    def total(x: Any) -> Any:
        return converted(decode, converted(encode, x, ""), "").sum()

    with pytest.raises(NotImplementedError, match="int8"):
        jax.grad(total)(jnp.ones(8))


PLAN = """plan blocks
axis a = {a}
axis b = {b}
input g : tree partial a, b
input p : tree per a, b
input n : f32 per a, b
each step {{
    s = reduce g over a, b by sum {{ wire = {wire}, bucket = 256 }}
    m = reduce g over a by mean {{ wire = {wire}{accumulate} }}
    m = reduce m over b by mean
    w = reduce g over a, b by mean(weight = n) {{ wire = {wire} }}
    r = broadcast p over a, b from {root} {{ wire = {wire} }}
    h = reduce g over a by sum
    h = scatter h over b by mean {{ wire = {wire} }}
    h = gather h over b {{ wire = {wire} }}
    output s, m, w, r, h
}}
"""


def make_case(wire: str, sizes: tuple[int, int], dtype: str, accumulate: str = "") -> Case:
    draw = np.random.default_rng(0)

    def leaves(*, integers: bool) -> dict[str, Array]:
        tree = {
            "w": draw.standard_normal((*sizes, 9, 7)).astype(TYPES[dtype]),
            "b": draw.standard_normal((*sizes, 5)).astype(np.float32),
            "s": draw.standard_normal(sizes).astype(np.float32),
        }
        return tree | ({"i": draw.integers(0, 9, (*sizes, 3)).astype(np.int32)} if integers else {})

    inputs: dict[str, Any] = {"g": leaves(integers=False), "p": leaves(integers=True)}
    shapes: dict[str, Any] = {
        name: {leaf: x[0, 0] for leaf, x in tree.items()} for name, tree in inputs.items()
    }
    inputs["n"] = draw.integers(1, 9, sizes).astype(np.float32)
    varying = dict.fromkeys(inputs, ("a", "b"))
    text = PLAN.format(a=sizes[0], b=sizes[1], wire=wire, accumulate=accumulate, root=sizes[0] * sizes[1] - 1)
    split = dict.fromkeys(inputs, ())
    return Case(0, text, {"a": sizes[0], "b": sizes[1]}, shapes, inputs, varying, split, {}, {}, None)


@pytest.mark.parametrize(
    ("wire", "sizes", "dtype", "accumulate"),
    [
        ("int8(block = 32)", (2, 2), "f32", ""),
        ("int4(block = 8)", (2, 1), "bf16", ""),
        ("f8e4m3(block = 16)", (1, 2), "f16", ", accumulate = f16"),
        ("int8(block = 8)", (1, 1), "bf16", ""),
    ],
)
def test_phases_agree_bit_by_bit(wire: str, sizes: tuple[int, int], dtype: str, accumulate: str) -> None:
    """With sums of two terms, or of four in the order of the ranks."""
    from support.under_jax import UnderJax  # noqa: PLC0415  on devices

    ways = Ways(make_case(wire, sizes, dtype, accumulate))
    expected, _ = ways.oracle()["step"]
    inputs = inputs_of(ways.schedule, "step", ways.inputs)
    runner = UnderJax(ways.program, ways.case.sizes, {})
    outputs, _ = runner.phase("step", runner.init(), inputs)
    by_numpy, grid, values = on_numpy(ways, inputs), ways_grid(ways), values_of(ways.schedule, "step")
    bound = {b.name: values[b.value] for b in ways.schedule.phase("step").outputs}
    for name, tree in expected.items():
        leaves = [tuple(np.asarray(x) for _, x in flatten(each)[0]) for each in by_numpy[name]]
        collected = collect(grid, bound[name], dict(zip(grid.ranks, leaves, strict=True)))
        for number, (path, target) in enumerate(flatten(tree)[0]):
            assert same_bits(dict(flatten(outputs[name])[0])[path], target), f"JAX: {name} {path}"
            assert same_bits(collected[number], target), f"NumPy: {name} {path}"


def ways_grid(ways: Ways) -> Any:
    from support.oracle.layout import Grid  # noqa: PLC0415

    return Grid(ways.schedule)


def on_numpy(ways: Ways, inputs: Any) -> dict[str, list[Any]]:
    grid, run = ways_grid(ways), numpy_backend.NumpyRun(ways.schedule)
    arguments: dict[str, Any] = {}
    for name, tree in inputs.items():
        pairs, rebuild = flatten(tree)
        shards = spread(grid, ways.entry[name], [np.asarray(leaf) for _, leaf in pairs])
        arguments[name] = [rebuild(shards[rank]) for rank in grid.ranks]
    return run.phase("step", arguments)[0]


def test_one_rank_encodes_nothing() -> None:
    case = make_case("int8(block = 8)", (1, 1), "f32")
    schedule = commplan.loads(case.text).compile(shapes=case.shapes).schedule
    assert not [op for op in schedule.phase("step").ops if isinstance(op, ir.Encode)]
