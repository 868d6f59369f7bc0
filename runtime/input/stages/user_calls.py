"""Finds the call of user code in which a thread is, from its stack.

Calls are not recorded, because that would cost time for every record.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple, TypeVar, cast

from commplan.ir.schedule import Map, Read

_FRAMES = 6  # maximum number of frames in a message, the innermost ones
_callers: dict[CodeType, bool] = {}  # `with_one_record` of each method that `calls_user_code` has marked
_Method = TypeVar("_Method", bound=Callable[..., Any])


class Call(NamedTuple):
    """A call of user code that has not returned.

    Attributes:
        op: the stage.
        record: the index of the record; -1 for several records.
        worker: the PID of its worker process; 0 for this process.
        stack: the Python frames of the user code in one line, innermost first; empty if unknown.
    """

    op: Read | Map
    record: int
    worker: int = 0
    stack: str = ""


def calls_user_code(*, with_one_record: bool) -> Callable[[_Method], _Method]:
    """Mark a method of `Stage` that calls user code, for `call_in`.

    Args:
        with_one_record: whether it does so for one record, whose index is its variable `record`.
    """

    def mark(method: _Method) -> _Method:
        """Returns `method` itself: a wrapper would cost time for every record."""
        _callers[cast("FunctionType", method).__code__] = with_one_record
        return method

    return mark


def call_in(frame: FrameType | None) -> Call | None:
    """The call of user code in which a thread of this process is; None if there is none.

    Args:
        frame: the innermost frame of the thread; None if it has ended.
    """
    lines: list[str] = []
    while frame is not None:
        code = frame.f_code
        if code in _callers:
            # In Python 3.11 `f_locals` sets the closure variables of a frame that has just begun, which its
            # thread does too. Marked methods have none, and `self` and `record` are parameters.
            names = frame.f_locals
            record = names["record"] if _callers[code] else -1
            return Call(names["self"].op, record, 0, ", from ".join(lines[:_FRAMES]))
        lines.append(f"{code.co_filename}:{frame.f_lineno} in {code.co_name}")
        frame = frame.f_back
    return None
