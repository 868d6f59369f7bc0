"""`commplan trace`: what the ranks of a run recorded, as a trace that Perfetto opens."""

from __future__ import annotations

from argparse import Namespace

from commplan.cli.console import STDIN, Console
from commplan.cli.verb_blame import runs
from commplan.diagnostics import fail
from commplan.recorder import trace


def run(args: Namespace, console: Console) -> int:
    """Write the trace. Raises CP1114 for files that are no records, or are of several runs."""
    records, *others = runs(args.records)
    if others:
        named = ", ".join(each[0].path for each in (records, *others[:3]))
        fail(
            "CP1114", f"these are records of {1 + len(others)} runs: {named}", "name those of one: JOB.*.rec"
        )
    data = trace(records)
    console.write(args.output, data)
    events = sum(len(record.events) for record in records)
    if args.output != STDIN:
        console.note(
            f"wrote {args.output}: {len(records)} ranks, {events} events; open it at ui.perfetto.dev"
        )
        if not console.human:
            console.document(output=args.output, ranks=len(records), events=events)
    return 0
