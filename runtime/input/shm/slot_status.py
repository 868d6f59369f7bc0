"""Notes in a slot: for each part, its position in the order of batches and its error, if any."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import msgspec

from commplan.diagnostics import CommplanError, Diagnostic, Note

ROOM = 1024  # bytes of a note
_HEAD = struct.Struct("<IIQQ")  # bytes of text that follow, order, epoch, step


class BatchPosition(NamedTuple):
    """A batch's position, equal in all processes.

    Attributes:
        order: a checksum of the inputs of the order of records.
    """

    epoch: int
    step: int
    order: int


class _Trouble(msgspec.Struct, frozen=True):
    errors: tuple[Diagnostic, ...] = ()
    other: str = ""
    process: int = -1


def head(position: BatchPosition) -> bytes:
    """The start of a note, and all of it if it has no error."""
    return _HEAD.pack(0, position.order & 0xFFFFFFFF, position.epoch, position.step)


HEAD_NBYTES = _HEAD.size


def encode_status(position: BatchPosition, error: BaseException | None, process: int = -1) -> bytes:
    """A note of at most ROOM bytes; long texts are truncated.

    Args:
        process: the index in the group of the process that failed.
    """
    if error is None:
        return head(position)
    text = _fitting(error, ROOM - _HEAD.size, process)
    return _HEAD.pack(len(text), position.order & 0xFFFFFFFF, position.epoch, position.step) + text


def _fitting(error: BaseException, room: int, process: int) -> bytes:
    if not isinstance(error, CommplanError):
        other = _text(f"{type(error).__name__}: {error}")[: room // 8]
        return msgspec.json.encode(_Trouble(other=other, process=process))
    problems = error.diagnostics
    for most in (room, 300, 100, 30):  # characters of each text; one may take six bytes of JSON
        shortened = tuple(_short(problem, most) for problem in problems)
        text = msgspec.json.encode(_Trouble(shortened, process=process))
        if len(text) <= room:
            return text
        problems = problems[:1]
    return msgspec.json.encode(_Trouble(other=problems[0].code, process=process))


def _short(problem: Diagnostic, most: int) -> Diagnostic:
    notes = tuple(Note(_text(note.text)[:most], note.span) for note in problem.notes)
    return msgspec.structs.replace(
        problem,
        message=_text(problem.message)[:most],
        notes=notes if most > 300 else notes[:2],
        file=_text(problem.file)[-most:],
    )


def _text(message: str) -> str:
    """The text in a form that JSON can encode: file names may contain bytes that are not text."""
    return message.encode(errors="backslashreplace").decode()


def read_status(data: bytes) -> tuple[BatchPosition, tuple[Diagnostic, ...], str, int]:
    """Decode a note: position, errors of records, any other error, and the failed process (-1 if unknown)."""
    length, order, epoch, step = _HEAD.unpack_from(data)
    if not length:
        return BatchPosition(epoch, step, order), (), "", -1
    trouble = msgspec.json.decode(data[_HEAD.size : _HEAD.size + length], type=_Trouble)
    return BatchPosition(epoch, step, order), trouble.errors, trouble.other, trouble.process


def write_status(
    memory: Any, part: int, position: BatchPosition, error: BaseException | None, process: int = -1
) -> None:
    """Write the note of `part` in a slot (see `slot_layout`)."""
    data = encode_status(position, error, process)
    offset = part * ROOM
    memoryview(memory).cast("B")[offset : offset + len(data)] = data
