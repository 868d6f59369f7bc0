"""Microseconds of the host for a call of a tiny step: `jax.jit` and `run.jit`, with donated weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import commplan
from bench.compiled.ways import sgd
from bench.on_gpu.findings import Findings
from bench.on_gpu.scale import Scale
from bench.on_gpu.tax import PLAN
from bench.on_gpu.timing import Seconds, in_turns, median

LEAVES, WIDTH = 50, 128
Tree = dict[str, Any]


def measure(scale: Scale, findings: Findings) -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",), axis_types=(AxisType.Auto,))
    like = {f"w{i:02}": jax.ShapeDtypeStruct((WIDTH,), "float32") for i in range(LEAVES)}
    run = commplan.loads(PLAN).compile(mesh, shapes={"grads": like}).bind(mesh)

    @run.spmd(params="same")
    def train(state: Tree, params: Tree) -> Any:
        out, state = run.step(state, grads=run.varying(params))
        return state, sgd(params, out.grads)

    jitted = run.jit(train, donate_argnums=1)

    def planned(params: Tree) -> Tree:
        return jitted({}, params)[1]

    calls = {
        "jax.jit": _repeating(jax.jit(by_hand, donate_argnums=0), mesh),
        "run.jit": _repeating(planned, mesh),
    }
    times = in_turns(calls, scale.rounds, repeat=scale.pick(50, 500))
    findings.add(*_lines(times), seconds=times)


def by_hand(params: Tree) -> Tree:
    return sgd(params, params)


def _repeating(step: Callable[[Tree], Tree], mesh: Mesh) -> Callable[[], Tree]:
    same = NamedSharding(mesh, P())
    held = [{f"w{i:02}": jax.device_put(jnp.ones(WIDTH), same) for i in range(LEAVES)}]

    def call() -> Tree:
        held[0] = step(held[0])
        return held[0]

    return call


def _lines(times: Seconds) -> list[str]:
    return [
        f"{name}: {median(each) * 1e6:.1f} us a call, {LEAVES} donated leaves" for name, each in times.items()
    ]
