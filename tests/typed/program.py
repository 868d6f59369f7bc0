"""A user's program with the face of its plan, which `commplan stubs linear.plan -o plans.pyi` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

import commplan

if TYPE_CHECKING:
    import plans

PLAN = Path(__file__).with_name("linear.plan")


def main(mesh: jax.sharding.Mesh, params: dict[str, jax.Array]) -> float:
    """The mean of a loss that is 3 everywhere, of every fourth step."""
    plan: commplan.Plan[plans.Linear] = commplan.load(PLAN)
    member_params = {name: leaf[0] for name, leaf in params.items()}
    run = plan.compile(mesh, shapes=dict.fromkeys(("params", "grads", "center"), member_params)).bind(mesh)
    out, state = run.start(run.init(), params=params)
    center = jax.device_put(out.center, run.sharding("center"))

    @run.jit
    @run.spmd(grads="per data", loss="per data", returns="mean")
    def train(state: plans.LinearState, grads: Any, loss: jax.Array) -> tuple[plans.LinearState, jax.Array]:
        reduced, state = run.step(state, grads=grads)
        assert set(reduced["grads"]) == set(grads)
        losses, state = run.every[4](state, loss=loss)
        return state, losses.mean

    state, mean = train(state, params, jax.numpy.full(mesh.shape["data"], 3.0))
    _, state = run.every[16](state, params=params)
    evaluated, _ = run.evaluate({"center": center})
    assert list(evaluated) == ["center"] and "center" in evaluated and len(evaluated) == 1
    return float(mean)


def without_a_face(mesh: jax.sharding.Mesh) -> Any:
    run = commplan.load(PLAN).compile(mesh).bind(mesh)
    out, state = run.start(run.init(), params=1)
    return out.center, run.every[4](state, loss=1.0)
