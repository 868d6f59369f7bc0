"""How this product waits: in slices, so that Ctrl-C works, whoever is waited for is looked after, and no wait
goes past its bound without a word."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TypeVar

from commplan.diagnostics import fail

if TYPE_CHECKING:
    from concurrent.futures import Future

SLICE_S = 0.25
TIMEOUT_S = 600.0  # for a rank or process that has yet to come: it may be compiling, or reading an index
LONGEST_S = 1e7  # months; the engine counts nanoseconds
_Result = TypeVar("_Result")


class Wait(NamedTuple):
    """What a wait does while nothing comes.

    bound_s: seconds after which it ends. late: raises what is said then, given the seconds that were waited:
    what was waited for, the plan's line, and who did not come. look: called between slices with the seconds
    so far; what it raises ends the wait. slice_s: seconds between two looks.
    """

    bound_s: float
    late: Callable[[float], NoReturn]
    look: Callable[[float], object] = lambda waited: None
    slice_s: float = SLICE_S


def is_bound(seconds: object) -> bool:
    """Whether a wait may have this bound: a number of seconds above 0."""
    return isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 < seconds <= LONGEST_S


def check_seconds(
    code: str, name: str, seconds: object, *notes: str, file: str = "", others: tuple[object, ...] = ()
) -> None:
    """Raises `code` for what is neither a number of seconds that a wait may take nor one of `others`."""
    if not is_bound(seconds) and not (isinstance(seconds, int | float | None) and seconds in others):
        expected = " or ".join((f"seconds above 0, {LONGEST_S:.0f} at most", *map(str, others)))
        fail(code, f"{name} is {seconds!r}: expected {expected}", *notes, file=file)


def until(attempt: Callable[[float], _Result | None], wait: Wait) -> _Result:
    """The first result of `attempt` that is true. It is called with the seconds that it may wait for one, and
    again where it comes back sooner without."""
    begun, waited, next_look = time.monotonic(), 0.0, wait.slice_s
    while not (result := attempt(min(wait.slice_s, max(0.0, wait.bound_s - waited)))):
        waited = time.monotonic() - begun
        if waited >= min(next_look, wait.bound_s):  # some attempts come back sooner, and often
            wait.look(waited)
            next_look = waited + wait.slice_s
        if waited >= wait.bound_s:
            wait.late(waited)
    return result


def attended(
    attempt: Callable[[float], _Result | None],
    look: Callable[[float], object] = lambda waited: None,
    slice_s: float = SLICE_S,
) -> _Result:
    """`until` for what threads of this process do, which may take as long as their work: `look` ends the wait
    where they are no longer at it."""

    def late(waited: float) -> NoReturn:
        raise AssertionError(f"a wait without a bound ended after {waited} s")

    return until(attempt, Wait(math.inf, late, look, slice_s))


def ended(thread: threading.Thread, seconds: float) -> bool:
    """Whether `thread` has ended after so many seconds at most."""
    thread.join(seconds)
    return not thread.is_alive()


def joined(thread: threading.Thread, wait: Wait) -> None:
    """Until `thread` has ended."""
    until(lambda seconds: ended(thread, seconds), wait)


def outcome(future: Future[_Result]) -> _Result:
    """What a thread of this process comes to return, or raises."""
    from concurrent import futures  # noqa: PLC0415  there already, where there is a future

    attended(lambda seconds: future.done() or bool(futures.wait([future], seconds).done))
    return future.result(0)


def apart(call: Callable[[], _Result], wait: Wait) -> _Result:
    """`call()`, which waits for others without a bound of its own, in a thread that is left behind where
    they do not come. Raises what it raises."""
    results: list[_Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001  carried to the caller
            errors.append(error)

    thread = threading.Thread(target=run, name="commplan-wait", daemon=True)
    thread.start()
    joined(thread, wait)
    if errors:
        raise errors[0]
    return results[0]
