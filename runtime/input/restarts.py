"""Detect programs that begin the same epoch again instead of the next one."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Hashable
from dataclasses import dataclass, field

from commplan.diagnostics import Diagnostic, Note, Severity

_UNREPORTED = 2  # incomplete passes that are not reported: a first look at the data is not a mistake


@dataclass
class Restarts:
    """Counts iterators over batches that begin at the same position, by key. Methods are thread-safe."""

    _passes: dict[Hashable, list[Pass]] = field(default_factory=dict[Hashable, "list[Pass]"])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, subject: str, call: str, key: Hashable) -> Pass:
        """Register a new iterator.

        Args:
            subject: the batches, in words for the warning.
            call: the expression that makes the iterator, for the warning.
            key: equal for iterators that begin at the same position of the same batches.

        Returns:
            The iterator's pass, which is not counted before `Pass.use`.
        """
        return Pass(subject, call, key, self)

    def clear(self) -> None:
        """Forget earlier iterators, when another training begins."""
        with self._lock:
            self._passes.clear()

    def used(self, new: Pass) -> bool:
        """Count a pass.

        Returns:
            Whether to report it: True once per key, for the first pass after a complete one or after
            `_UNREPORTED` incomplete ones.
        """
        with self._lock:
            earlier = self._passes.setdefault(new.key, [])
            is_again = len(earlier) >= _UNREPORTED or any(old.is_over for old in earlier)
            is_reported = any(old.is_reported for old in earlier)
            new.is_reported = is_again or is_reported
            if not is_reported:  # later passes need not be counted
                earlier.append(new)
            return is_again and not is_reported


@dataclass(eq=False)
class Pass:
    """One iterator over batches.

    It counts when its second batch is requested or an epoch ends: a look at the first batch does not count.

    Attributes:
        subject: the batches, in words for the warning.
        call: the expression that makes the iterator, for the warning.
        key: equal for iterators that begin at the same position of the same batches.
        restarts: counts the passes.
        is_used: whether this pass has been counted.
        is_over: whether an epoch has ended.
        is_reported: whether this pass or an earlier one with the same key has been reported.
    """

    subject: str
    call: str
    key: Hashable
    restarts: Restarts
    is_used: bool = False
    is_over: bool = False
    is_reported: bool = False

    def use(self) -> None:
        """Count the iterator. Warns (CP0949) if an earlier one returned the same batches."""
        if self.is_used:
            return
        self.is_used = True
        if self.restarts.used(self):
            warnings.warn(self._text(), UserWarning, _caller())

    def end(self) -> None:
        """Count the iterator as a complete pass, at the end of an epoch. Warns as `use`."""
        self.use()
        self.is_over = True

    def _text(self) -> str:
        """The text of the warning."""
        loop = f"take them once, `batches = {self.call}`, and write `for item in batches:` for each epoch"
        intended = "if intended, pass the position: `state=first`, from `first = batches.state()` of new ones"
        message = f"{self.subject} begin at the same place again: the same order and the same random draws"
        notes = (Note(loop), Note(intended))
        return str(Diagnostic("CP0949", message, notes=notes, severity=Severity.WARNING))


def _caller() -> int:
    """The `stacklevel` of the user's line, for a call of `warnings.warn` in the caller of this function."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").startswith("commplan."):
        frame, level = frame.f_back, level + 1
    return level
