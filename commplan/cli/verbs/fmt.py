"""`commplan fmt`: format plans."""

from __future__ import annotations

import difflib
import sys
from argparse import Namespace
from typing import NamedTuple

from commplan.cli.console import STDIN, Console, name_of
from commplan.cli.saved import plan_text
from commplan.diagnostics import CommplanError, Diagnostic
from commplan.dsl.format import format_source

_PAINTS = {"+": "\x1b[32m", "-": "\x1b[31m", "@": "\x1b[36m"}  # terminal colors of lines of a diff


class _Result(NamedTuple):
    """A file that parses, before and after formatting; `path` is `-` for stdin."""

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
    if console.is_human:
        _print_results(results, diagnostics, args, console)
    else:
        _document(results, diagnostics, console)
    return int(bool(diagnostics) or (is_dry_run and any(result.changed for result in results)))


def _write(result: _Result, console: Console) -> None:
    """Write the formatted text to its file if it changed, or to stdout if it came from stdin."""
    if result.path == STDIN:
        if console.is_human:
            console.put(result.after)
    elif result.changed:
        console.write(result.path, result.after.encode())


def _print_results(
    results: list[_Result], diagnostics: list[Diagnostic], args: Namespace, console: Console
) -> None:
    """Print the names of changed files, their differences under --diff, and the diagnostics."""
    is_dry_run = args.check or args.diff
    for result in results:
        if args.diff:
            name = name_of(result.path)
            console.put(
                unified_diff(result.before, result.after, name, "formatted", console.color(sys.stdout))
            )
        if result.changed and result.path != STDIN:
            console.say(f"{'would reformat' if is_dry_run else 'reformatted'} {name_of(result.path)}")
    console.report(diagnostics)


def _document(results: list[_Result], diagnostics: list[Diagnostic], console: Console) -> None:
    """Write the JSON document: the files, and the formatted text of stdin."""
    files = [
        {"file": name_of(path), "changed": before != after, "text": after if path == STDIN else None}
        for path, before, after in results
    ]
    console.document(diagnostics, files=files)


def unified_diff(before: str, after: str, name: str, change: str, color: bool) -> str:
    """The unified diff of two texts; empty if they are equal.

    Args:
        before: the old text.
        after: the new text.
        name: name of the file.
        change: label of the new text, such as `formatted`.
        color: whether to use terminal colors.
    """
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    text = ""
    for line in difflib.unified_diff(old, new, name, f"{name} ({change})"):
        ended = line if line.endswith("\n") else f"{line}\n\\ no newline at the end\n"
        paint = _PAINTS.get(line[0]) if color else None
        text += f"{paint}{ended[:-1]}\x1b[0m\n" if paint else ended
    return text
