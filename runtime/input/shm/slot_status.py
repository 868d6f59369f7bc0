"""Notes in a slot: for each part, its position in the order of batches and its error, if any."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import msgspec

from commplan.diagnostics import CommplanError, Diagnostic, Note

NOTE_NBYTES = 1024  # the space of a note
# The number of bytes of text that follow, the order of records modulo 2**32, the epoch and the step.
_HEAD = struct.Struct("<IIQQ")
HEAD_NBYTES = _HEAD.size  # the size of a note without an error
# The most characters of each text of an error, tried in this order. A character may take six bytes of JSON.
_SHORTER = (300, 100, 30)
_MOST_NOTES = 2  # the most notes of an error whose texts are shortened


class BatchPosition(NamedTuple):
    """A batch's position, equal in all processes.

    Attributes:
        epoch: the epoch.
        step: the step in the epoch.
        order: a checksum of the inputs of the order of records. In a decoded note, it is modulo 2**32.
    """

    epoch: int
    step: int
    order: int


class _Trouble(msgspec.Struct, frozen=True):
    """The text of a note.

    Attributes:
        errors: errors of records.
        other: the text of any other error.
        process: the index in the group of the process that failed; -1 if unknown.
    """

    errors: tuple[Diagnostic, ...] = ()
    other: str = ""
    process: int = -1


def head(position: BatchPosition) -> bytes:
    """The start of a note, and all of it if it has no error."""
    return _HEAD.pack(0, position.order & 0xFFFFFFFF, position.epoch, position.step)


def encode_status(position: BatchPosition, error: BaseException | None, process: int = -1) -> bytes:
    """A note of at most `NOTE_NBYTES` bytes; long texts are truncated.

    Args:
        position: the position of the batch.
        error: the error of the part; None if there is none.
        process: the index in the group of the process that failed; -1 if it has none.
    """
    if error is None:
        return head(position)
    text = _fitting(error, NOTE_NBYTES - _HEAD.size, process)
    return _HEAD.pack(len(text), position.order & 0xFFFFFFFF, position.epoch, position.step) + text


def _fitting(error: BaseException, nbytes: int, process: int) -> bytes:
    """The text of a note of at most `nbytes` bytes.

    The first attempt has all diagnostics of the error. Others have only the first one, with shorter texts. If
    that is still too long, only its code is left.
    """
    if not isinstance(error, CommplanError):
        other = _text(f"{type(error).__name__}: {error}")[: nbytes // 8]  # fits, whatever the characters are
        return msgspec.json.encode(_Trouble(other=other, process=process))
    problems = error.diagnostics
    for most in (nbytes, *_SHORTER):
        shortened = tuple(_short(problem, most) for problem in problems)
        text = msgspec.json.encode(_Trouble(shortened, process=process))
        if len(text) <= nbytes:
            return text
        problems = problems[:1]
    return msgspec.json.encode(_Trouble(other=problems[0].code, process=process))


def _short(problem: Diagnostic, most: int) -> Diagnostic:
    """The diagnostic with at most `most` characters in each text."""
    notes = tuple(Note(_text(note.text)[:most], note.span) for note in problem.notes)
    return msgspec.structs.replace(
        problem,
        message=_text(problem.message)[:most],
        notes=notes if most > _SHORTER[0] else notes[:_MOST_NOTES],
        file=_text(problem.file)[-most:],
    )


def _text(message: str) -> str:
    """The text in a form that JSON can encode: file names may contain bytes that are not text."""
    return message.encode(errors="backslashreplace").decode()


def read_status(data: bytes) -> tuple[BatchPosition, tuple[Diagnostic, ...], str, int]:
    """Decode a note.

    Returns:
        The position, with the order modulo 2**32; the errors of records; the text of any other error, "" if
        there is none; the index of the failed process, -1 if unknown or there is no error.
    """
    length, order, epoch, step = _HEAD.unpack_from(data)
    if not length:
        return BatchPosition(epoch, step, order), (), "", -1
    trouble = msgspec.json.decode(data[_HEAD.size : _HEAD.size + length], type=_Trouble)
    return BatchPosition(epoch, step, order), trouble.errors, trouble.other, trouble.process


def write_status(
    memory: Any, part: int, position: BatchPosition, error: BaseException | None, process: int = -1
) -> None:
    """Write the note of `part` in the slot `memory`. See `encode_status` for the other arguments."""
    data = encode_status(position, error, process)
    offset = part * NOTE_NBYTES
    memoryview(memory).cast("B")[offset : offset + len(data)] = data
