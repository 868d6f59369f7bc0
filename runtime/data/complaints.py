"""What a process says when it cannot go on for the sake of its peers, and how it hears what they say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec

from commplan.diagnostics import CommplanError, Diagnostic, Note, fail
from commplan.runtime.data import notes
from commplan.runtime.data.group import Group
from commplan.runtime.data.segment import Blame


@dataclass(frozen=True)
class Complaints:
    """Errors of process `group.index` about its peers. blame: what the plan says there, its place, and the
    file."""

    group: Group
    blame: Blame

    def lost(self, process: int, how: str) -> NoReturn:
        """Raise CP0920: `process` is not there any more."""
        self.fail("CP0920", f"process {process} of {self.group.count} {how}")

    def fail(self, code: str, message: str) -> NoReturn:
        what, span, file = self.blame
        fail(
            code,
            f"{message}; line {span.line} waits for its part of each batch",
            f"the line: {what}",
            f"this is process {self.group.index} of run {self.group.run_id!r}",
            span=span,
            file=file,
        )


def write(memory: Any, place: int, where: notes.Place, error: BaseException | None) -> None:
    """Leave the note of the maker at `place` in a slot (see `rooms`)."""
    data = notes.written(where, error)
    at = place * notes.ROOM
    memoryview(memory).cast("B")[at : at + len(data)] = data


def hear(memory: Any, makers: Sequence[tuple[int, int]], mine: notes.Place, told: Complaints) -> None:
    """Read the notes in a slot. makers: of this batch, each behind the place of its note. Raises what a maker
    raised, CP0920 where one stopped, CP0922 where one stands elsewhere than at `mine`."""
    fine, seen = notes.head(mine), memoryview(memory)
    for place, process in makers:
        at = place * notes.ROOM
        if seen[at : at + notes.HEAD_NBYTES].tobytes() == fine:
            continue
        other, errors, why = notes.read(bytes(seen[at : at + notes.ROOM]))
        if errors:
            _raise(errors, process, told.group)
        if why:
            told.lost(process, f"stopped: {why}")
        told.fail(
            "CP0922",
            f"process {process} of {told.group.count} stands at epoch {other.epoch}, step {other.step}, "
            f"this one at epoch {mine.epoch}, step {mine.step}",
        )


def _raise(errors: Sequence[Diagnostic], process: int, group: Group) -> NoReturn:
    if process == group.index:
        raise CommplanError(*errors)
    remark = Note(f"raised in process {process} of {group.count}")
    raise CommplanError(*(msgspec.structs.replace(error, notes=(*error.notes, remark)) for error in errors))
