"""The training step of one of 32 GPUs, compiled and timed on one GPU: XLA alone, and with the plan.

JAX's `jax_mock_gpu_topology` makes a client for 4 hosts of 8 GPUs out of one GPU, with NCCL collectives that
do nothing. So XLA compiles for 32 with its autotuner, and the computation takes its real time. XLA may
require as many GPUs per process as exist: then each of the 32 has a separate process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import commplan
from bench.compiled import models
from bench.compiled.models import Transformer
from bench.compiled.ways import sgd
from bench.on_gpu import tax
from bench.on_gpu.findings import Findings, Result, print_result, result_of
from bench.on_gpu.scale import Scale, scale_of
from bench.on_gpu.timing import Seconds, in_turns, median, spread
from bench.on_gpu.unconnected import BUCKETS, PLAN, random_tree
from commplan.lowering.jax import _jit

GPUS = 32
# Environments of JAX, the best first. A topology is partitions x processes of each x GPUs of each process.
# XLA takes the GPUs of one partition to be joined by NVLink, so four hosts are four partitions.
MOCKS: Mapping[str, Mapping[str, str]] = {
    "4x1x8": {"JAX_MOCK_GPU_TOPOLOGY": "4x1x8"},
    "4x8x1": {"JAX_MOCK_GPU_TOPOLOGY": "4x8x1"},
    "32 processes": {"MOCK_NUM_GPU_PROCESSES": "32"},
}
OPTIONS = {"plan": "", "plan, 25 MiB": f"{{ {BUCKETS} }}"}
ROOT = Path(__file__).resolve().parents[2]
Tree = Any
Step = Callable[[Tree, Any], Tree]


def measure(scale: Scale, findings: Findings) -> None:
    """Seconds to compile, and milliseconds of a step, of XLA alone and of each plan."""
    if scale.small:
        devices = len(jax.devices())
        steps = programs(mesh_of(jax.devices()), model_of(scale))
        findings.add(f"not measured: this needs a GPU; {len(steps)} steps are built for {devices} device(s)")
        return
    refused: dict[str, str] = {}
    for name, environment in MOCKS.items():
        result = _apart(name, environment, scale, findings)
        if "failed" not in result:
            findings.add(*result.pop("lines"), topology=name, refused=refused, **result)
            return
        refused[name] = result["failed"]
        findings.add(f"{name}: {result['failed']}", refused=refused)
    raise RuntimeError("JAX makes no mocked client on this machine")


def mesh_of(devices: Any) -> Mesh:
    return Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))


def model_of(scale: Scale) -> Transformer:
    return Transformer(scale.pick(1, 12), scale.pick(128, 2048), scale.pick(1, 8), scale.pick(32, 1024))


def programs(mesh: Mesh, model: Transformer) -> dict[str, Step]:
    """Jitted steps of `params, tokens` with donated parameters: XLA alone, and each plan.

    Plans are compiled with their options by JAX itself: `run.jit` would compare programs with 31 processes
    that do not exist.
    """
    steps: dict[str, Step] = {tax.ALONE: tax.by_hand(mesh, model, tax.mean)}
    for name, options in OPTIONS.items():
        program = commplan.loads(PLAN.format(options=options)).compile(mesh, shapes={"grads": model.shapes()})
        steps[name] = planned(program, mesh, model)
    return steps


def planned(program: Any, mesh: Mesh, model: Transformer) -> Step:
    with patch.object(jax, "process_count", lambda: 1):  # there is no other process to compare programs with
        run = program.bind(mesh)

    @run.spmd(params="same", tokens="split data")
    def train(state: Tree, params: Tree, tokens: Any) -> Any:
        out, state = run.step(state, grads=tax.gradients(model, run.varying(params), tokens))
        return state, sgd(params, out.grads)

    def step(params: Tree, tokens: Any) -> Tree:
        return train({}, params, tokens)[1]

    platform = "cpu" if mesh.devices.flat[0].platform == "cpu" else "gpu"
    return _jit.jit(step, program.compiler_options(platform), donate_argnums=0)


def arguments(mesh: Mesh, model: Transformer) -> tuple[Tree, Any]:
    """Parameters, the same on all devices, and tokens, split over them; made on this process's devices."""
    same, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    rng = np.random.default_rng(0)

    def parameter(values: Any) -> Any:
        return jax.make_array_from_callback(values.shape, same, values.__getitem__)

    def some(_: Any) -> Any:
        return rng.integers(0, models.VOCABULARY, (model.rows, model.length)).astype(np.int32)

    tokens = jax.make_array_from_callback((mesh.size * model.rows, model.length), split, some)
    return jax.tree.map(parameter, random_tree(model.shapes())), tokens


def timed(mesh: Mesh, scale: Scale, findings: Findings) -> None:
    """Compile every step for `mesh` and time it."""
    model = model_of(scale)
    compile_s: dict[str, float] = {}
    calls: dict[str, Callable[[], Any]] = {}
    for name, step in programs(mesh, model).items():
        calls[name] = _repeating(step, *arguments(mesh, model))
        begun = time.perf_counter()
        jax.block_until_ready(calls[name]())
        compile_s[name] = time.perf_counter() - begun
        findings.add(f"{name}: compiled for {mesh.size} in {compile_s[name]:.1f} s", compile_s=compile_s)

    def progress(times: Seconds) -> None:
        findings.progress(_lines(times))

    times = in_turns(calls, scale.rounds, progress=progress)
    findings.add(*_lines(times), seconds=times)


def _repeating(step: Step, params: Tree, tokens: Any) -> Callable[[], Tree]:
    held = [params]

    def call() -> Tree:
        held[0] = step(held[0], tokens)
        return held[0]

    return call


def _lines(times: Seconds) -> list[str]:
    if not all(times.values()):
        return []
    base = median(times[tax.ALONE])
    return [
        f"{name:14} {spread(each)} without the network, {median(each) / base - 1:+.2%}"
        for name, each in times.items()
    ]


def _apart(name: str, environment: Mapping[str, str], scale: Scale, findings: Findings) -> Result:
    """The findings of a process with a mocked client; `failed` if it broke."""
    command = [sys.executable, "-m", "bench.on_gpu.mock", str(scale.rounds)]
    result: Result = {"lines": []}
    other: list[str] = []
    with subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **environment}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        for line in process.stdout or ():
            reported = result_of(line)
            if reported is None:
                other.append(line.strip())
            else:
                result = reported
                findings.progress(result["lines"], topology=name)
        code = process.wait()
    if code:
        return {**result, "failed": f"status {code}: {' | '.join(other[-4:])[-400:]}"}
    return result


def main() -> None:
    """Measure in this process, whose environment asks for a mocked client."""
    devices = jax.devices()
    if len(devices) != GPUS:
        raise SystemExit(f"JAX found {len(devices)} devices, not {GPUS}")
    findings = Findings(print_result)
    timed(mesh_of(devices), scale_of(int(sys.argv[1])), findings)


if __name__ == "__main__":
    main()
