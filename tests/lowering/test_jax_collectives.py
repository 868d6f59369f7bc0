"""Collectives of schedules under JAX: bitwise equal if promised, and typed as replicated."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.embedding import bind, code_of, mesh_of

from commplan.diagnostics import CommplanError, Span
from commplan.ir import schedule as ir
from commplan.ir.plan import Algorithm, Arg
from commplan.ir.types import DType
from commplan.lowering.programs import hierarchy_of, program_of

BROADCAST = """plan p
axis a = {a}
axis b = {b}
input x : {dtype}[5] per a, b
at start {{
    y = broadcast x over {over} from {root} {via}
    output y
}}
"""


def bits(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Arbitrary bit patterns: NaNs with payloads, negative zeros, infinities."""
    rng = np.random.default_rng(3)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(np.bool_)
    kind = jnp.dtype(dtype)
    raw = rng.integers(0, 256, (*shape, kind.itemsize), np.uint8)
    array = raw.view(kind).reshape(shape)
    if jnp.issubdtype(kind, jnp.floating):
        array[..., 0] = -0.0
    return array


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "i32", "u8", "bool"])
@pytest.mark.parametrize(
    ("a", "b", "over", "root", "via"),
    [
        (2, 4, "a, b", 5, ""),
        (4, 2, "b, a", 3, ""),
        (2, 2, "a, b", 2, "via hierarchical(b, a)"),
        (3, 1, "a, b", 2, ""),
        (1, 1, "a, b", 0, ""),
    ],
)
def test_broadcast_moves_every_bit(dtype: str, a: int, b: int, over: str, root: int, via: str):
    names = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "i32": "int32", "u8": "uint8"}
    mesh = mesh_of(a=a, b=b)
    run = bind(BROADCAST.format(a=a, b=b, dtype=dtype, over=over, root=root, via=via), mesh)
    x = bits(names.get(dtype, dtype), (a, b, 5))
    out, _ = run.start({}, x=x)
    # ROOT counts the axes row-major, first named major.
    place = np.unravel_index(root, (a, b) if over == "a, b" else (b, a))
    rank = place if over == "a, b" else place[::-1]
    assert np.asarray(out.y).tobytes() == x[rank].tobytes()
    assert out.y.sharding.spec == P()


def test_integers_wrap_and_booleans_combine():
    text = """plan p
axis a = 4
input n : i32[3] per a
input u : u8[3] per a
input t : tree per a
each step {
    total = reduce n over a by sum
    bytes_ = reduce u over a by sum
    any = reduce t over a by max
    all = reduce t over a by min
    least = reduce n over a by min
    output total, bytes_, any, all, least
}
"""
    run = bind(text, mesh_of(a=4), {"t": {"flag": np.zeros(3, np.bool_)}})
    n = np.array([[2**31 - 1, 1, -5]] * 4, np.int32)
    u = np.array([[200, 1, 64]] * 4, np.uint8)
    t = np.array([[0, 1, 0], [0, 1, 1], [0, 1, 0], [0, 1, 0]], np.bool_)
    out, _ = run.step({}, n=n, u=u, t={"flag": t})
    np.testing.assert_array_equal(out.total, n.sum(0, dtype=np.int32))
    np.testing.assert_array_equal(out.bytes_, u.sum(0, dtype=np.uint8))
    np.testing.assert_array_equal(out.any["flag"], [False, True, True])
    np.testing.assert_array_equal(out.all["flag"], [False, True, False])
    np.testing.assert_array_equal(out.least, [2**31 - 1, 1, -5])
    assert out.any["flag"].dtype == jnp.bool_


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scatter_and_gather_undo_each_other(size: int, dtype: str):
    text = f"""plan p
axis data = {size}
input g : tree partial data
each step {{
    s = scatter g over data by sum
    w = gather s over data
    output w
}}
"""
    mesh = mesh_of(data=size)
    like = {"a": jnp.zeros((3, 5), dtype), "b": jnp.zeros((), dtype), "c": jnp.zeros((1,), dtype)}
    run = bind(text, mesh, {"g": like})

    @jax.jit
    @run.spmd(x="per data", returns=("w",))
    def step(state, x):
        g = jax.tree.map(lambda leaf: (leaf + x[0]).astype(leaf.dtype), like)
        out, state = run.step(state, g=g)
        return state, out.w

    _, w = step({}, np.arange(size, dtype=np.float32)[:, None])
    expected = jax.tree.map(lambda leaf: np.full(leaf.shape, size * (size - 1) / 2), like)
    assert jax.tree.structure(w) == jax.tree.structure(like)
    jax.tree.map(
        lambda got, want: np.testing.assert_array_equal(np.asarray(got, np.float32), want), w, expected
    )


def test_an_array_is_cut_along_its_rows():
    text = """plan p
axis a = 2
axis b = 2
input x : f32[6, 3]
each step {
    s = slice x over a
    s = slice s over b
    back = gather s over b
    back = gather back over a
    output s, back
}
"""
    run = bind(text, mesh_of(a=2, b=2))
    x = np.arange(18, dtype=np.float32).reshape(6, 3)
    out, _ = run.step({}, x=x)
    np.testing.assert_array_equal(out.back, x)
    # 6 rows over a: 3 each; 3 rows over b: 2 and 1, padded.
    assert out.s.shape == (8, 3)
    np.testing.assert_array_equal(np.asarray(out.s)[[0, 1, 2, 4, 5, 6]], x)
    np.testing.assert_array_equal(np.asarray(out.s)[[3, 7]], 0)


def test_results_are_typed_the_same_over_what_was_reduced():
    text = """plan p
ensemble m = 2
axis a = 2
input g : f32[4] per m partial a
each step {
    g = reduce g over a by mean
    output g
}
"""
    run = bind(text, mesh_of(m=2, a=2))
    types: dict[str, object] = {}

    def step(x):
        out, _ = run.step({}, g=x.reshape(4))
        types["type"] = str(jax.typeof(out.g))
        return out.g[None]

    x = np.arange(16, dtype=np.float32).reshape(2, 2, 4)
    mapped = jax.shard_map(step, mesh=run.mesh, in_specs=P("m", "a"), out_specs=P("m"))
    np.testing.assert_allclose(mapped(x), x.mean(1))
    assert "m" in str(types["type"])
    assert "a" not in str(types["type"]).split("{")[-1].replace("float", "")


def test_levels_that_are_not_all_of_an_axis_are_refused():
    sums = ir.Collective("all_reduce", "y.1", "x.1", ("a",), DType.F32, 16, Span(4, 5, 4, 9), "sum")
    cut = Algorithm("hierarchical", (Arg("ring", "gpu"), Arg("ring", "node")))
    op = msgspec.structs.replace(sums, algorithm=cut)
    with pytest.raises(CommplanError) as error:  # 2 * 3 places, and only 5 ranks
        program_of(op, {"a": 5}, {"a": (ir.Spread("gpu", 2), ir.Spread("node", 3))}, 16)
    assert code_of(error) == "CP0821"
    assert error.value.diagnostics[0].span == op.span
    with pytest.raises(CommplanError) as error:
        hierarchy_of(op.algorithm, op.axes, {"a": 6}, {})
    assert code_of(error) == "CP0821"


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_weighted_mean_over_nothing_is_zero(size: int):
    text = f"""plan p
axis a = {size}
input x : f32[3] per a
input n : i32 per a
each step {{
    y = reduce x over a by mean(weight = n)
    output y
}}
"""
    run = bind(text, mesh_of(a=size))
    x = np.random.default_rng(0).normal(size=(size, 3)).astype(np.float32)
    n = np.arange(size, dtype=np.int32)
    out, _ = run.step({}, x=x, n=n)
    np.testing.assert_allclose(out.y, (x * n[:, None]).sum(0) / n.sum(), rtol=1e-5)
    out, _ = run.step({}, x=x, n=np.zeros(size, np.int32))
    np.testing.assert_array_equal(out.y, np.zeros(3))


@pytest.mark.parametrize("passes", ["", "bucket", "share,bucket,decompose,wire,overlap"])
@pytest.mark.parametrize("via", ["native", "hierarchical(b, a)", "hierarchical(c, b = native, a)"])
def test_hierarchies_change_nothing_whatever_the_passes(passes: str, via: str):
    three = via.count(",") == 2
    over = "a, b, c" if three else "a, b"
    text = f"""plan p
axis a = 2
axis b = 2
axis c = 2
input g : tree per a, b, c
each step {{
    total = reduce g over {over} by sum via {via}
    first = broadcast g over {over} from 3 via {via}
    most  = reduce g over {over} by max via {via}
    output total, first, most
}}
"""
    like = {"w": np.zeros((3, 5), np.int32), "s": np.zeros((), np.float32), "h": np.zeros(7, jnp.bfloat16)}
    rng = np.random.default_rng(0)
    g = {k: rng.integers(-9, 9, (2, 2, 2, *v.shape)).astype(v.dtype) for k, v in like.items()}
    out, _ = bind(text, mesh_of(a=2, b=2, c=2), {"g": like}, passes=passes).step({}, g=g)
    axes = (0, 1, 2) if three else (0, 1)
    for key, x in g.items():
        wide = x.astype(np.float64)
        np.testing.assert_array_equal(np.asarray(out.total[key], np.float64), wide.sum(axes))
        np.testing.assert_array_equal(np.asarray(out.most[key], np.float64), wide.max(axes))
        root = wide[0, 1, 1] if three else wide[1, 1]
        np.testing.assert_array_equal(np.asarray(out.first[key], np.float64), root)
