"""Properties of objects that cannot carry attributes, such as arrays and tracers."""

from __future__ import annotations

import weakref
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")


class _Entry(NamedTuple, Generic[T]):
    """A value, and a reference to the object that has it, whose id another object may get later."""

    reference: weakref.ref[Any]
    value: T


class ByIdentity(Generic[T]):
    """A value for each of some objects, compared by identity. An entry ends with its object."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry[T]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __setitem__(self, key: object, value: T) -> None:
        number = id(key)
        reference = weakref.ref(key, lambda _: self._entries.pop(number, None))
        self._entries[number] = _Entry(reference, value)

    def get(self, key: object) -> T | None:
        """The value of `key`, or None. A new object at the address of one that ended has none."""
        entry = self._entries.get(id(key))
        return entry.value if entry is not None and entry.reference() is key else None
