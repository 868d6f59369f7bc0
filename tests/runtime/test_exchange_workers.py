"""Parameter exchange between devices of a mesh: exactly the equations, and no more memory than they need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from support.exchanges import SHAPES, counts, drawn, momentum, plain, plan_text, same, wanted, zeros

import commplan

SMALL = "share,rates,place,bucket{max=64},fuse_update,decompose,wire,select,overlap"
OWNED, WITHIN = "via parameter_server", "via parameter_server(within = rack)"
NARROW = "{ wire = bf16, accumulate = f32 }"
TREE = {key: jax.ShapeDtypeStruct(shape, jnp.float32) for key, shape in SHAPES.items()}


def bound(axes: Mapping[str, int], text: str, passes: str | None = SMALL) -> Any:
    count = int(np.prod(list(axes.values())))
    types = (AxisType.Auto,) * len(axes)
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), types, devices=jax.devices()[:count])
    program = commplan.loads(text).compile(mesh, shapes={"params": TREE, "grads": TREE}, passes=passes)
    names = [fn.name for fn in program.schedule.fns]
    functions = {"zeros": zeros, "update": momentum} if "zeros" in names else {"update": plain}
    return program.bind(mesh, functions=functions)


def trained(run: Any, axes: Mapping[str, int], steps: int, by: str = "mean") -> tuple[list[Any], Any]:
    lead = tuple(axes.values())

    @jax.jit
    @run.spmd(returns="weights", arguments=f"per {', '.join(axes)}")
    def step(state: Any, arguments: Any) -> Any:
        out, state = run.step(state, **arguments)
        return state, out.weights

    out, state = run.start(run.init(), params=drawn(0, lead))
    history = [out.weights]
    for number in range(1, steps + 1):
        arguments = {"grads": drawn(number, lead)} | ({"n": counts(number, lead)} if "weight" in by else {})
        state, weights = step(state, arguments)
        history.append(weights)
    return history, state


@pytest.mark.parametrize(
    ("axes", "via", "by", "states", "options"),
    [
        ({"worker": 2}, OWNED, "mean", 2, ""), ({"worker": 2}, "", "mean", 1, NARROW),
        ({"worker": 3}, OWNED, "sum", 2, NARROW), ({"worker": 3}, OWNED, "mean(weight = n)", 1, ""),
        ({"worker": 8}, OWNED, "mean(weight = n)", 2, NARROW),
        ({"worker": 3}, "via parameter_server(owners = 1)", "sum", 2, ""),
        ({"rack": 2, "worker": 4}, "via parameter_server(owners = 3, within = rack)", "mean", 2, ""),
        ({"rack": 2, "worker": 4}, WITHIN, "mean", 2, NARROW),
        ({"rack": 2, "worker": 3}, WITHIN, "sum", 2, ""),
    ],
)  # fmt: skip
def test_the_weights_are_those_of_the_equations(
    axes: dict[str, int], via: str, by: str, states: int, options: str
) -> None:
    """Sums of small whole numbers are exact in any order, and in bf16 on the way."""
    run = bound(axes, plan_text(axes, via, options, by, states))
    weights, _ = trained(run, axes, 3, by)
    assert all(map(same, weights, wanted(axes, 3, by, states)))


def test_owners_and_everyone_give_the_same_bits() -> None:
    axes = {"worker": 8}
    text = plan_text(axes)
    owned, _ = trained(bound(axes, text, SMALL), axes, 4)
    whole, _ = trained(bound(axes, text, "place{how=replicated},bucket,overlap"), axes, 4)
    assert all(map(same, owned, [jax.tree.map(np.asarray, tree) for tree in whole]))


def test_each_device_keeps_its_part_of_the_moment() -> None:
    axes = {"rack": 2, "worker": 4}
    run = bound(axes, plan_text(axes, WITHIN))
    _, state = trained(run, axes, 1)
    for key, shape in SHAPES.items():
        leaf = state["moment"][key]
        sizes = [piece.data.size for piece in leaf.addressable_shards]
        assert sizes == [-(-int(np.prod(shape)) // 8)] * 8, key
    assert all(leaf.addressable_shards[0].data.shape == leaf.shape for leaf in state["weights"].values())


def test_the_state_is_saved_and_restored() -> None:
    axes = {"worker": 8}
    run = bound(axes, plan_text(axes, OWNED))
    _, state = trained(run, axes, 2)
    saved = jax.tree.map(np.asarray, state)
    again, _ = trained(run, axes, 3)

    @jax.jit
    @run.spmd(returns="weights", grads="per worker")
    def step(state: Any, grads: Any) -> Any:
        out, state = run.step(state, grads=grads)
        return state, out.weights

    _, weights = step(saved, drawn(3, (8,)))
    assert same(weights, jax.tree.map(np.asarray, again[3]))


def test_the_compiled_step_has_the_collectives_of_a_hand_written_one() -> None:
    axes = {"worker": 8}
    run = bound(axes, plan_text(axes, OWNED), None)

    @jax.jit
    @run.spmd(returns="weights", grads="per worker")
    def step(state: Any, grads: Any) -> Any:
        out, state = run.step(state, grads=grads)
        return state, out.weights

    _, state = run.start(run.init(), params=drawn(0, (8,)))
    text = step.lower(state, drawn(1, (8,))).compile().as_text()
    counted = {kind: text.count(f" {kind}(") for kind in ("reduce-scatter", "all-gather", "all-reduce")}
    # One for each leaf, which are not packed on devices of one process; all-reduce is the scalar's.
    assert counted == {"reduce-scatter": 3, "all-gather": 3, "all-reduce": 1}
