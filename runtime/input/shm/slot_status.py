"""What a process says about its part of a batch: where it stands, and what went wrong; and how its peers hear
it."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import msgspec

from commplan.diagnostics import CommplanError, Diagnostic, Note
from commplan.recorder.processes import process_state
from commplan.runtime.input.observe.wait_log import LOG

if TYPE_CHECKING:
    from commplan.runtime.input.group import Group
    from commplan.runtime.input.shm.segment import Blame

ROOM = 1024  # bytes of a note
_HEAD = struct.Struct("<IIQQ")  # bytes of text that follow, order, epoch, step


class Place(NamedTuple):
    """A batch's place, the same in all processes. order: a checksum of what the order of records depends
    on."""

    epoch: int
    step: int
    order: int


class _Trouble(msgspec.Struct, frozen=True):
    errors: tuple[Diagnostic, ...] = ()
    other: str = ""


def head(place: Place) -> bytes:
    """How a note begins that reports nothing wrong."""
    return _HEAD.pack(0, place.order & 0xFFFFFFFF, place.epoch, place.step)


HEAD_NBYTES = _HEAD.size


def encode_status(place: Place, error: BaseException | None) -> bytes:
    """A note of at most ROOM bytes; what is too long is cut."""
    if error is None:
        return head(place)
    text = _fitting(error, ROOM - _HEAD.size)
    return _HEAD.pack(len(text), place.order & 0xFFFFFFFF, place.epoch, place.step) + text


def _fitting(error: BaseException, room: int) -> bytes:
    if not isinstance(error, CommplanError):
        return msgspec.json.encode(_Trouble(other=_text(f"{type(error).__name__}: {error}")[: room // 8]))
    problems = error.diagnostics
    for most in (room, 300, 100, 30):  # characters of each text; one may take six bytes of JSON
        text = msgspec.json.encode(_Trouble(tuple(_short(problem, most) for problem in problems)))
        if len(text) <= room:
            return text
        problems = problems[:1]
    return msgspec.json.encode(_Trouble(other=problems[0].code))


def _short(problem: Diagnostic, most: int) -> Diagnostic:
    notes = tuple(Note(_text(note.text)[:most], note.span) for note in problem.notes)
    return msgspec.structs.replace(
        problem,
        message=_text(problem.message)[:most],
        notes=notes if most > 300 else notes[:2],
        file=_text(problem.file)[-most:],
    )


def _text(message: str) -> str:
    """What JSON can say: names of files may hold bytes that are no text."""
    return message.encode(errors="backslashreplace").decode()


def read_status(data: bytes) -> tuple[Place, tuple[Diagnostic, ...], str]:
    """Place, errors, and what else went wrong."""
    length, order, epoch, step = _HEAD.unpack_from(data)
    if not length:
        return Place(epoch, step, order), (), ""
    trouble = msgspec.json.decode(data[_HEAD.size : _HEAD.size + length], type=_Trouble)
    return Place(epoch, step, order), trouble.errors, trouble.other


@dataclass
class PeerErrors:
    """Errors of process `group.index` about its peers. blame: the line that shares. doing: in which call of
    the user's code a process is, where that is known."""

    group: Group
    blame: Blame
    doing: Callable[[int], str] = lambda process: ""

    def lost(self, process: int, how: str) -> NoReturn:
        """Raise CP0920: `process` is not there any more."""
        self.fail("CP0920", f"process {process} of {self.group.count} {how}")

    def silent(self, process: int, seconds: float, state: str = "alive") -> NoReturn:
        """Raise CP0921: `process` does not come. state: of it, as `recorder.processes.process_state` says."""
        name = f"process {process} of {self.group.count}"
        doing = self.doing(process)
        notes = [f"process {process} is {doing}"] if doing else []
        if state in ("alive", "dead"):  # what the kernel lets go of now is not seen as dead yet
            self.fail("CP0921", f"{name} lives, but was silent for {seconds:g} s", *notes)
        self.fail("CP0921", f"{name} is {state}, and was silent for {seconds:g} s", *notes)

    def warn(self, process: int, waited: float, owed: str, number: int) -> None:
        """Log that `process` is waited for. owed: what for, `to take batch 3`. number: of its process of the
        operating system, 0 where that is not known."""
        state = process_state(number) if number else "alive"
        doing = self.doing(process) if state == "alive" else state
        if number and state == "stopped":
            doing += f": kill -CONT {number} lets it go on"
        LOG.warning(
            "process %d has waited %.0f s for process %d of %d %s; line %d waits%s", self.group.index,
            waited, process, self.group.count, owed, self.blame.span.line,
            f"; process {process}{f' (PID {number})' if number else ''} is {doing}" if doing else "",
        )  # fmt: skip

    def fail(self, code: str, message: str, *notes: str) -> NoReturn:
        self.blame.fail(
            code,
            f"{message}; line {self.blame.span.line} waits for its part of each batch",
            *notes,
            f"this is process {self.group.index} of run {self.group.run_id!r}",
        )


def write_status(memory: Any, place: int, where: Place, error: BaseException | None) -> None:
    """Leave the note of the maker at `place` in a slot (see `slot_layout`)."""
    data = encode_status(where, error)
    at = place * ROOM
    memoryview(memory).cast("B")[at : at + len(data)] = data


def check_status(memory: Any, makers: Sequence[tuple[int, int]], mine: Place, peers: PeerErrors) -> None:
    """Read the notes in a slot. makers: of this batch, each behind the place of its note. Raises what a maker
    raised, CP0920 where one stopped, CP0922 where one stands elsewhere than at `mine`."""
    fine, seen = head(mine), memoryview(memory)
    for place, process in makers:
        at = place * ROOM
        if seen[at : at + HEAD_NBYTES].tobytes() == fine:
            continue
        theirs, errors, why = read_status(bytes(seen[at : at + ROOM]))
        if errors:
            _raise(errors, process, peers.group)
        if why:
            peers.lost(process, f"stopped: {why}")
        peers.fail(
            "CP0922",
            f"process {process} of {peers.group.count} stands at epoch {theirs.epoch}, step {theirs.step}, "
            f"this one at epoch {mine.epoch}, step {mine.step}",
        )


def _raise(errors: Sequence[Diagnostic], process: int, group: Group) -> NoReturn:
    if process == group.index:
        raise CommplanError(*errors)
    remark = Note(f"raised in process {process} of {group.count}")
    raise CommplanError(*(msgspec.structs.replace(error, notes=(*error.notes, remark)) for error in errors))
