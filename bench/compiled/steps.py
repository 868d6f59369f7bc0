"""Compiles steps ahead of time, and caches the compiled steps in a folder."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from bench.compiled import ways
from bench.compiled.models import MODELS
from bench.compiled.rows import Row, row
from commplan.lowering.audit import target
from commplan.lowering.gpu.targets import Target
from commplan.lowering.jax.aot import devices

MIB = 1 << 20
THRESHOLDS_MIB, LIMITS = (30, 64, 128, 256), (1, 2, 4)
LIMIT = "xla_gpu_experimental_parallel_collective_overlap_limit"
KINDS = ("all_reduce", "all_gather", "reduce_scatter")
COMBINE = tuple(f"xla_gpu_{kind}_combine_threshold_bytes" for kind in KINDS)
PLAN, LEVELS, ALONE = "plan", "plan in levels", "XLA alone"
PROFILED = "plan, profiled"  # run.jit(.., pgle=TARGET)
IN_LEVELS = "via hierarchical(gpu, node) { overlap = backward, bucket = 64 MiB }"


def options_of(threshold_nbytes: int, limit: int) -> dict[str, str]:
    """XLA's options for combining up to `threshold_nbytes` and `limit` collectives at a time."""
    return {LIMIT: str(limit)} | dict.fromkeys(COMBINE, str(threshold_nbytes))


def ways_of(name: str, machine: Target) -> Iterator[tuple[str, dict[str, str]]]:
    """Each way to compile the step of model `name`, with its XLA options.

    Experts are sharded along one axis, and so are not reduced in levels.
    """
    yield PLAN, {}
    yield PROFILED, {}
    if machine.hosts > 1 and not MODELS[name].own_shapes():
        yield LEVELS, {}
    yield ALONE, {}
    for threshold in THRESHOLDS_MIB:
        for limit in LIMITS:
            yield f"{ALONE}, {threshold} MiB, {limit} at a time", options_of(threshold * MIB, limit)


class Compiler:
    """Compiles steps.

    With a `folder`, compiled steps are stored there. A stored step is read instead of compiled again if its
    lowered text, its options and the version of JAX are the same; the name of its file contains a digest.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder

    def row(self, name: str, machine: Target, way: str, options: Mapping[str, str]) -> Row:
        text, memory = self._compile_or_read(name, machine, way, options)
        return row((name, str(machine), way), text, memory, machine.machine)

    def _compile_or_read(
        self, name: str, machine: Target, way: str, options: Mapping[str, str]
    ) -> tuple[str, int]:
        """The text of the compiled step, and its bytes of memory in addition to arguments and results."""
        lowered = _lowered(name, str(machine), way if way in (PLAN, LEVELS, PROFILED) else ALONE)
        if self.folder is None:
            return _compiled(lowered, options)
        key = json.dumps([lowered.as_text(), dict(options)])
        digest = hashlib.sha256(key.encode()).hexdigest()[:16]
        words = f"{name} {machine} {way} jax {jax.__version__} {digest}"
        file = self.folder / (re.sub(r"\W+", "-", words) + ".gz")
        if not file.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            new = file.with_suffix(".new")
            new.write_bytes(gzip.compress(json.dumps(_compiled(lowered, options)).encode()))
            new.rename(file)
        text, memory = json.loads(gzip.decompress(file.read_bytes()))
        return text, memory


def _compiled(lowered: Any, options: Mapping[str, str]) -> tuple[str, int]:
    executable = lowered.compile(**({"compiler_options": dict(options)} if options else {}))
    return executable.as_text(), executable.memory_analysis().temp_size_in_bytes


@lru_cache(maxsize=1)
def _lowered(name: str, target_name: str, way: str) -> Any:
    """The step of model `name` for the target `target_name`, lowered and not yet compiled."""
    machine, model = target(target_name), MODELS[name]
    sizes = {"node": machine.hosts, "gpu": machine.per_host}
    if way != LEVELS:
        sizes = {"data": machine.hosts * machine.per_host}
    device_array = np.array(devices(machine)).reshape(tuple(sizes.values()))
    mesh = Mesh(device_array, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    options: dict[str, Any] = {"options": IN_LEVELS} if way == LEVELS else {}
    options |= {"pgle": target_name} if way == PROFILED else {}
    step: Any = ways.alone(mesh, model) if way == ALONE else ways.planned(mesh, model, **options)
    return step.lower(*ways.arguments(mesh, model))
