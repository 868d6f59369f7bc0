"""Ops that read other values than they did."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from commplan.ir.plan import Ref
from commplan.ir.schedule import Op

# The fields of ops that name what they read; those of floats among them are left alone.
_READS = ("operand", "operands", "center", "eta", "rho", "by", "delta", "gradient", "states", "weight")


def reading(op: Op, names: Mapping[Ref, Ref]) -> Op:
    """`op`, which reads `names[ref]` where it read `ref`, by name or as a part of it."""

    def renamed(item: Any) -> Any:
        if isinstance(item, tuple):
            return tuple(renamed(one) for one in item)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        return names.get(item, item) if isinstance(item, str) else item

    changes = {field: renamed(getattr(op, field)) for field in _READS if hasattr(op, field)}
    if hasattr(op, "parts"):
        parts: Any = getattr(op, "parts")  # noqa: B009
        changes["parts"] = tuple(msgspec.structs.replace(p, value=names.get(p.value, p.value)) for p in parts)
    return msgspec.structs.replace(op, **changes)
