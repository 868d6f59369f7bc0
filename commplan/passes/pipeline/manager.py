"""The pass manager: parses and runs pipelines, verifies after every pass, and writes reproducers of failures.

A pipeline is written `share,bucket{max=25MiB},overlap`. Observers receive a record after every pass.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from commplan import io
from commplan.cost.calibration import Calibration
from commplan.cost.schedule.step import StepComputation
from commplan.diagnostics import CommplanError, Diagnostic, Note, fail
from commplan.ir.schedule import Schedule
from commplan.ir.serialization.canonical_json import encode
from commplan.ir.serialization.text import print_schedule
from commplan.passes.base import Pass, PassContext, StageChoice, StageKey, parse_pass
from commplan.passes.pipeline.registry import DEFAULT, PASSES
from commplan.passes.search.search import choose
from commplan.passes.wire import WirePass
from commplan.topology import Topology
from commplan.verify.equivalence import Reference
from commplan.verify.structural import verify

# Passes whose choices are searched jointly, before the first of them runs.
SEARCHED = ("bucket", "fuse_update", "decompose", "wire", "select")
_MOST = 400  # maximum number of lines of a schedule in an error


class PassRecord(msgspec.Struct, frozen=True):
    """A completed pass.

    Attributes:
        name: The name of the pass.
        text: The pass with its options, as in a pipeline.
        seconds: The time that it took, without verification.
        before: The schedule before the pass; None for `lower`, which makes the first one.
        after: The schedule after the pass.
    """

    name: str
    text: str
    seconds: float
    before: Schedule | None
    after: Schedule


Observer = Callable[[PassRecord], None]


class Reproducer(msgspec.Struct, frozen=True, tag="commplan-reproducer", tag_field="format"):
    """The content of a reproducer file: the state before a pass that failed.

    Attributes:
        run: The command line that repeats the failure.
        error: The error, as text.
        pipeline: The failed pass and those after it.
        order: As in `PassContext`, as are `topology`, `calibration`, `places` and `step`.
        choices: The choices of the search; None if it has not run.
        schedule: The schedule before the failed pass.
    """

    run: str
    error: str
    pipeline: str
    order: Mapping[str, tuple[str, ...]]
    topology: Topology | None
    calibration: Calibration | None
    places: tuple[int, ...] | None
    choices: tuple[tuple[StageKey, StageChoice], ...] | None
    step: StepComputation | None
    schedule: Schedule


class Pipeline(msgspec.Struct, frozen=True):
    """Passes in order. `str` returns the text form."""

    passes: tuple[Pass, ...] = ()

    def __str__(self) -> str:
        return ",".join(map(str, self.passes))

    @classmethod
    def parse(cls, text: str | None) -> Pipeline:
        """Parse the text form.

        Args:
            text: Passes separated by commas. None for the default pipeline; an empty text contains no pass. A
                leading `lower`, as in `Schedule.pipeline`, is ignored.

        Raises:
            CommplanError: CP0715, CP0716 or CP0717 as `parse_pass`, and CP0717 if a pass is listed after one
                that must not precede it.
        """
        parts = re.split(r",(?![^{}]*\})", DEFAULT if text is None else text)
        if parts[0].strip() == "lower":
            parts = parts[1:]
        passes = [parse_pass(part, PASSES) for part in parts] if "".join(parts).strip() else []
        earlier: list[str] = []
        for pass_ in passes:
            late = next((name for name in earlier if pass_.name in PASSES[name].after), None)
            if late is not None:
                message = f"pass `{pass_.name}` cannot run after `{late}`"
                fail("CP0717", message, f"put `{pass_.name}` before it")
            earlier.append(pass_.name)
        return cls(tuple(passes))

    @property
    def completed(self) -> Pipeline:
        """These passes with `wire` inserted if missing, since backends cannot execute the ops it lowers."""
        if any(isinstance(pass_, WirePass) for pass_ in self.passes):
            return self
        later = [index for index, pass_ in enumerate(self.passes) if WirePass.name in pass_.after]
        first_later = min(later, default=len(self.passes))
        return Pipeline((*self.passes[:first_later], WirePass(), *self.passes[first_later:]))

    def run(
        self,
        schedule: Schedule,
        context: PassContext | None = None,
        observer: Observer | None = None,
        reproducers: Path | None = None,
        reference: Reference | None = None,
    ) -> Schedule:
        """Run all passes, verifying each result and comparing it with the plan.

        Searches the choices of the passes in `SEARCHED` before the first of them, unless `context` has
        choices.

        Args:
            schedule: The schedule to rewrite.
            context: Information for the passes; None for none.
            observer: Receives a record after every pass; may be None.
            reproducers: The folder for reproducer files; None for the default of `write_reproducer`.
            reference: The meaning of the plan; None to compute it from the plan in `schedule`. Without a
                plan, results are verified but not compared.

        Returns:
            The schedule after the last pass. Its `pipeline` lists all passes.

        Raises:
            CommplanError: CP0718 if a pass breaks an invariant, CP0719 if it raises an exception other than
                `CommplanError`. For both codes, the schedule before the pass and the remaining pipeline are
                written to a file (see `write_reproducer`). Errors of a pass about the plan are passed on.
        """
        context = context or PassContext()
        sound: Schedule | None = None  # the last result, which was verified and need not be again
        if reference is None and schedule.origin is not None:
            reference = Reference(schedule.origin, schedule.axes)
        for index, pass_ in enumerate(self.passes):
            if context.choices is None and pass_.name in SEARCHED:
                chosen, remarks = choose(schedule, self.passes[index:], context)
                context = replace(context, choices=chosen)
                schedule = replace(schedule, choices=(*schedule.choices, *remarks))

            remaining = str(Pipeline(self.passes[index:]))
            save = partial(write_reproducer, schedule, remaining, context, directory=reproducers)
            start = time.perf_counter()
            try:
                after = pass_.run(schedule, context)
            except CommplanError:
                raise
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                message = f"pass `{pass_}` failed: {reason}"
                raise CommplanError(
                    Diagnostic("CP0719", message, None, _mistake(save(reason)), file=schedule.file)
                ) from error
            seconds = time.perf_counter() - start

            text = f"{schedule.pipeline},{pass_}" if schedule.pipeline else str(pass_)
            after = replace(after, pipeline=text)
            names = {part.partition("{")[0] for part in text.split(",")}
            problems = verify(after, sound, reference, written_out=WirePass.name in names)
            if problems:
                raise _broken(pass_, schedule, after, problems, save(problems[0].message))
            sound = after
            if observer is not None:
                observer(PassRecord(pass_.name, str(pass_), seconds, schedule, after))
            schedule = after
        return schedule


def _broken(
    pass_: Pass, before: Schedule, after: Schedule, problems: tuple[Diagnostic, ...], reproducer: Path
) -> CommplanError:
    """The error CP0718 for a result that violates invariants."""
    notes = (
        *(Note(f"{problem.code}: {problem.message}", problem.span) for problem in problems),
        *_mistake(reproducer),
        Note(f"before `{pass_.name}`:\n{_truncated_text(before)}"),
        Note(f"after `{pass_.name}`:\n{_truncated_text(after)}"),
    )
    message = f"pass `{pass_}` broke the schedule: {problems[0].message}"
    return CommplanError(Diagnostic("CP0718", message, problems[0].span, notes, file=before.file))


def _mistake(reproducer: Path) -> tuple[Note, Note]:
    """Notes of an error in a pass: how to repeat it."""
    run = f"python -m commplan.passes.pipeline.reproducer {reproducer}"
    instructions = f"the schedule before it is in {reproducer}; run: {run}"
    return Note("this is a bug in the pass, not an error in the plan"), Note(instructions)


def _truncated_text(schedule: Schedule) -> str:
    """The text form of a schedule, truncated to `_MOST` lines."""
    lines = print_schedule(schedule).splitlines()
    cut = [f"... and {len(lines) - _MOST} lines more"] if len(lines) > _MOST else []
    return "\n".join([*lines[:_MOST], *cut])


def dump_to(directory: Path) -> Observer:
    """Return an observer that writes the schedule after every pass to `directory`: `00-lower.txt`, ..."""
    directory.mkdir(parents=True, exist_ok=True)
    numbers = itertools.count()

    def dump(record: PassRecord) -> None:
        path = directory / f"{next(numbers):02}-{record.name}.txt"
        io.write(path, print_schedule(record.after).encode())

    return dump


def both(*observers: Observer | None) -> Observer:
    """Combine observers into one that calls each of them in order; None stands for no observer."""

    def call(record: PassRecord) -> None:
        for observer in filter(None, observers):
            observer(record)

    return call


def write_reproducer(
    schedule: Schedule, pipeline: str, context: PassContext, error: str, directory: Path | None = None
) -> Path:
    """Write a schedule, the remaining pipeline and the context to a file.

    The file name contains a digest of the schedule and the pipeline, so that different failures do not
    overwrite each other. `commplan.passes.pipeline.reproducer` reads the file.

    Args:
        schedule: The schedule before the pass that failed.
        pipeline: This pass and those after it, as text.
        context: The context of the passes.
        error: The error, as text.
        directory: The folder of the file, which is created if it does not exist; None for a folder of the
            user in the temporary directory.

    Returns:
        The path of the file.
    """
    folder = directory or _own_folder()
    first = re.match(r"[a-z_]+", pipeline)
    digest = hashlib.sha256(encode(schedule) + pipeline.encode()).hexdigest()[:8]
    name = f"{schedule.plan}-{first[0] if first else 'lower'}-{digest}.reproducer.json"
    path = folder / name
    order = {key: tuple(paths) for key, paths in context.order.items()}
    choices = tuple(context.choices.items()) if context.choices is not None else None
    content = Reproducer(
        f"python -m commplan.passes.pipeline.reproducer {name}", error, pipeline,
        order, context.topology, context.calibration, context.places, choices, context.step, schedule,
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    io.write(path, msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")
    return path


def _own_folder() -> Path:
    """The user's folder for reproducers, or a new one if the usual one cannot be created or opened safely."""
    folder = Path(tempfile.gettempdir()) / f"commplan-reproducers-{os.getuid()}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        os.close(io.open_folder(folder))
        return folder
    return Path(tempfile.mkdtemp(prefix="commplan-"))
