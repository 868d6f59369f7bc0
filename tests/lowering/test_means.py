"""Means are finite if the true mean is, and a term of weight zero is left out, on both backends."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from support import means, mpirun
from support.embedding import bind, mesh_of


def test_on_a_mesh() -> None:
    means.check(mesh_of(node=2, gpu=2), nodes=2)


def test_under_mpi() -> None:
    mpirun.needs_mpi()
    call = "means.check(MPI.COMM_WORLD, nodes=1, dtypes=('float16',))"
    program = f"from mpi4py import MPI\nfrom support import means\n{call}\n"
    done = mpirun.started(mpirun.command(2, program))
    assert done.returncode == 0, done.stderr


def test_inside_the_backward_pass() -> None:
    """Flat and level by level: gradients of 40,000 whose sum is beyond f16."""
    for via in ("", "via hierarchical(gpu, node) { wire = f16 }", "via native"):
        text = f"""plan tapped
axis node = 2
axis gpu = 2
input g : tree partial node, gpu
each step {{
    g = reduce g over node, gpu by mean {via}
    output g
}}
"""
        weights = {"w": np.ones(3, np.float16)}
        run = bind(text, mesh_of(node=2, gpu=2), {"g": weights})

        @run.spmd(weights="same", returns="same")
        def step(state: Any, weights: Any, run: Any = run) -> Any:
            return state, jax.grad(lambda w: (run.tap(w)["w"] * jnp.float16(40000)).sum())(weights)

        np.testing.assert_allclose(step({}, weights)[1]["w"], 40000, rtol=1e-3)
