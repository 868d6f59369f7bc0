"""Waits in slices, so that SIGINT is handled, peers are monitored, and every wait has a timeout."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TypeVar

from commplan.diagnostics import fail

if TYPE_CHECKING:
    from concurrent.futures import Future

SLICE_S = 0.25  # default seconds between two checks of a wait
TIMEOUT_S = 600.0  # default seconds for a rank or process to join, which may compile or read an index
LONGEST_S = 1e7  # the longest timeout in seconds, several months; the engine counts nanoseconds
_Result = TypeVar("_Result")


class Wait(NamedTuple):
    """The behavior of a wait while there is no result.

    Attributes:
        timeout_s: timeout in seconds.
        on_timeout: raises the timeout error, given the seconds waited. It names the missing result, the plan
            line and the missing ranks.
        check: called between slices with the seconds waited so far; an exception ends the wait.
        slice_s: seconds between two calls of `check`.
    """

    timeout_s: float
    on_timeout: Callable[[float], NoReturn]
    check: Callable[[float], object] = lambda waited: None
    slice_s: float = SLICE_S


def is_timeout(seconds: object) -> bool:
    """Whether `seconds` is a valid timeout: an int or float above 0 and at most `LONGEST_S`."""
    return isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 < seconds <= LONGEST_S


def check_seconds(
    code: str, name: str, seconds: object, *notes: str, file: str = "", also_allowed: tuple[object, ...] = ()
) -> None:
    """Raise a `CommplanError` if `seconds` is neither a valid timeout nor one of `also_allowed`.

    Args:
        code: the code of the error.
        name: the name of the option.
        seconds: its value.
        notes: notes of the error, such as an example.
        file: the plan's file; empty if there is none.
        also_allowed: further valid values, such as 0 or None.
    """
    if not is_timeout(seconds) and not (isinstance(seconds, int | float | None) and seconds in also_allowed):
        expected = " or ".join((f"seconds above 0, {LONGEST_S:.0f} at most", *map(str, also_allowed)))
        fail(code, f"{name} is {seconds!r}: expected {expected}", *notes, file=file)


def until(attempt: Callable[[float], _Result | None], wait: Wait) -> _Result:
    """Return the first true result of `attempt`.

    `attempt` receives the seconds that it may wait, and is called again if its result is false. It is called
    at least once. On a timeout, `wait.on_timeout` raises.
    """
    begun = time.monotonic()
    waited, next_check = 0.0, wait.slice_s
    while not (result := attempt(min(wait.slice_s, max(0.0, wait.timeout_s - waited)))):
        waited = time.monotonic() - begun
        if waited >= min(next_check, wait.timeout_s):  # attempts may return early
            wait.check(waited)
            next_check = waited + wait.slice_s
        if waited >= wait.timeout_s:
            wait.on_timeout(waited)
    return result


def until_done(
    attempt: Callable[[float], _Result | None],
    check: Callable[[float], object] = lambda waited: None,
    slice_s: float = SLICE_S,
) -> _Result:
    """Return the first true result of `attempt`, without a timeout.

    For results of other threads of this process. `check` raises if these threads have stopped.
    """

    def on_timeout(waited: float) -> NoReturn:
        raise AssertionError(f"a wait without a timeout ended after {waited} s")

    return until(attempt, Wait(math.inf, on_timeout, check, slice_s))


def join_within(thread: threading.Thread, seconds: float) -> bool:
    """Wait up to `seconds` for the end of `thread`; returns whether it has ended."""
    thread.join(seconds)
    return not thread.is_alive()


def join(thread: threading.Thread, wait: Wait) -> None:
    """Wait until `thread` has ended. On a timeout, `wait.on_timeout` raises."""
    until(lambda seconds: join_within(thread, seconds), wait)


def result_of(future: Future[_Result], check: Callable[[float], object] = lambda waited: None) -> _Result:
    """Wait for the result of a thread of this process; raises its exception. `check` as in `until_done`."""
    from concurrent import futures  # noqa: PLC0415  already imported if there is a future

    until_done(lambda seconds: future.done() or bool(futures.wait([future], seconds).done), check)
    return future.result(0)


def run_in_thread(call: Callable[[], _Result], wait: Wait) -> _Result:
    """Run `call()`, which may block without a timeout, in a thread that is abandoned on a timeout.

    Returns:
        The result of `call`.

    Raises:
        BaseException: any exception of `call`, `wait.check` or `wait.on_timeout`.
    """
    results: list[_Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001  carried to the caller
            errors.append(error)

    thread = threading.Thread(target=run, name="commplan-wait", daemon=True)
    thread.start()
    join(thread, wait)
    if errors:
        raise errors[0]
    return results[0]
