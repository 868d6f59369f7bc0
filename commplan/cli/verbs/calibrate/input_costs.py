"""`commplan calibrate PLAN --source NAME=PATH --fn NAME=MODULE:FUNCTION`: what the input of a plan costs."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from commplan.cli.argument_types import once
from commplan.cli.binding import checked
from commplan.cli.console import RANKS, STDIN, Console
from commplan.cli.jax_side import differences, function_at, functions_of, need, sources_of, user_code
from commplan.cost.calibration import Calibration, load_calibration, only_input
from commplan.diagnostics import Diagnostic, Note, fail, fail_if
from commplan.input.measured_costs import InputCosts, merged
from commplan.ir.plan import Plan
from commplan.ir.types import sized, timed

SECONDS = 20  # about how long the input is measured


def measure(args: Namespace, console: Console) -> tuple[Calibration, list[str]] | None:
    """The input's costs, added to what the file has, and lines that say them; None on all ranks but one.

    Raises CP0770 for a call without plan or source, CP0751 for a file that is there and cannot be read,
    CP1108 to CP1110 for functions and sources, CP1111 without JAX, and what `runtime.calibrate.input` does.
    """
    if any(os.environ.get(name, "0") != "0" for name in RANKS):
        return None  # one measures for all
    if args.file is None or not args.source:
        message = "the input of a plan is measured with the plan and its sources"
        fail("CP0770", message, "commplan calibrate PLAN --source NAME=PATH --fn NAME=MODULE:FUNCTION -o OUT")
    exists = args.output != STDIN and Path(args.output).exists()
    # Its links stay: CP0751 rather than lose them.
    old = load_calibration(args.output) if exists else None
    plan = checked(args.file, console)
    measured = _measured(plan, args, console)
    calibration = only_input(measured.date, measured)
    if old is not None:
        calibration = replace(old, input=merged(old.input, measured))
    return calibration, lines(measured)


@user_code()
def _measured(plan: Plan, args: Namespace, console: Console) -> InputCosts:
    need("jax", "'commplan[jax]'")
    from commplan.runtime.calibrate.input import Given, calibrate_input, needed

    functions, sources = functions_of(args), sources_of(args)
    given = Given(plan, sources, functions, once(args.axis, "--axis"))
    consumer = function_at(f"--consumer {args.consumer}", args.consumer) if args.consumer else None
    _check(given.plan, *needed(given), sources, functions)
    seconds = args.seconds or SECONDS
    console.note(f"measuring {', '.join((*sources, *functions))}, about {seconds} seconds")
    return calibrate_input(given, seconds=seconds, consumer=consumer, step_seconds=args.step_seconds)


def _check(
    plan: Plan, sources: list[str], fns: list[str], given: dict[str, Any], functions: dict[str, Any]
) -> None:
    """Everything that is missing or unknown, at once (CP1108)."""
    declared = [fn.name for fn in plan.fns]
    wrong = differences("function", "--fn {}=MODULE:FUNCTION", fns, declared, functions)
    wrong += differences("source", "--source {}=DIR", sources, [s.name for s in plan.sources], given)
    wrong += [
        Diagnostic("CP1108", f"`{fn.name}` is a function of the device", None, (Note(_DEVICE),))
        for fn in plan.fns
        if fn.name in functions and fn.where == "device"
    ]
    fail_if(wrong)


_DEVICE = "what it costs is a part of the step: give --consumer or --step-seconds"


def lines(costs: InputCosts) -> list[str]:
    """What was measured, a line each."""
    text = [
        f"source {source.name}: {timed(source.cpu)} of CPU and {timed(source.wait)} of waiting per "
        f"record, {sized(round(source.nbytes))}"
        for source in costs.source
    ]
    for fn in costs.fn:
        held = "" if fn.held is None else f"; {fn.held:.0%} of it holds the interpreter's lock"
        text.append(
            f"function {fn.name}: {timed(fn.cpu)} of CPU per record, {sized(round(fn.nbytes_in))} in, "
            f"{sized(round(fn.nbytes_out))} out{held}"
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
