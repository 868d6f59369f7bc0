"""Build a struct from the fields of other structs."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

T = TypeVar("T", bound=msgspec.Struct)


def assemble(kind: type[T], *sources: object, **fields: Any) -> T:
    """Build a `kind` from `fields`, and its other fields from attributes of `sources`; later sources win."""
    names = [name for name in kind.__struct_fields__ if name not in fields]
    for source in sources:
        fields |= {name: getattr(source, name) for name in names if hasattr(source, name)}
    return kind(**fields)
