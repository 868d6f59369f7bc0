"""`commplan calibrate PLAN --source NAME=PATH`: measure the input costs of a plan."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from commplan.cli.argument_types import once
from commplan.cli.binding import load_plan
from commplan.cli.console import RANKS, STDIN, Console
from commplan.cli.jax_side import differences, function_at, functions_of, need, sources_of, user_code
from commplan.cost.calibration import Calibration, load_calibration, only_input
from commplan.diagnostics import Diagnostic, Note, fail, fail_if
from commplan.input.measured_costs import InputCosts, merged
from commplan.ir.plan import Plan
from commplan.ir.types import sized, timed

SECONDS = 20  # approximate default duration of the measurement, in seconds
_DEVICE = "its cost is part of the step: use --consumer or --step-seconds"  # note for device functions


def measure(args: Namespace, console: Console) -> tuple[Calibration, list[str]] | None:
    """Measure input costs and merge them with the output file.

    Returns:
        The calibration and lines that describe it, or None on all ranks except one.

    Raises:
        CommplanError: CP0770 without plan or source, CP0751 if an existing file cannot be read, CP1108 to
            CP1110 for functions and sources, CP1111 without JAX, or as `runtime.calibrate.input`.
    """
    if any(os.environ.get(name, "0") != "0" for name in RANKS):
        return None  # only rank 0 measures
    if args.file is None or not args.source:
        message = "the input of a plan is measured with the plan and its sources"
        fail("CP0770", message, "commplan calibrate PLAN --source NAME=PATH --fn NAME=MODULE:FUNCTION -o OUT")
    exists = args.output != STDIN and Path(args.output).exists()
    # An unreadable file is an error (CP0751), since its links would be lost.
    old = load_calibration(args.output) if exists else None
    plan = load_plan(args.file, console)
    measured = _measure(plan, args, console)
    calibration = only_input(measured.date, measured)
    if old is not None:
        calibration = replace(old, input=merged(old.input, measured))
    return calibration, lines(measured)


@user_code()
def _measure(plan: Plan, args: Namespace, console: Console) -> InputCosts:
    """Measure the input costs of `plan` with the functions and sources of the flags."""
    need("jax", "'commplan[jax]'")
    from commplan.runtime.calibrate.input import PlanInput, calibrate_input, needed

    functions, sources = functions_of(args), sources_of(args)
    subject = PlanInput(plan, sources, functions, once(args.axis, "--axis"))
    consumer = function_at(f"--consumer {args.consumer}", args.consumer) if args.consumer else None
    _check(subject.plan, *needed(subject), sources, functions)
    seconds = args.seconds or SECONDS
    console.note(f"measuring {', '.join((*sources, *functions))}, about {seconds} seconds")
    return calibrate_input(subject, seconds=seconds, consumer=consumer, step_seconds=args.step_seconds)


def _check(
    plan: Plan, sources: list[str], fns: list[str], data: dict[str, Any], functions: dict[str, Any]
) -> None:
    """Raise CP1108 for all missing and unknown functions and sources, and device functions, together.

    Args:
        plan: the plan.
        sources: names of the sources to measure.
        fns: names of the functions to measure.
        data: the sources of --source, by name.
        functions: the functions of --fn, by name.
    """
    declared = [fn.name for fn in plan.fns]
    wrong = differences("function", "--fn {}=MODULE:FUNCTION", fns, declared, functions)
    wrong += differences("source", "--source {}=DIR", sources, [s.name for s in plan.sources], data)
    wrong += [
        Diagnostic("CP1108", f"`{fn.name}` is a function of the device", None, (Note(_DEVICE),))
        for fn in plan.fns
        if fn.name in functions and fn.where == "device"
    ]
    fail_if(wrong)


def lines(costs: InputCosts) -> list[str]:
    """Describe the measurements, one line each."""
    text = [
        f"source {source.name}: {timed(source.cpu)} of CPU and {timed(source.wait)} of waiting per "
        f"record, {sized(round(source.nbytes))}"
        for source in costs.source
    ]
    for fn in costs.fn:
        lock_share = "" if fn.held is None else f"; {fn.held:.0%} of it holds the interpreter's lock"
        text.append(
            f"function {fn.name}: {timed(fn.cpu)} of CPU per record, {sized(round(fn.nbytes_in))} in, "
            f"{sized(round(fn.nbytes_out))} out{lock_share}"
        )
    text += [
        f"step of {source.plan}, {source.phase}: {timed(source.seconds)}, {timed(source.cpu)} of CPU"
        for source in costs.consumer
    ]
    speed = f"copying {1e-9 / costs.copy:.3g} GB/s, " if costs.copy else ""
    text.append(
        f"{costs.cores} core{'s' if costs.cores > 1 else ''}, {speed}pipeline {timed(costs.record)} "
        f"a record and {timed(costs.batch)} a batch"
    )
    return text
