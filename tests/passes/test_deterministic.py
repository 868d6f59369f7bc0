"""Schedules are the same bytes whatever the process, and do not grow with the ranks."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.campaign import parameters

import commplan
from commplan.ir.schedule import Backend
from commplan.ir.serialization.canonical_json import encode

BACKENDS: tuple[Backend, ...] = ("jax", "mpi")
TOPOLOGIES = Path(__file__).resolve().parents[2] / "examples" / "topologies"
PLAN = """plan three
axis pod = 256
axis node = 32
axis gpu = 8
input grads : tree partial pod, node, gpu
each step {
    grads = reduce grads over pod, node, gpu by mean { overlap = backward }
    output grads
}
"""
SHAPES = {f"layer{i:02}": {"w": {"shape": [1024, 1000], "dtype": "f32"}} for i in range(8)}  # 33 MB


def written(backend: Backend) -> bytes:
    plan = commplan.loads(PLAN)
    program = plan.compile(shapes={"grads": SHAPES}, topology=TOPOLOGIES / "h100_65536.toml", backend=backend)
    return encode(program.schedule)


CODE = """
import hashlib, sys
sys.path[:0] = sys.argv[1:]
from test_deterministic import written
print(*(hashlib.sha256(written(backend)).hexdigest() for backend in ("jax", "mpi")))
"""


@pytest.fixture(scope="module")
def compiled_here() -> dict[str, bytes]:
    return {backend: written(backend) for backend in BACKENDS}


@pytest.mark.parametrize("seed", parameters(["4711"], ["0", "1"]))
def test_the_same_bytes_in_every_process(compiled_here: dict[str, bytes], seed: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, *map(str, Path(__file__).parents[:2])],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [hashlib.sha256(data).hexdigest() for data in compiled_here.values()]


@pytest.mark.parametrize("times", parameters([1], [100]))
def test_the_same_bytes_again_and_again(compiled_here: dict[str, bytes], times: int) -> None:
    assert {written("jax") for _ in range(times)} == {compiled_here["jax"]}


@pytest.mark.parametrize("backend", BACKENDS)
def test_65536_ranks_need_less_than_100_kb(compiled_here: dict[str, bytes], backend: str) -> None:
    assert len(compiled_here[backend]) < 100_000
