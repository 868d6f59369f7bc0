"""`commplan compile`: compile a plan to a schedule, a graph or a program."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import msgspec

from commplan.cli.binding import Compiled, compile_with_flags, load_plan
from commplan.cli.console import STDIN, Console
from commplan.diagnostics import fail
from commplan.passes.pipeline.manager import Observer, PassRecord, both, dump_to


def run(args: Namespace, console: Console) -> int:
    """Compile, and write the artifact selected by --emit to -o or stdout.

    Raises:
        CommplanError: an error of the plan or the flags, or CP1101 if a file cannot be written.
    """
    if args.emit in ("plan", "dot", "mermaid"):
        return _without_sizes(args, console)
    records: list[PassRecord] = []
    observer = both(records.append, _dump(args.dump_passes))
    result = compile_with_flags(args.file, args, console, observer)
    text = _artifact(result, args, console)
    _print_pass_notes(records, args, console)
    _deliver(text, args, console, **_facts(result, records))
    return 0


def _without_sizes(args: Namespace, console: Console) -> int:
    """Write an artifact of the plan graph, which requires neither sizes nor shapes."""
    plan = load_plan(args.file, console)
    match args.emit:
        case "dot":
            from commplan.explain.graph import dot

            text = dot(plan)
        case "mermaid":
            from commplan.explain.graph import mermaid

            text = mermaid(plan)
        case _:
            from commplan.ir.serialization.text import print_plan

            text = print_plan(plan)
    _deliver(text, args, console, plan=plan.name)
    return 0


def _artifact(result: Compiled, args: Namespace, console: Console) -> str:
    """The lowered phases, or the schedule: as JSON for programs and for JSON output, else as text."""
    if args.emit in ("jaxpr", "hlo"):
        from commplan.cli.jax_side import program_text

        return program_text(result, args, console)
    if not console.is_human or str(args.output or "").endswith(".json"):
        from commplan.ir.serialization.canonical_json import encode

        return encode(result.schedule).decode()
    from commplan.ir.serialization.text import print_saved

    return print_saved(result.schedule)


def _deliver(text: str, args: Namespace, console: Console, **facts: Any) -> None:
    """Write the artifact to -o or stdout. In JSON, the document has `facts`, and the artifact without -o."""
    out = args.output
    if out and out != STDIN:
        console.write(out, text.encode())
        console.note(f"wrote {out}")
    if console.is_human:
        if not out or out == STDIN:
            console.put(text if text.endswith("\n") else f"{text}\n")
        return
    inline: Any = None
    if not out or out == STDIN:
        inline = msgspec.Raw(text.encode()) if args.emit == "schedule" else text
    console.document(**facts, emit=args.emit, output=out if out != STDIN else None, artifact=inline)


def _facts(result: Compiled, records: list[PassRecord]) -> dict[str, Any]:
    """The fields of the JSON document that describe the compilation."""
    from commplan.ir.serialization.canonical_json import schedule_digest

    schedule = result.schedule
    return {
        "plan": schedule.plan,
        "digest": schedule_digest(schedule),
        "axes": {axis.name: axis.size for axis in schedule.axes},
        "mapping": result.mapping,
        "pipeline": schedule.pipeline,
        "passes": [{"name": r.name, "text": r.text, "seconds": r.seconds} for r in records],
    }


def _print_pass_notes(records: list[PassRecord], args: Namespace, console: Console) -> None:
    """Print the times of passes and the location of their dumps."""
    if args.time_passes:
        width = max(len(record.name) for record in records)
        for record in records:
            console.note(f"{record.name:<{width}}  {record.seconds * 1e3:9.3f} ms")
    if args.dump_passes:
        console.note(f"{len(records)} schedules are in {args.dump_passes}")


def _dump(directory: str | None) -> Observer | None:
    """An observer that writes schedules to `directory`; None without one. Raises CP1101."""
    if directory is None:
        return None
    try:
        return dump_to(Path(directory))
    except (OSError, ValueError) as error:
        message = f"cannot write to {directory}: {getattr(error, 'strerror', None) or error}"
        fail("CP1101", message, file=directory)
