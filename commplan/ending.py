"""Functions that run at the very end of the process.

They run after all functions that were registered with `atexit` since commplan was imported, which may still
use its programs.
"""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Callable

_functions = contextlib.ExitStack()  # last registered first; an exception does not skip others
atexit.register(_functions.close)


def at_last(function: Callable[[], object]) -> None:
    """Call `function` at the end of the process, also in forked processes."""
    _functions.callback(function)
