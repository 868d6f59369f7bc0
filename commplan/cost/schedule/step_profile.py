"""The measured computation of a training step, in a file that later compilations read.
version = 1
date = "2026-11-26"
device = "NVIDIA H100 80GB HBM3"
seconds = 0.0231                      # until all gradients are available
after = 0.0                           # of the computation that uses the plan's results; 0 if not measured
method = "median of 9 runs .."        # of measurement
[[leaf]]
input = "grads"                       # of the plan
path = "layer0/w"
seconds = 0.0121                      # until this gradient is available
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import msgspec

from commplan import io
from commplan.cost.calibration import AtLeastZero, Positive, toml_pairs
from commplan.cost.schedule.step import StepComputation
from commplan.diagnostics import did_you_mean, fail
from commplan.ir.plan import name_of
from commplan.ir.schedule import Schedule
from commplan.ir.types import Printed

VERSION = 1


class GradientTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The seconds until one leaf of an input is available."""

    input: Printed
    path: Printed
    seconds: AtLeastZero


class StepProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A measured step. The file format is described above. `date` is ISO 8601."""

    date: Printed
    device: Printed
    seconds: Positive
    after: AtLeastZero = 0.0
    method: Printed = ""
    leaves: tuple[GradientTime, ...] = msgspec.field(default=(), name="leaf")
    version: Literal[1] = VERSION

    @property
    def computation(self) -> StepComputation:
        """The step as an argument for `predict` and `compile`."""
        ready = tuple((leaf.input, leaf.path, leaf.seconds) for leaf in self.leaves)
        return StepComputation(self.seconds, ready, f"measured on {self.device}, {self.date}", self.after)


def load_step(path: str | Path) -> StepComputation:
    """Load the step profile at `path`. Raises CP0772 if it cannot be read or is malformed."""
    try:
        text = io.read(path).decode()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        fail("CP0772", f"step profile {path} cannot be read: {reason}", file=str(path))
    return parse_step_profile(text, str(path)).computation


def parse_step_profile(text: str, file: str = "<step profile>") -> StepProfile:
    """Parse a step profile from TOML. Raises CP0772 if it is malformed."""
    fix = "measure again with `commplan calibrate PLAN --step MODULE:FUNCTION`"
    try:
        content = io.decode_toml(text)
    except ValueError as error:
        fail("CP0772", f"the step profile is not TOML: {error}", fix, file=file)
    if content.get("version") != VERSION:
        message = f"the step profile has version {content.get('version')!r}, expected {VERSION}"
        fail("CP0772", message, fix, file=file)
    try:
        profile = msgspec.convert(content, StepProfile)
    except msgspec.ValidationError as error:
        fail("CP0772", f"the step profile is malformed: {error}", fix, file=file)
    numbers = (profile.seconds, profile.after, *(leaf.seconds for leaf in profile.leaves))
    if not all(map(math.isfinite, numbers)):
        fail("CP0772", "the step profile contains a number that is not finite", fix, file=file)
    late = next((leaf for leaf in profile.leaves if leaf.seconds > profile.seconds), None)
    if late is not None:
        message = f"leaf `{late.path}` of `{late.input}` is available after {late.seconds} s"
        fail("CP0772", f"{message}, later than all gradients ({profile.seconds} s)", fix, file=file)
    return profile


def write_step_profile(profile: StepProfile) -> str:
    """The text of the file. `parse_step_profile` restores an equal profile."""
    content: dict[str, Any] = msgspec.to_builtins(profile)
    leaves = content.pop("leaf")
    lines = toml_pairs({"version": content.pop("version"), **content})
    for leaf in leaves:
        lines += ["", "[[leaf]]", *toml_pairs(leaf)]
    return "\n".join(lines) + "\n"


def check_step(step: StepComputation, schedule: Schedule) -> None:
    """Raise CP0772 if `step` has a gradient that is not an input of the plan of `schedule`."""
    inputs = {name_of(value.id): [leaf.path for leaf in value.leaves] for value in schedule.entry}
    for name, path, _ in step.ready:
        if path in inputs.get(name, ()):
            continue
        hint = did_you_mean(name, inputs, "its inputs are:")
        if name in inputs:
            hint = did_you_mean(path, inputs[name], f"leaves of `{name}`:")
        leaf = f"`{name}`" + (f", leaf `{path}`" if path else "")
        message = f"the step has a gradient {leaf}, which is not an input of plan `{schedule.plan}`"
        fail("CP0772", message, hint, f"the computation is {step.source}", file=schedule.file)
