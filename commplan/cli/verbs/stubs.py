"""`commplan stubs`: typed faces of plans, for editors and type checkers."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from commplan.cli.binding import checked
from commplan.cli.console import STDIN, Console
from commplan.stubs import stubs


def run(args: Namespace, console: Console) -> int:
    """Write a `.pyi` with a face for each plan, to standard output without `-o`."""
    plans = [checked(path, console) for path in args.files]
    output = args.output
    text = stubs(plans, Path(output).stem if output not in (None, STDIN) else "plans")
    if output in (None, STDIN):
        console.put(text)
    else:
        console.write(output, text.encode(errors="backslashreplace"))  # of a file name that is no text
        console.note(f"wrote {output}")
    if not console.human:
        console.document([], file=output)
    return 0
