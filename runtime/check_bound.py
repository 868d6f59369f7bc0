"""Whether the sources and functions that a program is bound with are those that its plan declares."""

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
    """Raises CP0803 for sources or functions that are no mappings, for a seed that is no whole number, and
    for a watchdog or a time-out without a positive number of seconds."""
    for name, given in (("sources", sources), ("functions", functions)):
        if given is not None and not isinstance(given, Mapping):
            message = f"{name} is of type {type(given).__name__}: a mapping by name was expected"
            fix = f"pass it: program.bind(mesh, {name}={{NAME: ...}})"
            fail("CP0803", message, fix, file=schedule.file)
    if isinstance(seed, bool) or not isinstance(seed, SupportsIndex):
        message = f"the seed is {seed!r}, of type {type(seed).__name__}: a whole number was expected"
        fail("CP0803", message, "such as program.bind(mesh, seed=0)", file=schedule.file)
    forever = "such as program.bind(comm, watchdog_s=60); None waits for ever"
    check_seconds("CP0803", "watchdog_s", watchdog_s, forever, file=schedule.file, also_allowed=(None,))
    check_seconds("CP0803", "busy_s", busy_s, "such as program.bind(comm, busy_s=600)", file=schedule.file)
    check_seconds("CP0803", "timeout", timeout, "such as program.bind(comm, timeout=600)", file=schedule.file)


def check_bound(schedule: ir.Schedule, sources: Mapping[str, Any], functions: Mapping[str, Any]) -> None:
    """Raises CP0803 with every name that is missing, unknown or not callable."""
    used = {op.fn for phase in schedule.phases for op in phase.ops if isinstance(op, ir.Map | ir.Exchange)}
    read = {op.source for phase in schedule.phases for op in phase.ops if isinstance(op, ir.Read)}
    wrong = _differences("function", {f.name for f in schedule.fns}, used, functions, schedule.file)
    wrong += _differences("source", {s.name for s in schedule.sources}, read, sources, schedule.file)
    wrong += _half_given(schedule, sources)
    wrong += [
        Diagnostic(
            "CP0803",
            f"function `{name}` is a {type(given).__name__}, which cannot be called",
            file=schedule.file,
        )
        for name, given in functions.items()
        if not callable(given)
    ]
    fail_if(wrong)


def _half_given(schedule: ir.Schedule, sources: Mapping[str, Any]) -> list[Diagnostic]:
    """Sources that are missing where a phase has others: its batches can never be made. A phase of
    which none is given is one that is run without its data."""
    wrong: dict[str, Diagnostic] = {}
    for phase in schedule.phases:
        reads = [op for op in phase.ops if isinstance(op, ir.Read)]
        given = [op.source for op in reads if op.source in sources]
        for op in reads if given else ():
            if op.source not in sources and op.source not in wrong:
                also = Note(f"phase `{phase.name}` reads `{given[0]}`, too, which is bound")
                fix = Note(f"pass it: program.bind(mesh, sources={{{op.source!r}: ...}})")
                message = f"source `{op.source}` is not bound"
                wrong[op.source] = Diagnostic("CP0803", message, op.span, (also, fix), file=schedule.file)
    return list(wrong.values())


def _differences(
    kind: str, declared: set[str], used: set[str], given: Mapping[str, Any], file: str
) -> list[Diagnostic]:
    known = Note(f"the plan declares: {', '.join(sorted(declared)) or 'none'}")
    wrong = [
        Diagnostic(
            "CP0803", f"the plan has no {kind} `{name}`", None,
            (*map(Note, near_note(name, declared)), known), file=file,
        )
        for name in sorted(given)
        if name not in declared
    ]  # fmt: skip
    if kind == "source":  # a run without data is fine until its batches are asked for
        return wrong
    note = Note(f"pass it: program.bind(mesh, {kind}s={{...}})")
    return wrong + [
        Diagnostic("CP0803", f"{kind} `{name}` is not bound", None, (note,), file=file)
        for name in sorted(used - set(given))
    ]
