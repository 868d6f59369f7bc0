"""Shorten tracebacks of user errors, so that they end at the user's code.

This applies to `CommplanError` only, which describes mistakes of the user. Other exceptions are defects of
commplan or come from user functions, and keep their frames. With `COMMPLAN_TRACEBACK=1` all exceptions do.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from types import FunctionType, TracebackType
from typing import Any, TypeVar, cast

from commplan.diagnostics import CommplanError

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C")
# Folders of commplan and of the standard library, as in the file names of code objects.
_HERE = os.path.dirname(__file__) + os.sep  # noqa: PTH120
_STANDARD = os.path.dirname(os.__file__) + os.sep  # noqa: PTH120
# Special methods that users call.
_CALLED = ("__call__", "__getattr__", "__getitem__", "__init__", "__iter__", "__next__")


def ends_at_caller(function: F) -> F:
    """Wrap `function` so that tracebacks of `CommplanError` end at the caller's line."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except CommplanError as error:
            shorten(error)
            raise  # unlike `raise error`, adds no frame

    call.__dict__["ends_at_caller"] = True
    return cast("F", call)


def public_face(cls: type[C]) -> type[C]:
    """Wrap the public methods of `cls` with `ends_at_caller`, including inherited ones of commplan.

    Class methods, static methods and properties are not wrapped.
    """
    for name in dir(cls):
        method = inspect.getattr_static(cls, name)
        if not isinstance(method, FunctionType) or not method.__module__.startswith("commplan"):
            continue
        if (name in _CALLED or not name.startswith("_")) and "ends_at_caller" not in method.__dict__:
            setattr(cls, name, ends_at_caller(method))
    return cls


def shorten(error: CommplanError) -> None:
    """Remove frames of commplan, and innermost frames of JAX and the standard library.

    The context of the error is hidden as well, except for an explicit cause. With `COMMPLAN_TRACEBACK=1` this
    does nothing.
    """
    if os.environ.get("COMMPLAN_TRACEBACK"):
        return
    frames: list[TracebackType] = []
    entry = error.__traceback__
    while entry is not None:
        frames.append(entry)
        entry = entry.tb_next
    while frames and _is_internal(frames[-1]):
        frames.pop()
    shown: TracebackType | None = None
    for entry in reversed([entry for entry in frames if not _file(entry).startswith(_HERE)]):
        shown = TracebackType(shown, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    error.__traceback__ = shown
    error.__suppress_context__ = True


def from_users_code(error: CommplanError) -> TracebackType | None:
    """The traceback of an uncaught error, starting at the first line of the user's program.

    It is complete if it has no such line, or with `COMMPLAN_TRACEBACK=1`. None if no frame is left.
    """
    shorten(error)
    entry = error.__traceback__
    while entry is not None and not is_users(_file(entry)) and not os.environ.get("COMMPLAN_TRACEBACK"):
        entry = entry.tb_next
    return entry or error.__traceback__


def _file(entry: TracebackType) -> str:
    return entry.tb_frame.f_code.co_filename


def _is_internal(entry: TracebackType) -> bool:
    """Whether a frame belongs to commplan, JAX, the standard library or the import system."""
    file = _file(entry)
    if file.startswith((_HERE, "<frozen ")):
        return True
    if file.startswith(_STANDARD):
        return not _is_installed(file)
    jax = getattr(sys.modules.get("jax"), "__file__", None)
    return jax is not None and file.startswith(os.path.dirname(jax) + os.sep)  # noqa: PTH120


def is_users(file: str) -> bool:
    """Whether `file` belongs to the user's program: not to commplan, Python or an installed package."""
    return not file.startswith((_HERE, _STANDARD, "<frozen ")) and not _is_installed(file)


def _is_installed(file: str) -> bool:
    return "site-packages" in file or "dist-packages" in file
