"""Find the first line in which the descriptions of several processes differ, without sending all lines.

Processes exchange a checksum of each line, and then the one line that differs.
"""

from __future__ import annotations

import itertools
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

_HEAD = 56  # Characters at the beginning of a long line that are shown.
_BEFORE = 24  # Characters of a long line that are shown before the first difference.
_LONGEST = 200  # The most characters of a line that are shown, without the dots.
_CHECKSUM_NBYTES = 4  # Bytes of a CRC-32.


class Checksums(msgspec.Struct, frozen=True, array_like=True):
    """The message with the checksums of a process's lines.

    Attributes:
        lines: CRC-32 of each line in UTF-8, 4 bytes each, in the order of the lines.
    """

    lines: bytes


class LineText(msgspec.Struct, frozen=True, array_like=True):
    """The message with one line of a process.

    Attributes:
        text: The line, or "" if the process has no such line.
    """

    text: str


def first_difference(
    lines: Sequence[str], exchange: Callable[[Any], Mapping[int, Any]], shown: Sequence[str] = ()
) -> dict[int, str]:
    """Return the first line that differs between processes, by process.

    Args:
        lines: The lines of this process. A process without lines is not compared.
        exchange: Returns the values of all processes by process number. All processes call this function in
            the same order.
        shown: Texts to return instead of `lines`, one for each, such as the line with its source. Empty for
            the lines themselves.

    Returns:
        The line of each compared process, cut around the first character that differs, or "nothing after N"
        for a process with only N lines. Empty if all lines are equal.
    """
    mine = array("I", (zlib.crc32(line.encode()) for line in lines)).tobytes()
    received = {n: sums.lines for n, sums in exchange(Checksums(mine)).items() if sums.lines}
    columns = {
        n: [sums[at : at + _CHECKSUM_NBYTES] for at in range(0, len(sums), _CHECKSUM_NBYTES)]
        for n, sums in received.items()
    }
    most = max(map(len, columns.values()), default=0)
    # A column that has ended gives an empty tuple, which differs from all checksums.
    differing = (i for i in range(most) if len({tuple(column[i : i + 1]) for column in columns.values()}) > 1)
    line_index = next(differing, None)
    if line_index is None:
        return {}
    answers = exchange(LineText("".join((shown or lines)[line_index : line_index + 1])))
    return excerpts({n: answers[n].text or f"nothing after {line_index}" for n in columns})


def excerpts(texts: Mapping[int, str]) -> dict[int, str]:
    """Cut long texts to their heads and the text around the first character that differs.

    Args:
        texts: A text by process number.

    Returns:
        The texts, cut to 200 characters and `...` if they are longer. If one is longer and they differ late,
        each is `HEAD ... TEXT`, also with at most 200 characters of it.
    """
    columns = zip(*texts.values(), strict=False)
    start = sum(1 for _ in itertools.takewhile(lambda column: len({*column}) == 1, columns))
    if start < _HEAD + _BEFORE or all(len(text) <= _LONGEST for text in texts.values()):
        return {n: _cut(text, _LONGEST) for n, text in texts.items()}
    middle = start - _BEFORE
    return {n: f"{text[:_HEAD]} ... {_cut(text[middle:], _LONGEST - _HEAD)}" for n, text in texts.items()}


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}..."
