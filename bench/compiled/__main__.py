"""What a plan costs and hides in compiled steps for H100, beside what XLA makes of the same steps alone.

    JAX_PLATFORMS=cpu .venv-audit/bin/python -m bench.compiled [--models transformer] [--targets 1x8,4x8,16x8]
        [--ways plan] [--resume FILE]

Nothing runs, and no GPU is needed: steps are compiled ahead of time, in the environment that `make audit`
makes. XLA alone is also given the best of its own options, twelve combinations of a threshold for combining
and a limit of collectives at a time. Columns: collectives; instructions; megabytes that one rank gives;
memory that the step needs beside what it is given; milliseconds of the step, and those in which it waits for
communication, as `commplan.lowering.audit.estimate` guesses them for a target's rates; and those that no
order could hide, because a level of the network is busy for longer than the step computes.
FILE keeps a line of JSON for each step, and steps that it has are not compiled again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import AxisType, Mesh

from bench.compiled import ways
from bench.compiled.models import MODELS
from commplan.lowering.audit import CompiledStep, audit_text, estimate, target
from commplan.lowering.audit.targets import Target
from commplan.lowering.jax.aot import devices

MIB = 1 << 20
THRESHOLDS, LIMITS = (30, 64, 128, 256), (1, 2, 4)
LIMIT = "xla_gpu_experimental_parallel_collective_overlap_limit"
KINDS = ("all_reduce", "all_gather", "reduce_scatter")
COMBINE = tuple(f"xla_gpu_{kind}_combine_threshold_bytes" for kind in KINDS)
PLAN, ALONE = "plan", "XLA alone"


class Row(NamedTuple):
    """A step as it was compiled. Bytes and seconds."""

    model: str
    target: str
    way: str
    collectives: int
    instructions: int
    nbytes: int
    memory: int
    seconds: float
    exposed: float
    least: float


def options_of(threshold: int, limit: int) -> dict[str, str]:
    """XLA's options for combining up to `threshold` bytes and `limit` collectives at a time."""
    return {LIMIT: str(limit)} | dict.fromkeys(COMBINE, str(threshold))


def ways_of() -> Iterator[tuple[str, dict[str, str]]]:
    """Each way to compile a step, with XLA's options for it."""
    yield ALONE, {}
    for threshold in THRESHOLDS:
        for limit in LIMITS:
            yield f"{ALONE}, {threshold} MiB, {limit} at a time", options_of(threshold * MIB, limit)
    yield PLAN, {}


def compiled(step: Any, arguments: tuple[Any, ...], options: Mapping[str, str]) -> tuple[CompiledStep, int]:
    """The compiled step, and the bytes that it needs beside its arguments and results."""
    executable = step.lower(*arguments).compile(**({"compiler_options": dict(options)} if options else {}))
    return audit_text(executable.as_text()), executable.memory_analysis().temp_size_in_bytes


def row(name: str, machine: Target, way: str, options: Mapping[str, str]) -> Row:
    model, ranks = MODELS[name], machine.hosts * machine.per_host
    mesh = Mesh(np.array(devices(machine)).reshape(ranks), ("data",), axis_types=(AxisType.Auto,))
    make: Callable[..., Any] = ways.planned if way == PLAN else ways.alone
    step, memory = compiled(make(mesh, model), ways.arguments(mesh, model), options)
    guess = estimate(step, machine.machine)
    least = max(0.0, max(guess.busy.values(), default=0.0) - guess.computation)
    counts = (len(step.collectives), sum(n for _, n in step.ops), sum(c.nbytes for c in step.collectives))
    return Row(name, str(machine), way, *counts, memory, guess.total, guess.exposed, least)


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """What was asked for: of `options.resume` where it is there, and added to it where not."""
    file: Path | None = options.resume
    lines = file.read_text("utf-8").splitlines() if file and file.exists() else []
    known = {found[:3]: found for found in (Row(*json.loads(line)) for line in lines)}
    for machine in map(target, options.targets.split(",")):
        for name in options.models.split(";"):
            for way, flags in ways_of():
                if not way.startswith(tuple(options.ways.split(";"))):
                    continue
                found = known.get((name, str(machine), way)) or row(name, machine, way, flags)
                if file and found[:3] not in known:
                    with file.open("a", encoding="utf-8") as added:
                        added.write(json.dumps(found) + "\n")
                yield found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=";".join(MODELS), help="names, between semicolons")
    parser.add_argument("--targets", default="h100:1x8,h100:4x8,h100:16x8")
    parser.add_argument("--ways", default=";".join((ALONE, PLAN)), help="what names of ways begin with")
    parser.add_argument("--resume", type=Path, help="a file of rows: those in it are taken from it")
    options = parser.parse_args()
    head = ("collectives", "instructions", "MB", "memory MB", "step ms", "waiting ms", "at least")
    place = None
    for found in rows(options):
        if found[:2] != place:
            place = found[:2]
            print(f"\n{f'{found.model} on {found.target}':40}" + "".join(f"{word:>14}" for word in head))
        sizes = [f"{nbytes / 1e6:.0f}" for nbytes in (found.nbytes, found.memory)]
        times = [f"{seconds * 1e3:.2f}" for seconds in (found.seconds, found.exposed, found.least)]
        figures = (found.collectives, found.instructions, *sizes, *times)
        print(f"{found.way:40}" + "".join(f"{figure:>14}" for figure in figures), flush=True)


if __name__ == "__main__":
    main()
