"""Measurements of the examples: input work by design, collectives, the share of communication."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

import commplan
from commplan.ir.schedule import Collective

PIPELINE = "share{{design={design}}},bucket,decompose,wire,overlap"


def inputs(
    plan: Path,
    mesh: Any,
    shapes: Mapping[str, Any],
    sources: Mapping[str, Any],
    functions: Mapping[str, Callable[..., Any]],
) -> dict[str, dict[str, float]]:
    """CPU milliseconds per record and member of both designs, on an otherwise idle machine.

    The plan is compiled twice: with shared input work, and with every member doing all of it. The batches of
    one epoch are made and dropped. The time is the user and system time of the threads that read, decode and
    augment, as counted by the runtime.
    """
    costs: dict[str, dict[str, float]] = {}
    for design, how in (("shared", "all_shared"), ("duplicated", "duplicate")):
        program = commplan.load(plan).compile(mesh, shapes=shapes, passes=PIPELINE.format(design=how))
        run = program.bind(mesh, sources=sources, functions=functions)
        steps = augmented = 0
        with run.batches() as batches:
            for item in batches:  # a whole epoch, so that the work ahead ends with it
                steps, augmented = steps + 1, augmented + item["batch"].shape[0] * item["batch"].shape[1]
            usage = batches.summary()
        decoded = sum(line.records for line in usage.lines if line.what == "map decode")
        costs[design] = {"cpu_ms": 1e3 * usage.cpu_s / augmented, "decoded_per_step": decoded / steps}
    return costs


def collectives(program: commplan.Program) -> list[dict[str, Any]]:
    """Every collective of the program: phase, line of the plan, kind, axes, bytes of one rank's operand."""
    return [
        {
            "phase": phase.name,
            "line": op.span.line,
            "kind": op.kind,
            "over": ", ".join(op.axes),
            "nbytes": op.nbytes,
        }
        for phase in program.schedule.phases
        for op in phase.ops
        if isinstance(op, Collective)
    ]


def communication(
    run: Any, step: Callable[..., Any], arguments: tuple[Any, ...], params: Any, *, rounds: int
) -> dict[str, float]:
    """The share of a step spent communicating, from two timings taken in turn.

    The plan's `step` phase is timed separately, on gradients of the size of `params`, with all replicas
    starting together. So time that a replica waits for a late one in the real step counts as computing.

    Args:
        run: the bound plan.
        step: the compiled training step.
        arguments: its arguments.
        params: the parameters.
        rounds: timings of each kind.

    Returns:
        Medians in milliseconds, and their ratio.
    """

    @jax.jit
    @run.spmd(params="params", returns=("params",))
    def reduce(state: Any, params: Any) -> Any:
        out, state = run.step(state, grads=run.varying(params))
        return state, out.grads

    state = arguments[0]
    for call, given in ((step, arguments), (reduce, (state, params))):
        _seconds(call, given)  # compiles
    steps: list[float] = []
    phases: list[float] = []
    for _ in range(rounds):
        steps.append(_seconds(step, arguments))
        phases.append(_seconds(reduce, (state, params)))
    step_s, phase_s = statistics.median(steps), statistics.median(phases)
    return {"step_ms": 1e3 * step_s, "phase_ms": 1e3 * phase_s, "share": phase_s / step_s, "rounds": rounds}


def _seconds(call: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(call(*arguments))
    return time.perf_counter() - begin
