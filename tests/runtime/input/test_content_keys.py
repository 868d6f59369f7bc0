"""Digests of functions that members of a feed compare."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

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


def resized(row: Any, *arguments: Any, **options: Any) -> Any:
    return row, arguments, options


def test_partials_with_other_constants_have_other_digests() -> None:
    partial = functools.partial
    alike = partial(resized, 2, mode="a", size=3), partial(resized, 2, size=3, mode="a")
    assert source_digest(alike[0]) == source_digest(alike[1])
    others = [
        *(partial(resized, value) for value in (2, 2.0, "2", b"2", True, None)),
        partial(resized, 2, 3),
        partial(resized, size=2),
        partial(resized, mode=2),
        partial(resized, "size=2"),
        partial(scaled(2.0), 2),
    ]
    digests = [source_digest(each) for each in (resized, alike[0], *others)]
    assert len(set(digests)) == len(digests)


def test_objects_and_arrays_of_a_partial_do_not_change_its_digest() -> None:
    tables = object(), object(), np.zeros(3), np.ones(10_000)
    assert len({source_digest(functools.partial(resized, table)) for table in tables}) == 1
    assert len({source_digest(functools.partial(resized, table=table)) for table in tables}) == 1
