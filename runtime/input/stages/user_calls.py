"""The call of user code that a thread is in, found in its stack."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple, TypeVar, cast

from commplan.ir.schedule import Map, Read

_FRAMES = 6  # the number of innermost frames shown of a stack
_callers: dict[CodeType, bool] = {}  # see `calls_user_code`
_Method = TypeVar("_Method", bound=Callable[..., Any])


class Call(NamedTuple):
    """A call of user code that has not returned.

    Attributes:
        op: the stage.
        record: the record; -1 for several.
        worker: the PID of its worker process; 0 for this process.
        stack: the Python frames, innermost first.
    """

    op: Read | Map
    record: int
    worker: int = 0
    stack: str = ""


def calls_user_code(*, with_one_record: bool) -> Callable[[_Method], _Method]:
    """Mark a method of a stage that calls user code.

    Args:
        with_one_record: whether it does so with one record, its variable `record`.
    """

    def mark(method: _Method) -> _Method:
        _callers[cast("FunctionType", method).__code__] = with_one_record
        return method

    return mark


def call_in(frame: FrameType | None) -> Call | None:
    """The call of user code that a thread of this process is in; None if there is none.

    Args:
        frame: The innermost frame of the thread.
    """
    lines: list[str] = []
    while frame is not None:
        code = frame.f_code
        if code in _callers:  # Python 3.11 may crash on `f_locals` of a frame that just began
            names = frame.f_locals
            record = names["record"] if _callers[code] else -1
            return Call(names["self"].op, record, 0, ", from ".join(lines[:_FRAMES]))
        lines.append(f"{code.co_filename}:{frame.f_lineno} in {code.co_name}")
        frame = frame.f_back
    return None
