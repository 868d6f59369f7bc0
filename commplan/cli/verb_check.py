"""`commplan check`: what is wrong with plans."""

from __future__ import annotations

from argparse import Namespace

from commplan import dsl
from commplan.cli.console import Console, name_of
from commplan.diagnostics import CommplanError, Diagnostic


def run(args: Namespace, console: Console) -> int:
    """Check every file; 1 if one has an error."""
    diagnostics: list[Diagnostic] = []
    for path in args.files:
        diagnostics += _check(path, console)
    console.report(diagnostics)
    if not diagnostics:
        count = len(args.files)
        console.note(f"{count} plan{'s' if count > 1 else ''}, no problems")
    return int(bool(diagnostics))


def _check(path: str, console: Console) -> tuple[Diagnostic, ...]:
    try:
        text = console.read(path)
    except CommplanError as error:
        return error.diagnostics
    return dsl.load(text, name_of(path))[1]
