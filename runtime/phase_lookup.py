"""Lookup of the phases of a run by name and by period, with errors for those that the plan lacks."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping

from commplan.diagnostics import CommplanError, Diagnostic, Note, listed, near_note
from commplan.runtime.phases import PhaseCall
from commplan.tracebacks import public_face


class UnknownPeriodError(CommplanError, KeyError):
    """CP0817: the plan has no phase with this period."""


@public_face
class Every(Mapping[int, PhaseCall]):
    """The phases `every N steps`, by N; another number raises `UnknownPeriodError`."""

    def __init__(self, phases: Mapping[int, PhaseCall]) -> None:
        self._phases = dict(phases)

    def __getitem__(self, period: int) -> PhaseCall:
        if not isinstance(period, Hashable) or period not in self._phases:  # pyright: ignore[reportUnnecessaryIsInstance]
            periods = ", ".join(f"every {n} steps" for n in self._phases) or "none"
            message, note = f"the plan has no phase `every {period} steps`", Note(f"it has: {periods}")
            raise UnknownPeriodError(Diagnostic("CP0817", message, None, (note,)))
        return self._phases[period]

    def _ipython_key_completions_(self) -> list[int]:
        return list(self._phases)

    def __iter__(self) -> Iterator[int]:
        return iter(self._phases)

    def __len__(self) -> int:
        return len(self._phases)


class UnknownPhaseError(CommplanError, AttributeError):
    """CP0817: the plan has no phase of this name."""


def unknown_phase(name: str, phases: Iterable[str], alternatives: Iterable[str]) -> UnknownPhaseError:
    """Make the error for a phase that the plan lacks.

    Args:
        name: The name that the user wrote.
        phases: The names of the plan's phases.
        alternatives: All names that the user may have meant.
    """
    notes = (*near_note(name, alternatives), f"it has: {listed(phases) or 'none'}")
    message = f"the plan has no phase `{name}`"
    return UnknownPhaseError(Diagnostic("CP0817", message, None, tuple(map(Note, notes))))
