"""Check the sources, functions and options that `Program.bind` gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, SupportsIndex

from commplan.diagnostics import Diagnostic, Note, fail, fail_if, near_note
from commplan.ir import schedule as ir
from commplan.wait import check_seconds


def check_kinds(
    schedule: ir.Schedule,
    sources: object,
    functions: object,
    seed: object,
    watchdog_s: object,
    busy_s: object,
    timeout: object,
) -> None:
    """Raise CP0803 for values of the wrong type.

    sources and functions must be mappings, the seed an integer, the watchdog and the timeout positive numbers
    of seconds.
    """
    for name, value in (("sources", sources), ("functions", functions)):
        if value is not None and not isinstance(value, Mapping):
            message = f"{name} is of type {type(value).__name__}: expected a mapping by name"
            fix = f"pass it: program.bind(mesh, {name}={{NAME: ...}})"
            fail("CP0803", message, fix, file=schedule.file)
    if isinstance(seed, bool) or not isinstance(seed, SupportsIndex):
        message = f"the seed is {seed!r}, of type {type(seed).__name__}: expected a whole number"
        fail("CP0803", message, "such as program.bind(mesh, seed=0)", file=schedule.file)
    forever = "such as program.bind(comm, watchdog_s=60); None waits forever"
    check_seconds("CP0803", "watchdog_s", watchdog_s, forever, file=schedule.file, also_allowed=(None,))
    check_seconds("CP0803", "busy_s", busy_s, "such as program.bind(comm, busy_s=600)", file=schedule.file)
    check_seconds("CP0803", "timeout", timeout, "such as program.bind(comm, timeout=600)", file=schedule.file)


def check_bound(schedule: ir.Schedule, sources: Mapping[str, Any], functions: Mapping[str, Any]) -> None:
    """Raise CP0803 with every name that is missing, unknown or not callable."""
    used = {op.fn for phase in schedule.phases for op in phase.ops if isinstance(op, ir.Map | ir.Exchange)}
    read = {op.source for phase in schedule.phases for op in phase.ops if isinstance(op, ir.Read)}
    wrong = _differences("function", {f.name for f in schedule.fns}, used, functions, schedule.file)
    wrong += _differences("source", {s.name for s in schedule.sources}, read, sources, schedule.file)
    wrong += _missing_sources(schedule, sources)
    wrong += [
        Diagnostic(
            "CP0803",
            f"function `{name}` is a {type(function).__name__}, which cannot be called",
            file=schedule.file,
        )
        for name, function in functions.items()
        if not callable(function)
    ]
    fail_if(wrong)


def _missing_sources(schedule: ir.Schedule, sources: Mapping[str, Any]) -> list[Diagnostic]:
    """Sources that are missing in a phase that has other sources: it can never make batches.

    A phase without any of its sources runs without data, which is no error.
    """
    wrong: dict[str, Diagnostic] = {}
    for phase in schedule.phases:
        reads = [op for op in phase.ops if isinstance(op, ir.Read)]
        bound = [op.source for op in reads if op.source in sources]
        for op in reads if bound else ():
            if op.source not in sources and op.source not in wrong:
                also = Note(f"phase `{phase.name}` also reads `{bound[0]}`, which is bound")
                fix = Note(f"pass it: program.bind(mesh, sources={{{op.source!r}: ...}})")
                message = f"source `{op.source}` is not bound"
                wrong[op.source] = Diagnostic("CP0803", message, op.span, (also, fix), file=schedule.file)
    return list(wrong.values())


def _differences(
    kind: str, declared: set[str], used: set[str], passed: Mapping[str, Any], file: str
) -> list[Diagnostic]:
    note = Note(f"the plan declares: {', '.join(sorted(declared)) or 'none'}")
    wrong = [
        Diagnostic(
            "CP0803", f"the plan has no {kind} `{name}`", None,
            (*map(Note, near_note(name, declared)), note), file=file,
        )
        for name in sorted(passed)
        if name not in declared
    ]  # fmt: skip
    if kind == "source":  # A run without data is an error only once its batches are requested.
        return wrong
    note = Note(f"pass it: program.bind(mesh, {kind}s={{...}})")
    return wrong + [
        Diagnostic("CP0803", f"{kind} `{name}` is not bound", None, (note,), file=file)
        for name in sorted(used - set(passed))
    ]
