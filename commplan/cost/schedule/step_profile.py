"""The measured computation of a training step, in a TOML file that later compilations read.

`commplan calibrate PLAN --step` writes the file, which contains:

    version = 1
    date = "2026-11-26"
    device = "NVIDIA H100 80GB HBM3"
    seconds = 0.0231                  # until all gradients are available
    after = 0.0                       # of the computation that uses the plan's results; 0 if not measured
    method = "median of 9 runs .."    # a description of the measurement
    [[leaf]]
    input = "grads"                   # the name of an input of the plan
    path = "layer0/w"                 # of a leaf in the input; "" if the input is a single array
    seconds = 0.0121                  # until this gradient is available
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
    """An entry `[[leaf]]`: when one gradient is available.

    Attributes:
        input: The name of an input of the plan.
        path: The path of the leaf in the input; "" if the input is a single array.
        seconds: The seconds from the start of the step.
    """

    input: Printed
    path: Printed
    seconds: AtLeastZero


class StepProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a step profile.

    Attributes:
        date: The date of the measurement, ISO 8601.
        device: The kind of device.
        seconds: The seconds until all gradients are available.
        after: Seconds of the computation that uses the plan's results; 0 if not measured.
        method: A description of the measurement; "" if unknown.
        leaves: The gradients whose times were measured.
        version: The version of the file format.
    """

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
    """Load the step profile at `path` as an argument for `predict` and `compile`.

    Raises:
        CommplanError: CP0772 if the file cannot be read or is malformed.
    """
    try:
        text = io.read(path).decode()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        fail("CP0772", f"step profile {path} cannot be read: {reason}", file=str(path))
    return parse_step_profile(text, str(path)).computation


def parse_step_profile(text: str, file: str = "<step profile>") -> StepProfile:
    """Parse a step profile from TOML.

    Args:
        text: The content of the file.
        file: Its name, for errors.

    Raises:
        CommplanError: CP0772 if the text is not TOML, has another version or other fields, contains a number
            that is not finite, or a leaf that is available later than all gradients.
    """
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
    """Check that all gradients of `step` are inputs of the plan.

    Raises:
        CommplanError: CP0772 for the first leaf of `step.ready` that no input of `schedule` contains.
    """
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
