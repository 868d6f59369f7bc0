"""What the processes of `jax.distributed` say to each other through its coordinator, before steps run."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from commplan.diagnostics import fail
from commplan.lowering.jax.typing_shim import jax
from commplan.runtime.machines import coordinator
from commplan.runtime.machines.machine import digest
from commplan.wait import Wait, apart

NOTICE_S = 10.0  # until it is said who is awaited, where no watchdog says otherwise
_READ_TIMEOUT_S = 10.0  # for a process that has still to read what all said
_counts: collections.Counter[str] = collections.Counter()  # of gatherings, by their processes and purpose


@dataclasses.dataclass
class Notice:
    """What is printed of processes that are late, once, `after_s` seconds after the wait began."""

    after_s: float
    what_for: str
    is_due: bool = True

    def since(self, waited: float) -> bool:
        due, self.is_due = self.is_due and waited > self.after_s, self.is_due and waited <= self.after_s
        return due

    def say(self, missing: Sequence[int], waited: float) -> None:
        which = f"process{'es' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        text = f"commplan: {which} {'have' if len(missing) > 1 else 'has'} not come for {waited:.0f} s"
        print(f"{text}, and {self.what_for}", file=sys.stderr, flush=True)


def gathered(
    purpose: str, text: str, processes: tuple[int, ...], timeout_s: float, notice: Notice | None = None
) -> tuple[dict[int, str], str]:
    """The text of each of `processes`; where not all come, of those that did, and what JAX says of that. All
    of them call this equally often for each `purpose`."""
    if len(processes) == 1:
        return {processes[0]: text}, ""
    key = f"commplan/{digest(repr(processes)).hex()}/{purpose}"
    _counts[key] += 1
    key = f"{key}/{_counts[key]}"
    error, answers = "", {int(jax.process_index()): text}

    def late(waited: float) -> NoReturn:
        raise TimeoutError(f"the coordinator, process 0, does not answer for {waited:.0f} s")

    def look(waited: float) -> None:
        if notice is not None and notice.since(waited):
            came = _answer(lambda: coordinator.texts(key), late, NOTICE_S / 4)
            missing = [number for number in processes if number not in came] if came else [0]
            notice.say(missing, waited)

    wait = Wait(timeout_s + 2 * _READ_TIMEOUT_S, late, look)
    try:
        answers = apart(lambda: coordinator.all_gather_text(key, text, processes, timeout_s), wait)
    except (jax.errors.JaxRuntimeError, TimeoutError) as raised:
        error, answers = str(raised), _answer(lambda: coordinator.texts(key), late) or answers
    if error or len({*answers.values()}) > 1:
        # The first to end takes all this with it.
        _answer(lambda: coordinator.barrier(f"{key}/read", sorted(answers), _READ_TIMEOUT_S), late)
    return answers, error


def refuse_absence(
    processes: Sequence[int], purpose: str, timeout_s: float, error: str, fix: str, file: str
) -> NoReturn:
    """Raises CP0849. error: what JAX says."""
    fail(
        "CP0849",
        f"not all of processes {', '.join(map(str, processes))} {purpose}: one did not come",
        f"this is process {jax.process_index()}, which waited up to {timeout_s:.0f} s",
        f"JAX says: {error}",
        fix,
        file=file,
    )


def _answer(
    call: Callable[[], Any], late: Callable[[float], NoReturn], seconds: float = 2 * _READ_TIMEOUT_S
) -> Any:
    """What the coordinator answers, in time; else None."""
    with contextlib.suppress(jax.errors.JaxRuntimeError, TimeoutError):
        return apart(call, Wait(seconds, late))
    return None
