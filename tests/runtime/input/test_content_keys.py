"""Digests of functions that members of a feed compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from commplan.runtime.input.sources.content_keys import source_digest


def scaled(factor: float) -> Callable[[Any], Any]:
    return lambda row: row * factor


def shifted(by: int) -> Callable[[Any], Any]:
    def shift(row: Any, offset: int = by) -> Any:
        return row + offset

    return shift


def test_functions_that_capture_other_numbers_have_other_digests() -> None:
    assert source_digest(scaled(2.0)) == source_digest(scaled(2.0)) != source_digest(scaled(3.0))
    assert source_digest(shifted(1)) == source_digest(shifted(1)) != source_digest(shifted(2))


def test_a_captured_object_does_not_change_the_digest_from_process_to_process() -> None:
    table = object()
    assert source_digest(lambda row: (table, row)) != ""
    digests = {source_digest(pick) for pick in ((lambda row, owner=object(): owner) for _ in range(2))}  # noqa: B008
    assert len(digests) == 1
