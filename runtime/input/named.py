"""Batches for the caller: arrays by their names in the plan, and the error for a mask that does not exist."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

from commplan.diagnostics import CommplanError, Diagnostic, Note, did_you_mean, fail

_Array = TypeVar("_Array")


class UnknownValueError(CommplanError, KeyError):
    """A batch has no value of this name."""


class NamedArrays(dict[str, _Array]):
    """A dictionary whose error for an unknown name lists the names that it has (CP0919)."""

    __slots__ = ()

    def __missing__(self, name: Any) -> NoReturn:
        hint = did_you_mean(str(name), list(self), "it has:")
        raise UnknownValueError(Diagnostic("CP0919", f"the batch has no value `{name}`", notes=(Note(hint),)))


def refuse_mask() -> NoReturn:
    """Raise CP0911."""
    fail(
        "CP0911",
        "the loads of this batch have different rows, so no mask applies to all of them",
        "count each in the plan: `x, n = load ..` and `output n`; its first n rows are records",
    )
