"""What is done last when the process ends: after all that was registered with `atexit` since commplan was
imported, which may still use its programs."""

from __future__ import annotations

import atexit
from collections.abc import Callable

_functions: list[Callable[[], object]] = []


def at_last(function: Callable[[], object]) -> None:
    """Call `function` then, also in a forked process."""
    _functions.append(function)


@atexit.register
def _end() -> None:
    for function in reversed(_functions):
        function()
