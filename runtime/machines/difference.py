"""The first line in which the descriptions of several processes differ, found without sending all lines."""

from __future__ import annotations

import itertools
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

_HEAD, _BEFORE, _LONGEST = (
    56,
    24,
    200,
)  # characters of a long line: its head, before the first that differs, all


class Checksums(msgspec.Struct, frozen=True, array_like=True):
    """A checksum of 4 bytes for each line of a process."""

    lines: bytes


class ComparedLine(msgspec.Struct, frozen=True, array_like=True):
    """One line of a process; empty if it has no such line."""

    text: str


def first_difference(
    lines: Sequence[str], exchange: Callable[[Any], Mapping[int, Any]], shown: Sequence[str] = ()
) -> dict[int, str]:
    """The first line that differs between processes, by process.

    Args:
      lines: those of this process; a process without any is not compared.
      exchange: returns the values of all processes by their numbers. All processes call this function alike.
      shown: what is returned in place of a line of this process, such as the line and its source.

    Returns:
      The line of each process, cut around the first character that differs; empty if all lines are equal.
    """
    mine = array("I", (zlib.crc32(line.encode()) for line in lines)).tobytes()
    texts = {n: sums.lines for n, sums in exchange(Checksums(mine)).items() if sums.lines}
    columns = {n: [text[at : at + 4] for at in range(0, len(text), 4)] for n, text in texts.items()}
    most = max(map(len, columns.values()), default=0)
    differing = (i for i in range(most) if len({tuple(column[i : i + 1]) for column in columns.values()}) > 1)
    place = next(differing, None)
    if place is None:
        return {}
    answers = exchange(ComparedLine("".join((shown or lines)[place : place + 1])))
    return excerpts({n: answers[n].text or f"nothing after {place}" for n in columns})


def excerpts(texts: Mapping[int, str]) -> dict[int, str]:
    """`texts`, the long ones cut to their heads and the first characters that differ."""
    columns = zip(*texts.values(), strict=False)
    start = sum(1 for _ in itertools.takewhile(lambda column: len({*column}) == 1, columns))
    if start < _HEAD + _BEFORE or all(len(text) <= _LONGEST for text in texts.values()):
        return {n: _cut(text, _LONGEST) for n, text in texts.items()}
    middle = start - _BEFORE
    return {n: f"{text[:_HEAD]} ... {_cut(text[middle:], _LONGEST - _HEAD)}" for n, text in texts.items()}


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}..."
