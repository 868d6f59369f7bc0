"""What is done last when the process ends: after all that was registered with `atexit` since commplan was
imported, which may still use its programs."""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Callable

_functions = contextlib.ExitStack()  # the last one first, and all of them, whichever raises
atexit.register(_functions.close)


def at_last(function: Callable[[], object]) -> None:
    """Call `function` then, also in a forked process."""
    _functions.callback(function)
