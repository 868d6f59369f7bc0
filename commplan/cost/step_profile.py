"""The computation of a training step, measured on a machine, in a file that later compilations read.

version = 1
date = "2026-11-26"
device = "NVIDIA H100 80GB HBM3"
seconds = 0.0231                      # until all gradients are made
after = 0.0                           # of what waits for the plan's results; 0 if that was not measured
method = "median of 9 runs .."        # how it was measured
[[leaf]]
input = "grads"                       # of the plan
path = "layer0/w"
seconds = 0.0121                      # until this gradient is made
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
    """The seconds after which one leaf of an input is made."""

    input: Printed
    path: Printed
    seconds: AtLeastZero


class StepProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A measured step; the file is described above. `date` is ISO 8601."""

    date: Printed
    device: Printed
    seconds: Positive
    after: AtLeastZero = 0.0
    method: Printed = ""
    leaves: tuple[GradientTime, ...] = msgspec.field(default=(), name="leaf")
    version: Literal[1] = VERSION

    @property
    def computation(self) -> StepComputation:
        """The step as `predict` and `compile` take it."""
        ready = tuple((leaf.input, leaf.path, leaf.seconds) for leaf in self.leaves)
        return StepComputation(self.seconds, ready, f"measured on {self.device}, {self.date}", self.after)


def load_step(path: str | Path) -> StepComputation:
    """The step of the profile at `path`. Raises CP0772 where it cannot be read or is malformed."""
    try:
        text = io.read(path).decode()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        fail("CP0772", f"step profile {path} cannot be read: {why}", file=str(path))
    return parse_step_profile(text, str(path)).computation


def parse_step_profile(text: str, file: str = "<step profile>") -> StepProfile:
    """The profile that `text` (TOML) holds. Raises CP0772, which names what is wrong."""
    again = "measure again with `commplan calibrate PLAN --step MODULE:FUNCTION`"
    try:
        content = io.decode_toml(text)
    except ValueError as error:
        fail("CP0772", f"the step profile is no TOML: {error}", again, file=file)
    if content.get("version") != VERSION:
        message = f"the step profile has version {content.get('version')!r}, expected {VERSION}"
        fail("CP0772", message, again, file=file)
    try:
        profile = msgspec.convert(content, StepProfile)
    except msgspec.ValidationError as error:
        fail("CP0772", f"the step profile is malformed: {error}", again, file=file)
    numbers = (profile.seconds, profile.after, *(leaf.seconds for leaf in profile.leaves))
    if not all(map(math.isfinite, numbers)):
        fail("CP0772", "the step profile holds a number that is not finite", again, file=file)
    late = next((leaf for leaf in profile.leaves if leaf.seconds > profile.seconds), None)
    if late is not None:
        message = (
            f"leaf `{late.path}` of `{late.input}` is made after {late.seconds} s, and the gradients after"
        )
        fail("CP0772", f"{message} {profile.seconds} s", again, file=file)
    return profile


def write_step_profile(profile: StepProfile) -> str:
    """The text of the file: `parse_step_profile` gives back an equal profile."""
    content: dict[str, Any] = msgspec.to_builtins(profile)
    leaves = content.pop("leaf")
    lines = toml_pairs({"version": content.pop("version"), **content})
    for leaf in leaves:
        lines += ["", "[[leaf]]", *toml_pairs(leaf)]
    return "\n".join(lines) + "\n"


def check_step(step: StepComputation, schedule: Schedule) -> None:
    """Raises CP0772 for a gradient of `step` that the plan of `schedule` does not take."""
    inputs = {name_of(value.id): [leaf.path for leaf in value.leaves] for value in schedule.entry}
    for name, path, _ in step.ready:
        if path in inputs.get(name, ()):
            continue
        near = did_you_mean(name, inputs, "it takes:")
        if name in inputs:
            near = did_you_mean(path, inputs[name], f"leaves of `{name}`:")
        leaf = f"`{name}`" + (f", leaf `{path}`" if path else "")
        message = f"the step makes {leaf}, which plan `{schedule.plan}` does not take"
        fail("CP0772", message, near, f"the computation is {step.source}", file=schedule.file)
