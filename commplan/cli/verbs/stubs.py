"""`commplan stubs`: write typed stubs of plans, for editors and type checkers."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from commplan.cli.binding import load_plan
from commplan.cli.console import STDIN, Console
from commplan.stubs import stubs


def run(args: Namespace, console: Console) -> int:
    """Write a `.pyi` file with a class for each plan, to standard output without `-o`."""
    plans = [load_plan(path, console) for path in args.files]
    output = args.output
    text = stubs(plans, Path(output).stem if output not in (None, STDIN) else "plans")
    if output in (None, STDIN):
        console.put(text)
    else:
        console.write(output, text.encode(errors="backslashreplace"))  # file names may not be valid text
        console.note(f"wrote {output}")
    if not console.is_human:
        console.document([], file=output)
    return 0
