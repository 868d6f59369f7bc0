"""`commplan calibrate PLAN --step MODULE:FUNCTION`: measure a step and when its gradients are ready."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import msgspec

from commplan.cli.console import STDIN, Console
from commplan.cli.jax_side import device_mesh, user_code
from commplan.cli.user_step import mesh_sizes_of, naming_step, shares_of, step_at
from commplan.cost.schedule.step_profile import StepProfile, write_step_profile
from commplan.ir.types import timed

SECONDS = 10  # approximate default duration of the measurement, in seconds


def run(args: Namespace, console: Console) -> int:
    """Measure the step on one device, and write its profile.

    Raises:
        CommplanError: CP1107 for too few devices, CP1153, CP1154 and CP1157 for the step, or an error of the
            plan.
    """
    sizes = mesh_sizes_of(args.file, args, console)
    mesh = device_mesh(sizes, None)
    from commplan.runtime.calibrate.step import measure_step

    with user_code(), naming_step(args.step):
        step, arguments = step_at(args.step, mesh)
        times = shares_of(args.step, step, arguments)
        profile = measure_step(times, seconds=args.seconds or SECONDS)
    console.write(args.output, write_step_profile(profile).encode())
    if console.is_human and args.output != STDIN:
        for line in (f"wrote {args.output}", *_lines(profile)):
            console.note(line)
    elif not console.is_human:
        plain: dict[str, Any] = msgspec.to_builtins(profile)
        console.document(output=args.output, step=plain)
    return 0


def _lines(profile: StepProfile) -> list[str]:
    """Describe the profile: its computation, its first and last gradient, and the method."""
    first, last = profile.leaves[0], profile.leaves[-1]
    ends = f"`{first.path}` after {timed(first.seconds)}, .., `{last.path}` after {timed(last.seconds)}"
    return [
        f"computation of one rank on {profile.device}: {timed(profile.seconds)} until all gradients are made",
        f"{len(profile.leaves)} gradients: {ends}",
        profile.method,
    ]
