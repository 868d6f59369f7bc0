"""A device function on records and a whole value: the records are mapped over, the whole value is not."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from support.oracle import Oracle

import commplan

TEXT = """plan mixed

axis data = 2

source rows : f32[3]
fn mix(f32[3], f32[3]) -> f32[3] on device

input scale : f32[3]

each step {
    x    = load rows batch 4 split data visit exactly_once seed 1
    out  = map mix(x, scale)
    back = map mix(scale, x)
    out  = gather out over data
    output out
}
"""
ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)
SCALE = np.array([1, 10, 100], np.float32)


def program() -> commplan.Program:
    text = TEXT.replace("    back = map mix(scale, x)\n", "")
    return commplan.loads(text).compile({"data": 2})


def flipped() -> commplan.Program:
    text = TEXT.replace("    out  = map mix(x, scale)\n", "").replace("back =", "out =")
    return commplan.loads(text).compile({"data": 2})


def multiply(a: Any, b: Any) -> Any:
    assert a.shape == b.shape == (3,)
    return a * b


def test_the_oracle() -> None:
    for compiled in (program(), flipped()):
        oracle = Oracle(compiled.schedule, {"mix": multiply})
        outputs, _ = oracle.phase("step", {}, {"x": ROWS, "scale": SCALE})
        np.testing.assert_array_equal(outputs["out"], ROWS * SCALE)


def test_jax() -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    for compiled in (program(), flipped()):
        run = compiled.bind(mesh, sources={"rows": list(ROWS)}, functions={"mix": multiply})
        outputs, _ = run.step(run.init(), x=ROWS, scale=SCALE)
        np.testing.assert_array_equal(outputs.out, ROWS * SCALE)
