"""The plans of examples/plans as cases: with small trees of whole numbers, on as many ranks as asked."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from commplan.pytree import flatten

from .random_case import Case
from .random_stages import Spec

PLANS = Path(__file__).resolve().parents[2] / "examples" / "plans"
TREE = {
    "dense": {"kernel": Spec((13, 7), "float32"), "bias": Spec((7,), "float32")},
    "half": [Spec((5, 3), "bfloat16"), Spec((), "float32")],
}
BLOCKS = {"x": Spec((12, 3), "float32"), "gate": Spec((12,), "bfloat16")}  # for 2, 3 or 4 experts
AXES: Mapping[str, Mapping[str, int]] = {
    "data_parallel": {"data": 8},
    "two_level": {"node": 4, "gpu": 8},
    "sharded_update": {"data": 8},
    "weighted_mean": {"member": 2, "data": 4},
    "easgd_sync": {"worker": 8},
    "diloco": {"island": 4},
    "ensemble_training": {"member": 2, "data": 4},
    "pipeline": {"stage": 2},
    "mixture_of_experts": {"expert": 4},
}
VARYING: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "data_parallel": {"params": ("data",), "grads": ("data",)},
    "two_level": {"grads": ("node", "gpu")},
    "sharded_update": {"params": (), "grads": ("data",)},
    "weighted_mean": dict.fromkeys(("grads", "count", "loss"), ("member", "data")),
    "easgd_sync": {"params": ("worker",), "eta": ()},
    "diloco": {"params": ("island",)},
    "ensemble_training": dict.fromkeys(("params", "grads"), ("member", "data")),
    "parameter_hub": dict.fromkeys(("params", "grads"), ("rack", "worker")),
    "pipeline": dict.fromkeys(("activation", "loss"), ("stage",)),
    "mixture_of_experts": dict.fromkeys(("tokens", "answers", "router", "loss"), ("expert",)),
}


def zeros(params: Any) -> Any:
    return on_leaves(lambda x: x * 0, params)


def momentum(params: Any, grads: Any, moment: Any) -> Any:
    """Momentum in place of Adam: elementwise, and two results."""
    moment = on_leaves(lambda m, g: m + g, moment, grads)
    return on_leaves(lambda p, m: p - m, params, moment), moment


def descent(weights: Any, moment: Any, grads: Any) -> Any:
    """One step with momentum, as a parameter server takes it."""
    return momentum(weights, grads, moment)


def on_leaves(function: Any, *trees: Any) -> Any:
    flat = [flatten(tree) for tree in trees]
    columns = zip(*([leaf for _, leaf in pairs] for pairs, _ in flat), strict=True)
    return flat[0][1]([function(*column) for column in columns])


def example(name: str, sizes: Mapping[str, int] | None = None) -> Case:
    """The plan in examples/plans, with inputs for `sizes` if given."""
    import ml_dtypes  # noqa: PLC0415 - it comes with jax

    sizes, varying = sizes or AXES[name], VARYING[name]
    tree: Any = BLOCKS if name == "mixture_of_experts" else TREE
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
        pairs, rebuild = flatten(tree)
        inputs[key] = rebuild([draw(spec, axes, -4) for _, spec in pairs])
    trees = {key: tree for key in varying if key not in ("count", "loss", "eta")}
    functions = {"adam_init": zeros, "adam_update": momentum} if name == "sharded_update" else {}
    if name == "parameter_hub":
        functions = {"zeros": zeros, "sgd": descent}
    if name.startswith("ensemble"):
        functions = {"decode": zeros, "augment": lambda x, rng: x}  # host functions; no phase here calls them
    text = (PLANS / f"{name}.plan").read_text(encoding="utf-8")
    return Case(0, text, sizes, trees, inputs, varying, dict.fromkeys(varying, ()), functions, {}, None)


def smaller(name: str, sizes: Mapping[str, int]) -> Case:
    """The plan with other numbers of ranks along its axes."""
    case = example(name, sizes)
    text = case.text
    for axis, size in sizes.items():
        text, count = re.subn(rf"(\b{axis}\s*=) \d+", rf"\1 {size}", text, count=1)
        assert count == 1, f"{name} has no axis {axis}"
    return dataclasses.replace(case, text=text)
