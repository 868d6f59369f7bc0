"""Lets Ctrl-C and other signals interrupt a main thread that waits in the engine."""

from __future__ import annotations

import atexit
import ctypes
from typing import Any

_PYTHON = ("PyGILState_Ensure", "PyGILState_Release", "PyErr_CheckSignals", "PyErr_Fetch",
           "PyErr_NormalizeException")  # fmt: skip
_INTERRUPTED = "commplan: interrupted"  # prefix of the engine's error
_libraries: list[Any] = []  # the engine, once `install` has been called


def install(library: Any) -> None:
    """Handle Python signals while the main thread waits in the engine."""
    if not _libraries:
        _libraries.append(library)
        functions = (getattr(ctypes.pythonapi, name) for name in _PYTHON)
        library.commplan_signals(*(ctypes.cast(function, ctypes.c_void_p) for function in functions))
        atexit.register(library.commplan_signals, *[None] * len(_PYTHON))


def interruption(error: BaseException) -> BaseException | None:
    """The exception that a signal handler raised, if it is the cause of the JAX exception `error`.

    Each exception is returned once.
    """
    if not _libraries or not isinstance(error, ValueError | RuntimeError) or _INTERRUPTED not in str(error):
        return None
    address = _libraries[0].commplan_interruption()
    cause = ctypes.cast(address, ctypes.py_object).value if address else KeyboardInterrupt()
    return cause.with_traceback(error.__traceback__)
