"""Exchanges between the processes of `jax.distributed` through the coordinator, before steps run."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, TypeVar

import jax
import msgspec

from commplan.diagnostics import fail
from commplan.recorder.notice import Notice
from commplan.runtime.machines import coordinator
from commplan.runtime.machines.machine import digest
from commplan.wait import Wait, run_in_thread

T = TypeVar("T")
_READ_TIMEOUT_S = 10.0  # Seconds that the other processes get to read the answers.
_ARRIVED_S = 2.5  # Seconds for the coordinator to name the processes that have arrived.
# The numbers of exchanges so far, by the part of the key that contains the processes and the purpose.
_counts: collections.Counter[str] = collections.Counter()


def gathered(
    purpose: str, text: str, processes: tuple[int, ...], timeout_s: float, notice: Notice | None = None
) -> tuple[dict[int, str], str]:
    """Exchange a text between `processes`, which call this equally often for each `purpose`.

    Args:
        purpose: A name of the exchange, part of the key in the coordinator's store.
        text: The text of this process.
        processes: The numbers of all processes that take part, in an order that is the same everywhere.
        timeout_s: Seconds to wait for the others.
        notice: Printed once if others are late, by the first of the processes that have arrived. Every
            process prints it if the coordinator does not answer. None to print nothing.

    Returns:
        The texts of the processes that arrived, by process number, and the error of JAX or of the timeout, or
        "" if all arrived. After an error this may be the text of this process alone.
    """
    if len(processes) == 1:
        return {processes[0]: text}, ""
    counted = f"commplan/{digest(repr(processes)).hex()}/{purpose}"
    _counts[counted] += 1
    key = f"{counted}/{_counts[counted]}"
    me = int(jax.process_index())
    error, answers = "", {me: text}

    def late(waited: float) -> NoReturn:
        raise TimeoutError(f"the coordinator, process 0, has not answered for {waited:.0f} s")

    def missing() -> list[int]:
        """The processes that `notice` reports from here."""
        arrived = _answer(lambda: coordinator.texts(key), late, _ARRIVED_S)
        if not arrived:
            return [0]
        return [n for n in processes if n not in arrived] if me == min(arrived) else []

    def look(waited: float) -> None:
        if notice is not None:
            notice.poll(waited, missing)

    # `all_gather_text` raises after `timeout_s`, unless the coordinator hangs.
    wait = Wait(timeout_s + 2 * _READ_TIMEOUT_S, late, look)
    try:
        answers = run_in_thread(lambda: coordinator.all_gather_text(key, text, processes, timeout_s), wait)
    except (jax.errors.JaxRuntimeError, TimeoutError) as raised:
        error, answers = str(raised), _answer(lambda: coordinator.texts(key), late) or answers
    if error or len({*answers.values()}) > 1:
        # A process that ends now would end the service of JAX before the others have read the answers.
        _answer(lambda: coordinator.barrier(f"{key}/read", sorted(answers), _READ_TIMEOUT_S), late)
    return answers, error


class Absence(NamedTuple):
    """The parts of CP0849, the error of an exchange at which a process does not arrive.

    Attributes:
        action: The joint action, such as "bind `p`".
        fix: How to make all of them arrive.
        file: The file of the plan, or "".
    """

    action: str
    fix: str
    file: str = ""


def gathered_values(
    purpose: str,
    value: T,
    processes: tuple[int, ...],
    timeout_s: float,
    absence: Absence,
    notice: Notice | None = None,
) -> dict[int, T]:
    """Exchange values of one `msgspec` type between `processes`, as JSON.

    `gathered` documents the other arguments.

    Args:
        value: The value of this process. All processes pass values of the same type.
        absence: The parts of the error.

    Returns:
        The value of each process, by its number.

    Raises:
        CommplanError: CP0849 if not all processes arrive.
    """
    text = msgspec.json.encode(value).decode()
    answers, error = gathered(purpose, text, processes, timeout_s, notice)
    if error:
        fail(
            "CP0849",
            f"not all of processes {', '.join(map(str, processes))} {absence.action}: one did not arrive",
            f"this is process {jax.process_index()}: it waited up to {timeout_s:.0f} s",
            f"JAX says: {error}",
            absence.fix,
            file=absence.file,
        )
    return {number: msgspec.json.decode(answer, type=type(value)) for number, answer in answers.items()}


def _answer(
    call: Callable[[], Any], late: Callable[[float], NoReturn], seconds: float = 2 * _READ_TIMEOUT_S
) -> Any:
    """Call the coordinator in a thread; None if the call fails or has no answer after `seconds`.

    `late` raises a `TimeoutError`; see `Wait`.
    """
    with contextlib.suppress(jax.errors.JaxRuntimeError, TimeoutError):
        return run_in_thread(call, Wait(seconds, late))
    return None
