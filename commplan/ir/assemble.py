"""Structs that say again what others say."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

T = TypeVar("T", bound=msgspec.Struct)


def assemble(kind: type[T], *sources: object, **fields: Any) -> T:
    """A `kind` with `fields`; its other fields are those of `sources` under the same names, if they have
    them: of the last that does."""
    names = [name for name in kind.__struct_fields__ if name not in fields]
    for source in sources:
        fields |= {name: getattr(source, name) for name in names if hasattr(source, name)}
    return kind(**fields)
