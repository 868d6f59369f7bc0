"""Plans whose lowering is read in terms: the examples on few ranks, and stages on a mesh of 2 x 3."""

from __future__ import annotations

import numpy as np

from .jaxpr_terms import opaque
from .random_case import Case
from .random_stages import Spec

EXAMPLES = [
    ("data_parallel", {"data": 3}),
    ("two_level", {"node": 2, "gpu": 2}),
    ("two_level", {"node": 2, "gpu": 3}),
    ("sharded_update", {"data": 3}),
    ("weighted_mean", {"member": 2, "data": 2}),
    ("easgd_sync", {"worker": 3}),
    ("ensemble_training", {"member": 2, "data": 2}),
    ("parameter_hub", {"rack": 2, "worker": 2}),
    ("pipeline", {"stage": 2}),
    ("mixture_of_experts", {"expert": 3}),
]
PIPELINES = [
    None,
    "place,bucket{max=64},decompose,wire,select",
    "share,place,bucket{max=1KiB},fuse_update,decompose,wire,overlap",
]

_PLAN = """plan stages
axis a = 2
axis b = 3
fn same(tree) -> tree on device elementwise
input grads : tree partial a, b
input params : tree per a, b
input whole : tree
each step {{
    {stage}
    output total
}}
"""
_TREE = {"v": Spec((4, 1), "float32"), "w": Spec((7,), "float32")}


def case_of(stage: str) -> Case:
    """A plan of some stages on `grads`, `params` and `whole`, which make `total`."""
    varying: dict[str, tuple[str, ...]] = {"grads": ("a", "b"), "params": ("a", "b"), "whole": ()}
    sizes = {"a": 2, "b": 3}
    inputs = {
        name: {
            path: np.zeros((*(sizes[axis] for axis in axes), *spec.shape), spec.dtype)
            for path, spec in _TREE.items()
        }
        for name, axes in varying.items()
    }
    return Case(
        0, _PLAN.format(stage=stage), sizes, dict.fromkeys(varying, _TREE), inputs, varying,
        dict.fromkeys(varying, ()), {"same": opaque("same")}, {}, None,
    )  # fmt: skip
