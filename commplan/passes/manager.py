"""The pass manager: pipelines as text, the verifier after every pass, records of what happened.

A pipeline is written `share,bucket{max=25MiB},overlap`. Observers see every pass go by: see `Record`
and `dump_to`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from commplan.diagnostics import CommplanError, Diagnostic, Note, fail
from commplan.ir.schedule import Schedule
from commplan.ir.text import print_schedule
from commplan.passes.base import Context, Pass, parse_pass
from commplan.passes.registry import DEFAULT, PASSES
from commplan.passes.reproducers import write_reproducer
from commplan.verify.equivalence import Reference
from commplan.verify.schedule import verify


class Record(msgspec.Struct, frozen=True):
    """One pass that has run: its text, the schedule before (None for `lower`) and after, seconds."""

    name: str
    text: str
    seconds: float
    before: Schedule | None
    after: Schedule


Observer = Callable[[Record], None]


class Pipeline(msgspec.Struct, frozen=True):
    """Passes in the order in which they run."""

    passes: tuple[Pass, ...] = ()

    def __str__(self) -> str:
        return ",".join(map(str, self.passes))

    @classmethod
    def parse(cls, text: str | None, known: Mapping[str, type[Pass]] = PASSES) -> Pipeline:
        """The pipeline that `text` writes; None is the default, an empty text runs no pass.

        `lower` in front, as `Schedule.pipeline` has it, may stand: it has run before any pass.
        Raises CP0715, CP0716, CP0717 (also where a pass comes after one that it must precede).
        """
        parts = re.split(r",(?![^{}]*\})", DEFAULT if text is None else text)
        if parts[0].strip() == "lower":
            parts = parts[1:]
        passes = [parse_pass(part, known) for part in parts] if "".join(parts).strip() else []
        seen: list[str] = []
        for one in passes:
            late = next((name for name in seen if one.name in known[name].after), None)
            if late is not None:
                fail("CP0717", f"pass `{one.name}` cannot run after `{late}`", f"put `{one.name}` before it")
            seen.append(one.name)
        return cls(tuple(passes))

    def run(
        self,
        schedule: Schedule,
        context: Context | None = None,
        observer: Observer | None = None,
        reproducers: Path | None = None,
        reference: Reference | None = None,
    ) -> Schedule:
        """`schedule` after all passes, each result verified and compared with its plan (`reference`).

        Raises CP0718 where a pass breaks an invariant and CP0719 where one fails: both write the
        schedule before it and the rest of the pipeline to a file (in `reproducers`, else in a new
        temporary directory).
        """
        around = context or Context()
        sound: Schedule | None = None
        if reference is None and schedule.origin is not None:
            reference = Reference(schedule.origin, schedule.axes)
        for index, one in enumerate(self.passes):
            rest = Pipeline(self.passes[index:])
            start = time.perf_counter()
            after = _run(one, schedule, around, rest, reproducers)
            seconds = time.perf_counter() - start
            text = f"{schedule.pipeline},{one}" if schedule.pipeline else str(one)
            after = msgspec.structs.replace(after, pipeline=text)
            problems = verify(after, sound, reference)
            if problems:
                raise _broken(one, schedule, after, problems, rest, around, reproducers)
            sound = after
            if observer is not None:
                observer(Record(one.name, str(one), seconds, schedule, after))
            schedule = after
        return schedule


def _run(
    one: Pass, schedule: Schedule, context: Context, rest: Pipeline, reproducers: Path | None
) -> Schedule:
    try:
        return one.run(schedule, context)
    except CommplanError:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        path = write_reproducer(schedule, str(rest), context, said, reproducers)
        raise CommplanError(
            Diagnostic(
                "CP0719",
                f"pass `{one}` failed: {type(error).__name__}: {error}",
                None,
                (Note("this is a mistake of the pass, not of the plan"), Note(_how(path))),
                file=schedule.file,
            )
        ) from error


def _broken(
    one: Pass,
    before: Schedule,
    after: Schedule,
    problems: tuple[Diagnostic, ...],
    rest: Pipeline,
    context: Context,
    reproducers: Path | None,
) -> CommplanError:
    path = write_reproducer(before, str(rest), context, problems[0].message, reproducers)
    notes = (
        *(Note(f"{problem.code}: {problem.message}", problem.span) for problem in problems),
        Note("this is a mistake of the pass, not of the plan"),
        Note(_how(path)),
        Note(f"before `{one.name}`:\n{_shown(before)}"),
        Note(f"after `{one.name}`:\n{_shown(after)}"),
    )
    message = f"pass `{one}` broke the schedule: {problems[0].message}"
    return CommplanError(Diagnostic("CP0718", message, problems[0].span, notes, file=before.file))


def _shown(schedule: Schedule, most: int = 400) -> str:
    """The text form, cut where nobody would read on."""
    lines = print_schedule(schedule).splitlines()
    cut = [f"... and {len(lines) - most} lines more"] if len(lines) > most else []
    return "\n".join([*lines[:most], *cut])


def _how(path: Path) -> str:
    return f"the schedule before it is in {path}; run: python -m commplan.passes.reproduce {path}"


def dump_to(directory: Path) -> Observer:
    """An observer that writes the schedule after every pass to `directory`: `00-lower.txt`, ..."""
    directory.mkdir(parents=True, exist_ok=True)
    count = 0

    def dump(record: Record) -> None:
        nonlocal count
        path = directory / f"{count:02}-{record.name}.txt"
        path.write_text(print_schedule(record.after), encoding="utf-8")
        count += 1

    return dump


def both(*observers: Observer | None) -> Observer:
    """One observer that calls each of `observers` in turn."""

    def call(record: Record) -> None:
        for observer in filter(None, observers):
            observer(record)

    return call
