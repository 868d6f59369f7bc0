"""Truncation of data, so that pages stay small, with notes for the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")
TEXT = 2000  # characters of one text


def cut_text(text: str, most: int = TEXT) -> str:
    """Truncate `text`, with an ellipsis."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def first_of(items: Sequence[Item], most: int, noun: str) -> tuple[tuple[Item, ...], str]:
    """Return the first `most` items, and a note on the omitted ones, empty if there are none.

    Example:
        >>> first_of("abcd", 3, "letters")
        (('a', 'b', 'c'), '1 of 4 letters are not shown')
    """
    more = len(items) - most
    left_out = f"{more:,} of {len(items):,} {noun} are not shown" if more > 0 else ""
    return tuple(items[:most]), left_out
