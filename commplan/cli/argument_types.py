"""Parsers for argument values, as `type=` of argparse. Each raises ArgumentTypeError for invalid text."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from commplan.diagnostics import fail

if TYPE_CHECKING:
    from fractions import Fraction

MEASURES = ("slower", "bytes", "memory", "rounds")  # measures of `diff --fail-on`
_LARGEST_SCALE = 10**6  # largest factor of a bandwidth; its inverse is the smallest
_TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}  # units in seconds
_SIZES = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}  # units in bytes


def pair(text: str) -> tuple[str, str]:
    """Parse `NAME=VALUE`, both nonempty. The value may contain further `=`."""
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, found {text!r}")
    return name, value


def _is_number(text: str) -> bool:
    """Whether the text consists of ASCII digits and is not too long."""
    return text.isascii() and text.isdecimal() and len(text) < 20


def _whole(text: str, least: int, expected: str, shown: str) -> int:
    """Parse a number from `least` to 2**31 - 1. The error says `expected`, and shows the argument `shown`."""
    if not _is_number(text) or not least <= int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"expected {expected}, found {shown!r}")
    return int(text)


def size(text: str) -> tuple[str, int]:
    """Parse `NAME=N` with a positive number."""
    name, value = pair(text)
    return name, _whole(value, 1, "NAME=N with a positive whole number", text)


def ranks(text: str) -> int | tuple[tuple[str, int], ...]:
    """Parse a number of ranks such as `13`, or the sizes of levels such as `gpu=8,node=4`, in this order."""
    return tuple(size(part) for part in text.split(",")) if "=" in text else count(text)


def rank(text: str) -> int:
    """Parse a rank, counted from 0."""
    return _whole(text, 0, "a rank: a whole number from 0 on", text)


def count(text: str) -> int:
    """Parse a positive number."""
    return _whole(text, 1, "a positive whole number", text)


def _time(text: str, bare: str = "") -> float | None:
    """Parse a time in seconds; None if invalid. `bare` is the unit of numbers without one."""
    number = text.rstrip("nums")
    unit = text[len(number) :] or bare
    is_valid = unit in _TIMES and _is_number(number.replace(".", "", 1))
    return float(number) * _TIMES[unit] if is_valid else None


def named_seconds(text: str) -> tuple[str, float]:
    """Parse `NAME=TIME`, such as `decode=3ms`, to seconds. The unit is required; 0 is allowed."""
    name, value = pair(text)
    seconds = _time(value)
    if seconds is None:
        raise argparse.ArgumentTypeError(f"expected NAME=TIME such as decode=3ms, found {text!r}")
    return name, seconds


def duration(text: str) -> float:
    """Parse a positive time such as `12ms` to seconds. A number without a unit is in seconds."""
    seconds = _time(text, "s")
    if not seconds:
        raise argparse.ArgumentTypeError(f"expected a time such as 12ms, found {text!r}")
    return seconds


def scale(text: str) -> tuple[str, Fraction]:
    """Parse a level and the factor of its bandwidth: `node=1/4`, or `node=0.25`."""
    from fractions import Fraction

    name, _, value = text.partition("=")
    written = re.fullmatch(r"[0-9]{1,9}(/0*[1-9][0-9]{0,8}|\.[0-9]{1,9})?", value)
    factor = Fraction(value) if written else Fraction(0)
    if not name or not 1 <= factor * _LARGEST_SCALE <= _LARGEST_SCALE**2:
        raise argparse.ArgumentTypeError(f"expected LEVEL=FACTOR such as node=1/4, found {text!r}")
    return name, factor


def limit(text: str) -> tuple[str, float]:
    """Parse a measure and a limit of its growth: `bytes:5%` is `("bytes", 0.05)`."""
    measure, _, share = text.partition(":")
    number = share.removesuffix("%")
    if measure not in MEASURES or number == share or not _is_number(number.replace(".", "", 1)):
        expected = f"{', '.join(f'{name}:N%' for name in MEASURES)}"
        raise argparse.ArgumentTypeError(f"expected one of {expected}, found {text!r}")
    return measure, float(number) / 100


def nbytes(text: str) -> int:
    """Parse a positive size such as `64MiB` to bytes. A number without a unit is in bytes."""
    number = text.rstrip("KMGiB")
    unit = text[len(number) :]
    if unit not in _SIZES or not _is_number(number) or not int(number):
        raise argparse.ArgumentTypeError(f"expected a size such as 64MiB, found {text!r}")
    return int(number) * _SIZES[unit]


def once(pairs: Sequence[tuple[str, Any]], flag: str) -> dict[str, Any]:
    """Convert pairs of name and value to a dictionary. Equal pairs may be repeated.

    Args:
        pairs: the values of a repeatable flag.
        flag: its name, for the error.

    Raises:
        CommplanError: CP1104 if a name has two different values.
    """
    bindings: dict[str, Any] = {}
    for name, value in pairs:
        if bindings.setdefault(name, value) != value:
            fail("CP1104", f"{flag} {name} is repeated: {bindings[name]} and {value}")
    return bindings
