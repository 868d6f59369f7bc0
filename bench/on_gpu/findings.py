"""The findings of a part, and their way to the process that started it."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from typing import Any

RESULT = "result: "
INTERIM = "interim"
Result = dict[str, Any]


class Findings:
    """The lines and figures of a part so far. Every `add` reports all of them, so that a killed part leaves
    its findings.

    Args:
        report: called with `{"lines": [..], figure: value, ..}`.
    """

    def __init__(self, report: Callable[[Result], None]) -> None:
        self.lines: list[str] = []
        self.figures: Result = {}
        self._report = report

    @property
    def result(self) -> Result:
        return {"lines": list(self.lines), **self.figures}

    def add(self, *lines: str, **figures: Any) -> None:
        """Append `lines`, set `figures`, and report."""
        self.lines += lines
        self.figures |= figures
        self._report(self.result)

    def progress(self, lines: list[str], **figures: Any) -> None:
        """Report `lines` and `figures` that the measurement under way will replace, with `interim` set."""
        self._report({"lines": [*self.lines, *lines], **self.figures, **figures, INTERIM: True})


def print_result(result: Result) -> None:
    """Write `result` to the process that started this one."""
    print(RESULT + json.dumps(result), flush=True)


def result_of(line: str) -> Result | None:
    """The result in a line of a part's output; None if the line is not a result."""
    return json.loads(line.removeprefix(RESULT)) if line.startswith(RESULT) else None


def missing(*modules: str) -> list[str]:
    """Those of `modules` that are not installed."""
    return [name for name in modules if importlib.util.find_spec(name) is None]
