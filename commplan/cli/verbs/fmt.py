"""`commplan fmt`: format plans."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import NamedTuple

from commplan.cli.console import STDIN, Console, name_of
from commplan.cli.saved import plan_text
from commplan.cli.text_diff import unified
from commplan.diagnostics import CommplanError, Diagnostic
from commplan.dsl.format import format_source


class _Result(NamedTuple):
    path: str
    before: str
    after: str

    @property
    def changed(self) -> bool:
        return self.before != self.after


def run(args: Namespace, console: Console) -> int:
    """Format every file; returns 1 if one does not parse, or would change under --check or --diff."""
    results: list[_Result] = []
    diagnostics: list[Diagnostic] = []
    for path in args.files:
        try:
            before = plan_text(path, console)
            results.append(_Result(path, before, format_source(before, name_of(path))))
        except CommplanError as error:
            diagnostics += error.diagnostics
    is_dry_run = args.check or args.diff
    for result in results:
        if not is_dry_run:
            _write(result, console)
    if console.human:
        _print_results(results, diagnostics, args, console)
    else:
        _document(results, diagnostics, console)
    return int(bool(diagnostics) or (is_dry_run and any(result.changed for result in results)))


def _write(result: _Result, console: Console) -> None:
    if result.path == STDIN:
        if console.human:
            console.put(result.after)
    elif result.changed:
        console.write(result.path, result.after.encode())


def _print_results(
    results: list[_Result], diagnostics: list[Diagnostic], args: Namespace, console: Console
) -> None:
    is_dry_run = args.check or args.diff
    for result in results:
        if args.diff:
            name = name_of(result.path)
            console.put(unified(result.before, result.after, name, "formatted", console.color(sys.stdout)))
        if result.changed and result.path != STDIN:
            console.say(f"{'would reformat' if is_dry_run else 'reformatted'} {name_of(result.path)}")
    console.report(diagnostics)


def _document(results: list[_Result], diagnostics: list[Diagnostic], console: Console) -> None:
    files = [
        {"file": name_of(path), "changed": before != after, "text": after if path == STDIN else None}
        for path, before, after in results
    ]
    console.document(diagnostics, files=files)
