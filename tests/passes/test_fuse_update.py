"""fuse_update: each bucket's shard is updated as soon as its sum is ready."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.exchanges import SHAPES, drawn, plan_text, same
from support.oracle import Oracle

import commplan
from commplan.ir.schedule import Collective, Map, Schedule, operands, results

TREE: Any = {key: {"shape": list(shape), "dtype": "f32"} for key, shape in SHAPES.items()}
SCALAR: Any = {"shape": [], "dtype": "f32"}
SMALL = "share,rates,place,bucket{max=64},fuse_update,decompose,wire,select,overlap"
OWNED = "via parameter_server"

SHARDED = """
plan by_hand
axis data = 4
input params : tree
input grads  : tree partial data
state opt    : tree split data
fn begin (tree) -> tree on device elementwise
fn update(tree, tree, tree) -> tree, tree on device elementwise
at start {
    shard = slice params over data
    opt   = map begin(shard)
}
each step {
    shard      = slice params over data
    grads      = scatter grads over data by mean
    shard, opt = map update(shard, grads, opt)
    params     = gather shard over data
    output params
}
"""


def compiled(text: str, passes: str | None = SMALL, **shapes: Any) -> Schedule:
    all_shapes = {"params": TREE, "grads": TREE} | shapes
    backend = "mpi" if text == SHARDED else "jax"  # under JAX a step that is written out stays as it is
    return commplan.loads(text).compile(shapes=all_shapes, passes=passes, backend=backend).schedule


def waits_for(schedule: Schedule, op: Map) -> list[str]:
    """The collectives that must be over before `op` can run."""
    makers = {ref: each for each in schedule.phase("step").ops for ref in results(each)}
    todo, ops = list(operands(op)), dict[str, Any]()
    while todo:
        each = makers.get(todo.pop())
        if each is not None and results(each)[0] not in ops:
            ops[results(each)[0]] = each
            todo += operands(each)
    return [each.kind for each in ops.values() if isinstance(each, Collective)]


def all_gathers(schedule: Schedule) -> list[Collective]:
    moves = [op for op in schedule.phase("step").ops if isinstance(op, Collective)]
    return [op for op in moves if op.kind == "all_gather"]


def maps(schedule: Schedule) -> list[Map]:
    return [op for op in schedule.phase("step").ops if isinstance(op, Map)]


def test_a_piece_waits_for_its_own_bucket_alone() -> None:
    schedule = compiled(plan_text({"worker": 4}, OWNED))
    awaited = [waits_for(schedule, op) for op in maps(schedule)]
    assert sorted(awaited) == [["all_reduce"], ["reduce_scatter"], ["reduce_scatter"]]
    gathers = all_gathers(schedule)
    assert len(gathers) == 2
    (choice,) = (choice for choice in schedule.choices if choice.by == "fuse_update")
    assert choice.what == "`weights`: update in 3 pieces, one for each bucket"


def test_one_bucket_is_updated_as_it_is() -> None:
    schedule = compiled(plan_text({"worker": 4}, OWNED), None)
    assert len(maps(schedule)) == 1
    assert not any(choice.by == "fuse_update" for choice in schedule.choices)


def test_updates_that_are_written_out_are_fused_too() -> None:
    """An optimizer with two moments and a count: the count is in every piece, and the same."""
    state: Any = {"count": SCALAR, "mu": TREE, "nu": TREE}
    calls: list[Any] = []

    def begin(params: Any) -> Any:
        return {"count": np.float32(0), "mu": {k: x * 0 for k, x in params.items()},
                "nu": {k: x * 0 for k, x in params.items()}}  # fmt: skip

    def update(params: Any, grads: Any, opt: Any) -> Any:
        calls.append({key: leaf.size for key, leaf in params.items()})
        count = opt["count"] + 1
        mu = {key: opt["mu"][key] + grads[key] for key in grads}
        nu = {key: opt["nu"][key] + grads[key] * grads[key] for key in grads}
        new = {key: params[key] - count * mu[key] - nu[key] for key in params}
        return new, {"count": count, "mu": mu, "nu": nu}

    def trained(passes: str | None) -> tuple[Any, Any]:
        oracle = Oracle(compiled(SHARDED, passes, opt=state), {"begin": begin, "update": update})
        params = drawn(0, ())
        _, states = oracle.phase("start", oracle.init(), {"params": params})
        for step in (1, 2, 3):
            out, states = oracle.phase("step", states, {"params": params, "grads": drawn(step, (4,))})
            params = out["params"]
        return params, states["opt"]

    whole, before = trained("")
    calls.clear()
    pieces, after = trained(SMALL)
    assert same(pieces, whole)
    assert after["count"] == before["count"] == 3
    assert same(after["mu"], before["mu"])
    assert same(after["nu"], before["nu"])
    first, second, third = ({"scale": 1}, {"c": 1, "b": 2}, {"a": 4})
    nothing = dict.fromkeys(SHAPES, 0)
    assert all(nothing | piece in calls for piece in (first, second, third))
    assert len(calls) == 3 * 4 * 3  # pieces, ranks, steps


def test_a_tree_that_goes_with_no_gradient_keeps_the_update_whole() -> None:
    state: Any = {"mu": TREE, "rows": {"shape": [8], "dtype": "f32"}}
    schedule = compiled(SHARDED, opt=state)
    assert len(maps(schedule)) == 1
    (choice,) = (choice for choice in schedule.choices if choice.by == "fuse_update")
    assert choice.why == "leaf `rows` of `opt`, f32[8], matches no gradient"


def test_under_jax_a_step_that_is_written_out_stays_as_it_is() -> None:
    all_shapes = {"params": TREE, "grads": TREE, "opt": {"mu": TREE}}
    schedule = commplan.loads(SHARDED).compile(shapes=all_shapes, passes=SMALL, backend="jax").schedule
    assert len(maps(schedule)) == 1


def test_leaves_of_several_types_travel_apart() -> None:
    mixed: Any = {"a": {"shape": [9], "dtype": "f32"}, "b": {"shape": [9], "dtype": "f16"},
                  "c": {"shape": [40], "dtype": "f32"}}  # fmt: skip
    schedule = compiled(plan_text({"worker": 4}, OWNED), params=mixed, grads=mixed)
    gathers = all_gathers(schedule)
    assert sorted((str(op.dtype), op.nbytes) for op in gathers) == [("f16", 6), ("f32", 12), ("f32", 40)]
