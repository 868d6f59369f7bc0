"""The example plans: what they mean, the oracle and JAX agree."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.agreement import Ways
from support.random_case import Case, Spec

from commplan.trees import flatten

PLANS = Path(__file__).resolve().parents[2] / "examples" / "plans"
TREE = {
    "dense": {"kernel": Spec((13, 7), "float32"), "bias": Spec((7,), "float32")},
    "half": [Spec((5, 3), "bfloat16"), Spec((), "float32")],
}
AXES: Mapping[str, Mapping[str, int]] = {
    "data_parallel": {"data": 8},
    "two_level": {"node": 4, "gpu": 8},
    "sharded_update": {"data": 8},
    "weighted_mean": {"member": 2, "data": 4},
    "easgd_sync": {"worker": 8},
    "ensemble_training": {"member": 2, "data": 4},
}
VARYING: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "data_parallel": {"params": ("data",), "grads": ("data",)},
    "two_level": {"grads": ("node", "gpu")},
    "sharded_update": {"params": (), "grads": ("data",)},
    "weighted_mean": dict.fromkeys(("grads", "count", "loss"), ("member", "data")),
    "easgd_sync": {"params": ("worker",), "eta": ()},
    "ensemble_training": dict.fromkeys(("params", "grads"), ("member", "data")),
}


def zeros(params: Any) -> Any:
    return on_leaves(lambda x: x * 0, params)


def momentum(params: Any, grads: Any, moment: Any) -> Any:
    """Momentum in place of Adam: elementwise, and two results."""
    moment = on_leaves(lambda m, g: m + g, moment, grads)
    return on_leaves(lambda p, m: p - m, params, moment), moment


def on_leaves(function: Any, *trees: Any) -> Any:
    flat = [flatten(tree) for tree in trees]
    columns = zip(*([leaf for _, leaf in pairs] for pairs, _ in flat), strict=True)
    return flat[0][1]([function(*column) for column in columns])


def example(name: str) -> Case:
    """The plan as it stands in examples/plans, with small trees of whole numbers."""
    import ml_dtypes  # noqa: PLC0415 - it comes with jax

    sizes, varying = AXES[name], VARYING[name]
    numbers = np.random.default_rng(17)

    def draw(spec: Spec, axes: tuple[str, ...], low: int) -> Any:
        shape = (*(sizes[axis] for axis in axes), *spec.shape)
        dtype = ml_dtypes.bfloat16 if spec.dtype == "bfloat16" else spec.dtype
        return numbers.integers(low, 5, shape).astype(dtype)

    inputs: dict[str, Any] = {}
    for key, axes in varying.items():
        if key in ("count", "loss", "eta"):
            inputs[key] = np.float32(0.5) if key == "eta" else draw(Spec((), "float32"), axes, 0)
            continue
        pairs, rebuild = flatten(TREE)
        inputs[key] = rebuild([draw(spec, axes, -4) for _, spec in pairs])
    trees = {key: TREE for key in varying if key not in ("count", "loss", "eta")}
    functions = {"adam_init": zeros, "adam_update": momentum} if name == "sharded_update" else {}
    if name.startswith("ensemble"):
        functions = {"decode": zeros, "augment": lambda x, rng: x}  # host functions; no phase here calls them
    text = (PLANS / f"{name}.plan").read_text(encoding="utf-8")
    return Case(0, text, sizes, trees, inputs, varying, dict.fromkeys(varying, ()), functions, {}, None)


def agree(name: str) -> None:
    case = example(name)
    ways = Ways(case)
    answers = ways.check_oracle()
    compared = [leaf for outputs, state in answers.values() for leaf in flatten((outputs, state))[0]]
    assert compared, f"{name} gives nothing that could differ"
    ways.check_jax(answers)


@pytest.mark.parametrize("name", [name for name in AXES if name != "two_level"])
def test_examples_agree(name: str):
    agree(name)


LOADED = """
plan loaded
axis data = 4
source records : f32[3]
fn norm(f32[3]) -> f32 on device
input grads : tree partial data
each step {
    x, n  = load records batch 8 split data visit exactly_once seed 1
    sizes = map norm(x)
    grads = reduce grads over data by mean(weight = n)
    total = reduce n over data by sum
    output grads, total, sizes
}
"""


def test_a_count_that_was_loaded_weighs_a_mean():
    """The phase takes the source-only value `n`; an empty share of the last batch weighs nothing."""
    grads = {"w": np.arange(20, dtype=np.float32).reshape(4, 5)}
    for count in ([2, 2, 1, 0], [0, 0, 0, 0]):
        inputs = {"grads": grads, "n": np.array(count, np.int32)}
        varying = {"grads": ("data",), "n": ("data",)}
        trees = {"grads": {"w": Spec((5,), "float32")}}
        functions = {"norm": lambda record: (record * record).sum()}
        case = Case(
            0, LOADED, {"data": 4}, trees, inputs, varying, dict.fromkeys(inputs, ()), functions, {}, None
        )
        ways = Ways(case)
        answers = ways.check_oracle()
        ways.check_jax(answers)
        outputs = answers["step"][0]
        assert outputs.keys() == {"grads", "total"}
        wanted = (np.array(count)[:, None] * grads["w"]).sum(0) / max(sum(count), 1)
        np.testing.assert_allclose(outputs["grads"]["w"], wanted, rtol=1e-6)
        assert outputs["total"] == sum(count)


def test_two_level_agrees_on_its_thirty_two_devices():
    here = Path(__file__).resolve().parent
    script = (
        f"import sys; sys.path[:0] = [{str(here)!r}, {str(here.parent)!r}]\n"
        "import test_agreement_examples as tests\n"
        "tests.agree('two_level')\n"
        "import jax; assert len(jax.devices()) == 32\n"
    )
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "32", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
