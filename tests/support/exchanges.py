"""Plans of parameter exchanges between workers, and their meaning: the equations in NumPy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .oracle import Oracle

Tree = Any
SHAPES: dict[str, tuple[int, ...]] = {"a": (5, 3), "b": (7,), "c": (1, 2, 2), "scale": ()}


def plan_text(
    axes: Mapping[str, int], via: str = "", options: str = "", by: str = "mean", states: int = 2
) -> str:
    """A plan that exchanges over all of `axes`; with `n` for a weighted mean."""
    over = ", ".join(axes)
    both = "weights, moment" if states == 2 else "weights"
    trees = ", ".join(["tree"] * states)
    lines = ["plan owners", *(f"axis {name} = {size}" for name, size in axes.items())]
    lines += [f"input params : tree per {over}", f"input grads : tree partial {over}"]
    lines += [f"input n : i32 per {over}"] if "weight" in by else []
    lines += ["state weights : tree", *(["state moment : tree"] if states == 2 else [])]
    lines += ["fn zeros(tree) -> tree on device elementwise"] if states == 2 else []
    lines += [f"fn update(tree, {trees}) -> {trees} on device elementwise"]
    lines += ["at start {", f"    weights = broadcast params over {over} from 0"]
    lines += ["    moment = map zeros(weights)"] if states == 2 else []
    lines += ["    output weights", "}", "each step {"]
    lines += [f"    {both} = exchange grads into {both} with update over {over} by {by} {via} {options}"]
    lines += ["    output weights", "}"]
    return "\n".join(lines) + "\n"


def zeros(weights: Tree) -> Tree:
    return {key: leaf * 0 for key, leaf in weights.items()}


def momentum(weights: Tree, moment: Tree, gradient: Tree) -> tuple[Tree, Tree]:
    """Half of the previous moment plus the gradient; a quarter of that is subtracted from the weights."""
    new = {key: moment[key] * moment[key].dtype.type(0.5) + gradient[key] for key in weights}
    return {key: weights[key] - new[key] * new[key].dtype.type(0.25) for key in weights}, new


def plain(weights: Tree, gradient: Tree) -> Tree:
    return {key: weights[key] - gradient[key] * gradient[key].dtype.type(0.25) for key in weights}


def drawn(seed: int, lead: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> Tree:
    """Small whole numbers as f32: sums of them are exact in any order."""
    rng = np.random.default_rng(seed)
    return {key: rng.integers(-8, 8, (*lead, *shape)).astype(np.float32) for key, shape in shapes.items()}


def wanted(
    axes: Mapping[str, int], steps: int, by: str = "mean", states: int = 2, shapes: Any = None
) -> list[Tree]:
    """The weights after the start and after each step, straight from the equations."""
    lead, shapes = tuple(axes.values()), shapes or SHAPES
    along = tuple(range(len(lead)))
    weights = {key: leaf[(0,) * len(lead)] for key, leaf in drawn(0, lead, shapes).items()}
    moment, history = zeros(weights), [weights]
    for step in range(1, steps + 1):
        terms = drawn(step, lead, shapes)
        if "weight" in by:
            n = counts(step, lead)
            rows = {key: n.reshape(lead + (1,) * (x.ndim - len(lead))) for key, x in terms.items()}
            total = {key: (x * rows[key]).sum(along) for key, x in terms.items()}
            gradient = {key: (x / np.float32(n.sum())).astype(np.float32) for key, x in total.items()}
        else:
            ranks = np.float32(np.prod(lead) if by == "mean" else 1)
            gradient = {key: x.sum(along) / ranks for key, x in terms.items()}
        if states == 2:
            weights, moment = momentum(weights, moment, gradient)
        else:
            weights = plain(weights, gradient)
        history.append(weights)
    return history


def counts(step: int, lead: tuple[int, ...]) -> Any:
    """How many records each rank has: powers of two in all, so that quotients are exact."""
    n = np.random.default_rng(step + 100).integers(0, 4, lead).astype(np.int32)
    n.flat[-1] += (1 << int(n.sum()).bit_length()) - int(n.sum())
    return n


def oracle_run(schedule: Any, axes: Mapping[str, int], steps: int, by: str = "mean", states: int = 2) -> Any:
    """The weights after the start and after each step, and the last state: the schedule in NumPy."""
    lead = tuple(axes.values())
    functions = {"zeros": zeros, "update": momentum if states == 2 else plain}
    oracle = Oracle(schedule, functions)
    out, state = oracle.phase("start", oracle.init(), {"params": drawn(0, lead)})
    history = [out["weights"]]
    for step in range(1, steps + 1):
        inputs = {"grads": drawn(step, lead)} | ({"n": counts(step, lead)} if "weight" in by else {})
        out, state = oracle.phase("step", state, inputs)
        history.append(out["weights"])
    return history, state


def same(got: Tree, right: Tree) -> bool:
    return all(np.array_equal(np.asarray(got[key]), right[key]) for key in right)
