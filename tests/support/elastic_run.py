"""A plan of elastic averaging, for tests of runs."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.embedding import bind, mesh_of

TREE = {"w": np.zeros((3, 5), np.float32), "b": np.zeros((), np.float32)}
ELASTIC = """plan p
axis worker = 4
input params : tree per worker
input eta    : f32
state center : tree
at start {
    center = broadcast params over worker from 0
}
every 4 steps {
    pull, center = elastic params with center over worker by sync(eta = eta, rho = 0.1)
    output pull
}
"""


def workers(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {k: rng.normal(size=(4, *v.shape)).astype(np.float32) for k, v in TREE.items()}


def elastic() -> Any:
    return bind(ELASTIC, mesh_of(worker=4), {"params": TREE, "center": TREE})
