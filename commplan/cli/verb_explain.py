"""`commplan explain`: what a plan became and why; or an error's page of the manual."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from commplan.cli.console import Console
from commplan.diagnostics import fail
from commplan.render.machine import page

if TYPE_CHECKING:
    from commplan.cost import Predictor
    from commplan.ir.schedule import Schedule


def run(arguments: Namespace, console: Console) -> int:
    """Explain a plan or a code. Raises CP1102 for a code without a page."""
    subject = arguments.what
    if re.fullmatch(r"CP\d{4}", subject, re.IGNORECASE) and not Path(subject).exists():
        return _code(subject.upper(), console)
    return _plan(arguments, console)


def _code(code: str, console: Console) -> int:
    text = page(code)
    if text is None:
        message = f"there is no error {code}"
        fail("CP1102", message, "codes are listed in the manual, and printed with every error")
    if console.human and console.color(sys.stdout):
        from rich.markdown import Markdown

        console.show(lambda screen: screen.print(Markdown(text)), 100)
    elif console.human:
        console.put(text)
    else:
        title = text.splitlines()[0].partition(": ")[2]
        console.document(code=code, title=title, text=text)
    return 0


def _plan(arguments: Namespace, console: Console) -> int:
    from commplan.cli.binding import compiled
    from commplan.explain.report import explain_plan

    done = compiled(arguments.what, arguments, console)
    explanation = explain_plan(done.plan, done.schedule, _predictor(arguments, done.schedule))
    if console.human:
        console.put(explanation.text())
    else:
        console.document(**msgspec.to_builtins(explanation), mapping=done.mapping)
    return 0


def _predictor(arguments: Namespace, schedule: Schedule) -> Predictor | None:
    """Of the topology that is given, with what was measured there."""
    if not arguments.topology:
        return None
    from commplan.cost import Predictor, load_calibration
    from commplan.topology import load_topology

    measured = load_calibration(arguments.calibration).links if arguments.calibration else None
    topology = load_topology(arguments.topology)
    return Predictor(topology, schedule.axes, calibration=measured, backend=schedule.backend)
