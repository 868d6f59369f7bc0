"""Errors and warnings of a process of a group about the other processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import msgspec

from commplan.diagnostics import CommplanError, Diagnostic, Note
from commplan.runtime.input.group import Blame, Group
from commplan.runtime.input.observe.wait_log import log_warning


@dataclass
class PeerErrors:
    """Errors and warnings of process `group.index` about its peers.

    Attributes:
        group: the group.
        blame: the line of the plan that shares.
        doing: returns a description of the user function that a process of the group executes, given its
            index; "" if unknown.
    """

    group: Group
    blame: Blame
    doing: Callable[[int], str] = lambda process: ""

    def lost(self, process: int, how: str) -> NoReturn:
        """Raise CP0920: `process` has ended.

        Args:
            process: the index of the process.
            how: a verb phrase that completes the message, such as "died".
        """
        self.fail("CP0920", f"process {process} of {self.group.count} {how}")

    def silent(self, process: int, seconds: float, state: str) -> NoReturn:
        """Raise CP0921: `process` does not respond.

        Args:
            process: the index of the process.
            seconds: the duration of the wait for it.
            state: the state of the process, as `recorder.processes.process_state` returns it.
        """
        name, doing = f"process {process} of {self.group.count}", self.doing(process)
        notes = [f"process {process} is {doing}"] if doing else []
        if state in ("alive", "dead"):  # the kernel may still be releasing the locks of a dead process
            self.fail("CP0921", f"{name} is alive, but was silent for {seconds:g} s", *notes)
        self.fail("CP0921", f"{name} is {state}, and was silent for {seconds:g} s", *notes)

    def warn(self, process: int, waited: float, task: str, pid: int) -> None:
        """Log a wait of this process for `process`.

        Args:
            process: the index of the process.
            waited: the duration of the wait in seconds.
            task: the pending task of `process`, such as "to take batch 3".
            pid: the PID of `process`.
        """
        from commplan.recorder.processes import process_state  # noqa: PLC0415  loaded if a wait lasts

        state = process_state(pid)
        doing = self.doing(process) if state == "alive" else state
        if state == "stopped":
            doing += f": kill -CONT {pid} lets it continue"
        log_warning(
            "process %d has waited %.0f s for process %d of %d %s; line %d waits%s", self.group.index,
            waited, process, self.group.count, task, self.blame.span.line,
            f"; process {process} (PID {pid}) is {doing}" if doing else "",
        )  # fmt: skip

    def raised(self, process: int, errors: Sequence[Diagnostic]) -> NoReturn:
        """Raise the errors of records that `process` reported."""
        remark = Note(f"raised in process {process} of {self.group.count}")
        raise CommplanError(
            *(msgspec.structs.replace(error, notes=(*error.notes, remark)) for error in errors)
        )

    def fail(self, code: str, message: str, *notes: str) -> NoReturn:
        """Raise a `CommplanError` about the line that shares; the last note names this process."""
        self.blame.fail(
            code,
            f"{message}; line {self.blame.span.line} waits for its part of each batch",
            *notes,
            f"this is process {self.group.index} of run {self.group.run_id!r}",
        )
