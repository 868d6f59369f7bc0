"""Algorithms as plans name them, under JAX: levels, axes, types and derivatives."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.campaign import parameters
from support.embedding import bind, mesh_of
from support.oracle import Oracle
from support.under_jax import UnderJax

import commplan
from commplan.collectives import registry
from commplan.diagnostics import CommplanError, Span
from commplan.ir import schedule as ir
from commplan.ir.plan import Algorithm, Arg, Hints
from commplan.ir.types import DType
from commplan.lowering import programs
from commplan.lowering.jax.collectives.lax_backend import LaxBackend
from commplan.lowering.jax.listing import collectives_of

SPAN = Span(7, 5, 7, 20)


def over_levels(**levels: str) -> Algorithm:
    return Algorithm("hierarchical", tuple(Arg(how, level) for level, how in levels.items()))


def collective(kind: ir.CollectiveKind, algorithm: Algorithm, axes: tuple[str, ...], **more: Any) -> Any:
    how: dict[str, Any] = {"op": None if kind in ("all_gather", "broadcast") else "sum"} | more
    return ir.Collective(kind, "y.1", "x.1", axes, DType.F32, 0, SPAN, algorithm=algorithm, **how)


def on_ranks(sizes: dict[str, int], backend: LaxBackend, do: Callable[[Any], Any]) -> Any:
    """Apply `do` on each rank to its row of an array [ranks, ...]; returns the stacked results."""
    axes = tuple(sizes)
    mapped = jax.shard_map(
        lambda x: backend.varying(do(x[0]), axes)[None],
        mesh=mesh_of(**sizes), in_specs=P(axes), out_specs=P(axes),
    )  # fmt: skip
    return jax.jit(mapped)


def test_a_broadcast_within_groups_is_xlas_own_on_gpus():
    """Lowered only: no compiler for CPUs has the operation."""
    backend = LaxBackend("gpu", {"a": 6}, spread={"a": (ir.Spread("gpu", 3), ir.Spread("node", 2))})
    op = collective("broadcast", over_levels(gpu="native", node="native"), ("a",), root=4)
    text = on_ranks({"a": 6}, backend, lambda x: backend.move(x, op)).lower(jnp.ones((6, 8))).as_text()
    groups = re.findall(r'"stablehlo.collective_broadcast".*dense<(\[\[.*?\]\])>', text)
    assert groups == ["[[3, 0], [4, 1], [5, 2]]", "[[1, 0, 2], [4, 3, 5]]"]


def test_collectives_within_groups_and_broadcasts_are_listed():
    """The steps of several processes are compared by these texts before they are compiled."""
    backend = LaxBackend("gpu", {"a": 6}, spread={"a": (ir.Spread("gpu", 3), ir.Spread("node", 2))})
    levels, axes = over_levels(gpu="native", node="native"), ("a",)

    def listed(op: ir.Collective) -> list[str]:
        trace = jax.make_jaxpr(on_ranks({"a": 6}, backend, lambda x: backend.move(x, op)))(jnp.ones((6, 6)))
        return [text for text, _ in collectives_of(trace.jaxpr, {"a": 6})]

    assert listed(collective("broadcast", Algorithm("native"), axes, root=4)) == ["broadcast f32[6] over a"]
    assert listed(collective("broadcast", levels, axes, root=4)) == [
        "broadcast f32[6] over a in groups of 2, the first with 3, 0",
        "broadcast f32[6] over a in groups of 3, the first with 1, 0",
    ]
    assert listed(collective("all_reduce", levels, axes))[1] == (
        "all_reduce(sum) f32[2] over a in groups of 2, the first with 0, 3"
    )


@pytest.mark.parametrize("inner", ["ring", "native"])
@pytest.mark.parametrize("outer", ["native", "halving_doubling"])
def test_levels_of_one_axis(inner: str, outer: str):
    spread = {"a": (ir.Spread("gpu", 3), ir.Spread("node", 2))}
    backend = LaxBackend("cpu", {"a": 6}, spread=spread)
    how = over_levels(gpu=inner, node=outer)
    x = np.random.default_rng(0).integers(-99, 99, (6, 12)).astype(np.float32)
    total, axes = x.sum(0), ("a",)

    def everything(x: Any) -> Any:
        results = [
            backend.move(x[:11], collective("all_reduce", how, axes)),
            backend.move(x[:5], collective("all_reduce", how, axes, op="max")),
            backend.move(x, collective("reduce_scatter", how, axes)),
            backend.move(x[:2], collective("all_gather", how, axes)),
        ]
        if inner == outer == "native":
            results.append(backend.move(x, collective("broadcast", how, axes, root=4)))
        return jnp.concatenate([backend.varying(y, axes) for y in results])

    got = np.asarray(on_ranks({"a": 6}, backend, everything)(x))
    for rank, row in enumerate(got):
        np.testing.assert_array_equal(row[:11], total[:11])
        np.testing.assert_array_equal(row[11:16], x.max(0)[:5])
        np.testing.assert_array_equal(row[16:18], total[2 * rank : 2 * rank + 2])
        np.testing.assert_array_equal(row[18:30], x[:, :2].reshape(-1))
        np.testing.assert_array_equal(row[30:], x[4] if inner == outer == "native" else [])


@pytest.mark.parametrize("how", [
    over_levels(b="chain", a="native"), over_levels(b="native", a="binomial_tree"),
    over_levels(a="chain", b="binomial_tree"), over_levels(b="native", a="native"),
    Algorithm("scatter_gather"),
])  # fmt: skip
def test_broadcasts_over_two_axes(how: Algorithm):
    sizes = {"a": 2, "b": 3}
    backend = LaxBackend("cpu", sizes)
    x = np.random.default_rng(0).normal(size=(6, 7)).astype(jnp.bfloat16)
    for axes, order in ((("a", "b"), [0, 1, 2, 3, 4, 5]), (("b", "a"), [0, 3, 1, 4, 2, 5])):
        op = collective("broadcast", how, axes, root=4)
        got = np.asarray(on_ranks(sizes, backend, lambda x, op=op: backend.move(x, op))(x))
        assert all(row.tobytes() == x[order[4]].tobytes() for row in got)


PLAN = """plan p
axis node = 2
axis gpu = 3
input g : tree per node, gpu
input x : f32[7] per node, gpu
input h : f32[13] partial node, gpu
each step {{
    total = reduce g over {over} by sum via {via}
    most  = reduce g over {over} by max via {via}
    first = broadcast x over {over} from 4 via {copies}
    part  = reduce h over node by sum via {flat}
    part  = scatter part over gpu by sum via {cuts}
    whole = gather part over gpu via {joins}
    output total, most, first, part, whole
}}
"""


@pytest.mark.parametrize("passes", parameters(["share,bucket,decompose,wire,overlap"], [""]))
@pytest.mark.parametrize(
    ("over", "via", "copies", "flat", "cuts", "joins"),
    [
        ("node, gpu", "ring", "chain", "halving_doubling", "ring", "bruck"),
        ("gpu, node", "hierarchical(gpu = ring, node = recursive_doubling)", "binomial_tree",
         "double_tree", "halving_doubling", "ring"),
        ("node, gpu", "torus", "hierarchical(gpu = chain, node = binomial_tree)", "ring", "ring", "ring"),
    ],
)  # fmt: skip
def test_plans_give_bit_by_bit_what_the_oracle_gives(
    over: str, via: str, copies: str, flat: str, cuts: str, joins: str, passes: str
):
    like = {"w": np.zeros((3, 5), np.float32), "s": np.zeros((), np.float32), "h": np.zeros(7, jnp.bfloat16)}
    text = PLAN.format(over=over, via=via, copies=copies, flat=flat, cuts=cuts, joins=joins)
    program = commplan.loads(text).compile(axes={"node": 2, "gpu": 3}, shapes={"g": like}, passes=passes)
    random = np.random.default_rng(1)
    inputs = {
        "g": {key: random.normal(size=(2, 3, *leaf.shape)).astype(leaf.dtype) for key, leaf in like.items()},
        "x": random.normal(size=(2, 3, 7)).astype(np.float32),
        "h": random.normal(size=(2, 3, 13)).astype(np.float32),
    }
    expected, _ = Oracle(program.schedule).phase("step", {}, inputs)
    got, _ = UnderJax(program, {"node": 2, "gpu": 3}, {}).phase("step", {}, inputs)
    for name, tree in expected.items():
        ours, right = jax.tree.leaves(got[name]), jax.tree.leaves(tree)
        for actual, exact in zip(ours, right, strict=True):
            assert np.asarray(actual).tobytes() == np.asarray(exact).tobytes(), name


@pytest.mark.parametrize(
    "algorithm",
    [
        Algorithm("pairwise"),
        Algorithm("bruck"),
        over_levels(host="bruck", rack="pairwise"),
        over_levels(host="pairwise", rack="bruck"),
    ],
    ids=str,
)
def test_a_swap_over_the_levels_of_an_axis(algorithm: Algorithm):
    spread = {"a": (ir.Spread("host", 4), ir.Spread("rack", 2))}
    backend = LaxBackend("cpu", {"a": 8}, spread=spread)
    op = collective("swap", algorithm, ("a",), op=None)
    x = np.random.default_rng(0).integers(-99, 99, (8, 24, 3)).astype(np.int32)
    result = on_ranks({"a": 8}, backend, lambda x: backend.move(x, op))(x)
    np.testing.assert_array_equal(result, x.reshape(8, 8, 9).swapaxes(0, 1).reshape(x.shape))


@pytest.mark.parametrize("via", ["ring", "hierarchical(b = ring, a = native)", "binomial_tree"])
def test_derivatives_are_those_of_the_native_collective(via: str):
    text = """plan p
axis a = 2
axis b = 2
input x : f32[6] per a, b
each step {{
    total = reduce x over a, b by mean via {via}
    first = broadcast x over a, b from 2 {copy}
    output total, first
}}
"""
    copy = "" if "hier" in via else "via chain" if via == "ring" else f"via {via}"
    x = np.random.default_rng(0).normal(size=(2, 2, 6)).astype(np.float32)

    def gradients(via: str, copy: str) -> Any:
        run = bind(text.format(via=via, copy=copy), mesh_of(a=2, b=2))

        def loss(x: Any) -> Any:
            out, _ = run.step({}, x=x)
            return (out.total**2).sum() + (out.first * jnp.arange(6.0)).sum()

        value, slope = jax.value_and_grad(loss)(x)
        _, along = jax.jvp(loss, (x,), (x,))
        return value, slope, along

    for ours, right in zip(gradients(via, copy), gradients("native", ""), strict=True):
        np.testing.assert_allclose(ours, right, rtol=1e-5)


def test_maxima_have_no_derivative_as_those_of_jax_have_none():
    text = """plan p
axis a = 2
input x : f32[6] per a
each step {
    y = reduce x over a by max via recursive_doubling
    output y
}
"""
    run = bind(text, mesh_of(a=2))
    with pytest.raises(NotImplementedError, match="does not differentiate max"):
        jax.grad(lambda x: run.step({}, x=x)[0].y.sum())(np.ones((2, 6), np.float32))


def test_chunks_become_slices():
    sizes = {"a": 4}
    op = collective("broadcast", Algorithm("chain"), ("a",), hints=Hints(chunk=16))
    assert programs.program_of(op, sizes, {}, 16).chunks == 1  # type: ignore[union-attr]
    assert programs.program_of(op, sizes, {}, 65).chunks == 5  # type: ignore[union-attr]
    ring = collective("all_reduce", Algorithm("ring"), ("a",), hints=Hints(chunk=16))
    assert programs.program_of(ring, sizes, {}, 65).chunks == 8  # type: ignore[union-attr]
    x = np.random.default_rng(0).normal(size=(4, 17)).astype(np.float32)
    backend = LaxBackend("cpu", sizes)
    got = np.asarray(on_ranks(sizes, backend, lambda x: backend.move(x, op))(x))
    assert all(row.tobytes() == x[0].tobytes() for row in got)


def test_programs_that_are_not_proved_do_not_run(monkeypatch: pytest.MonkeyPatch):
    right = registry.program("ring", "all_reduce", 11)

    def short(*args: Any, **options: Any) -> Any:
        del args, options
        return dataclasses.replace(right, rounds=right.rounds[:-1])

    monkeypatch.setattr(registry, "program", short)
    op = collective("all_reduce", Algorithm("ring"), ("a",))
    with pytest.raises(CommplanError) as error:
        programs.program_of(op, {"a": 11}, {}, 64, "x.plan")
    diagnostic = error.value.diagnostics[0]
    assert (diagnostic.code, diagnostic.span, diagnostic.file) == ("CP0740", SPAN, "x.plan")


@pytest.mark.parametrize("op", ["sum", "max", "min", None])
def test_a_part_of_an_axis_is_one_collective(op: str | None):
    """A level that is no axis is XLA's own within groups: nothing is scattered and gathered again."""
    spread = {"a": (ir.Spread("gpu", 3), ir.Spread("node", 2))}
    backend = LaxBackend("cpu", {"a": 6}, spread=spread)
    kind: ir.CollectiveKind = "all_reduce" if op else "broadcast"
    how = over_levels(gpu="native", node="native")
    step = on_ranks(
        {"a": 6}, backend, lambda x: backend.move(x, collective(kind, how, ("a",), op=op, root=4))
    )
    x = np.random.default_rng(0).integers(-99, 99, (6, 12)).astype(np.float32)
    expected = getattr(x, op)(0) if op else x[4]
    np.testing.assert_array_equal(step(x), np.broadcast_to(expected, x.shape))
    text = step.lower(x).compile().as_text()
    counts = {name: text.count(f" {name}(") for name in ("all-reduce", "reduce-scatter", "all-gather")}
    inner = 1 if op == "sum" else 0  # a sum is scattered within nodes, and gathered there
    assert counts == {"all-reduce": 2 - inner, "reduce-scatter": inner, "all-gather": inner}
