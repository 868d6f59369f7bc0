"""Compiled algorithms: the permutes of their rounds, and levels one after the other."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import pytest
import twins
from jax.sharding import PartitionSpec as P

import commplan
from commplan.ir import schedule as ir
from commplan.lowering.audit import audit_text, compare, expected
from commplan.lowering.jax.collectives.lax_backend import LaxBackend
from commplan.lowering.jax.compiler_options import compiler_options
from commplan.lowering.programs import spreads

PLAN = """plan p
axis node = 2
axis gpu = 3
input x : {dtype}[13] per node, gpu
input h : f32[7, 2] partial gpu
at start {{
    y = reduce x over {over} by {by} via {via}
    z = broadcast x over {over} from 4 via {copies}
    s = scatter h over gpu by sum via {cuts}
    w = gather s over gpu via {joins}
    output y, z, w
}}
"""


def found_and_wanted(text: str, passes: str | None = None) -> tuple[Any, Any]:
    mesh = twins.mesh_of(jax.devices()[:6], node=2, gpu=3)
    program = commplan.loads(text).compile(mesh, passes=passes)
    run = program.bind(mesh)
    dtype = program.schedule.entry[0].leaves[0].dtype.numpy_name

    def body(x: Any) -> Any:
        term = run.varying(x.reshape(()))
        inputs = {"x": jnp.full(13, term).astype(dtype), "h": jnp.full((7, 2), term)}
        out, _ = run.start({}, **inputs)
        total: Any = sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in (out.y, out.z, out.w))
        return total.reshape(1)

    spec = P(mesh.axis_names)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    step = audit_text(twins.hlo(mapped, jax.ShapeDtypeStruct((6,), "float32")))
    return step, expected(program.schedule, "start", mesh)


@pytest.mark.parametrize(
    ("dtype", "over", "by", "via", "copies", "cuts", "joins"),
    [
        ("f32", "node, gpu", "sum", "ring", "chain", "ring", "bruck"),
        ("bf16", "gpu, node", "sum", "halving_doubling", "scatter_gather", "halving_doubling", "ring"),
        ("f32", "node, gpu", "sum", "hierarchical(gpu = native, node = ring)",
         "hierarchical(gpu = binomial_tree, node)", "native", "native"),
        ("f16", "gpu, node", "max", "hierarchical(gpu = ring, node = recursive_doubling)", "double_tree",
         "ring", "ring"),
        ("bool", "node, gpu", "max", "recursive_doubling", "binomial_tree", "ring", "ring"),
    ],
)  # fmt: skip
def test_rounds_become_permutes(
    dtype: str, over: str, by: str, via: str, copies: str, cuts: str, joins: str
) -> None:
    text = PLAN.format(dtype=dtype, over=over, by=by, via=via, copies=copies, cuts=cuts, joins=joins)
    step, expected_ops = found_and_wanted(text, passes="")
    assert any(item.kind == "permute" for item in expected_ops)
    report = compare(expected_ops, step)  # nothing orders the stages of this plan among each other
    assert len(step.collectives) == len(expected_ops)
    assert {difference.kind for difference in report.differences} <= {"moved"}, str(report)


def test_a_round_that_is_missing_is_noticed() -> None:
    text = PLAN.format(
        dtype="f32", over="node, gpu", by="sum", via="ring", copies="chain", cuts="ring", joins="ring"
    )
    step, expected_ops = found_and_wanted(text)
    less = compare((*expected_ops[:3], *expected_ops[4:]), step)
    assert "extra" in {difference.kind for difference in less.differences}
    assert "extra" not in {difference.kind for difference in compare(expected_ops, step).differences}


OWNERS = """plan p
axis node = 2
axis gpu = 3
input params : f32[12] per node, gpu
input grads : f32[12] partial node, gpu
state weights : f32[12]
fn sgd(f32[12], f32[12]) -> f32[12] on device elementwise
at start {
    weights = broadcast params over node, gpu from 0
}
each step {
    weights = exchange grads into weights with sgd over node, gpu by sum
              via parameter_server(owners = 2)
}
"""


def test_a_reduction_to_owners_is_an_all_reduce() -> None:
    """XLA has no reduction to one rank. XLA's options for the plan count the same all-reduces."""
    mesh = twins.mesh_of(jax.devices()[:6], node=2, gpu=3)
    program = commplan.loads(OWNERS).compile(mesh)
    run = program.bind(mesh, functions={"sgd": lambda w, g: w - g})

    def body(weights: Any, x: Any) -> Any:
        _, state = run.step({"weights": weights}, grads=jnp.full(12, run.varying(x.reshape(()))))
        return state["weights"]

    mapped = jax.shard_map(body, mesh=mesh, in_specs=(P(), P(mesh.axis_names)), out_specs=P())
    shaped = [jax.ShapeDtypeStruct((size,), "float32") for size in (12, 6)]
    expected_ops = expected(program.schedule, "step", mesh)
    assert [item.kind for item in expected_ops] == [
        "all_reduce"
    ] * 4  # 2 owners: reduced to, and broadcast from
    assert str(compare(expected_ops, audit_text(twins.hlo(mapped, *shaped)))) == "4 collectives, as planned"
    options = {option.name: option.value for option in compiler_options(program.schedule, "gpu")}
    assert options["xla_gpu_all_reduce_combine_threshold_bytes"] == 6 * 4 - 1


def test_a_reduction_by_levels_of_which_one_is_native_is_one_all_reduce() -> None:
    mesh = twins.mesh_of(jax.devices()[:6], node=2, gpu=3)
    text = PLAN.format(
        dtype="f32", over="node, gpu", by="sum", via="hierarchical(gpu = native, node = ring)",
        copies="native", cuts="native", joins="native",
    )  # fmt: skip
    schedule = commplan.loads(text).compile(mesh, passes="").schedule
    replace, phase = msgspec.structs.replace, schedule.phase("start")
    op: Any = next(op for op in phase.ops if isinstance(op, ir.Collective) and op.kind == "all_reduce")
    op = replace(op, kind="reduce", root=4)
    schedule = replace(schedule, phases=(replace(phase, ops=(op,), outputs=(binding_of(phase, op),)),))
    backend = LaxBackend("cpu", {"node": 2, "gpu": 3})
    mapped = jax.shard_map(
        lambda x: backend.varying(backend.move(x, op), op.axes),
        mesh=mesh, in_specs=P(mesh.axis_names), out_specs=P(mesh.axis_names),
    )  # fmt: skip
    step = audit_text(twins.hlo(mapped, jax.ShapeDtypeStruct((6 * 13,), "float32")))
    assert str(compare(expected(schedule, "start", mesh), step)) == "1 collectives, as planned"


def binding_of(phase: ir.Phase, op: ir.Collective) -> ir.Binding:
    return next(binding for binding in phase.outputs if binding.value == op.result)


def test_levels_of_one_axis() -> None:
    """hierarchical over the topology's levels of an axis: groups of ranks, in the order of the levels."""
    text = """plan p
axis data = 6
input g : f32[10] partial data
at start {
    g = reduce g over data by sum
    output g
}
"""
    schedule = commplan.loads(text).compile(passes="").schedule
    levels = (ir.Spread("gpu", 3), ir.Spread("node", 2))
    stage: Any = (
        commplan.loads(text.replace("by sum", "by sum via hierarchical(data)")).graph.phases[0].stages[0]
    )
    how = stage.via
    args = tuple(
        msgspec.structs.replace(how.args[0], value=v, key=k)
        for v, k in (("native", "gpu"), ("halving_doubling", "node"))
    )
    phase = schedule.phases[0]
    op: Any = msgspec.structs.replace(phase.ops[0], algorithm=msgspec.structs.replace(how, args=args))
    schedule = msgspec.structs.replace(
        schedule,
        axes=(msgspec.structs.replace(schedule.axes[0], levels=levels),),
        phases=(msgspec.structs.replace(phase, ops=(op, *phase.ops[1:])),),
    )
    mesh = twins.mesh_of(jax.devices()[:6], data=6)
    backend = LaxBackend("cpu", {"data": 6}, spread=spreads(schedule))

    def body(x: Any) -> Any:
        return backend.varying(backend.move(x, op), ("data",))

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    step = audit_text(twins.hlo(mapped, jax.ShapeDtypeStruct((60,), "float32")))
    expected_ops = expected(schedule, "start", mesh)
    assert [item.kind for item in expected_ops] == ["reduce_scatter", "permute", "permute", "all_gather"]
    assert expected_ops[0].groups == ((0, 1, 2), (3, 4, 5))
    assert set(expected_ops[1].groups) == {(0, 3), (3, 0), (1, 4), (4, 1), (2, 5), (5, 2)}
    assert str(compare(expected_ops, step)) == "4 collectives, as planned"
