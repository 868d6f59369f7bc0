"""The roles of fields: semantics, execution, cost or presentation.

Each field of each struct of a schedule declares its role in its annotation: `lane: Cost[str]`.
"""

from __future__ import annotations

import enum
import functools
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin

import msgspec

T = TypeVar("T")


class Role(enum.Enum):
    """The purpose of a field, and the check that detects a wrong value.

    `docs/reference/fields.md` lists the fields by role.
    """

    MEANING = "the computation: compared with the plan"
    STRUCTURE = "follows from the other fields: derived again on load, and compared"
    EXECUTION = (
        "how and when ops run: obeyed by runtimes, with the same result for every value that is accepted"
    )
    COST = "read by passes and cost models alone"
    PRESENTATION = "places and texts for people, never an identity"


# Annotations of fields with their roles: `lane: Cost[str]` is a `str` for type checkers.
Meaning = Annotated[T, Role.MEANING]
Structure = Annotated[T, Role.STRUCTURE]
Execution = Annotated[T, Role.EXECUTION]
Cost = Annotated[T, Role.COST]
Presentation = Annotated[T, Role.PRESENTATION]


class Field(NamedTuple):
    """A field of a struct.

    Attributes:
        name: The name.
        type: The type, without the role.
        role: The role; None if the struct does not declare one.
    """

    name: str
    type: Any
    role: Role | None


@functools.cache
def fields(kind: type[msgspec.Struct]) -> tuple[Field, ...]:
    """The fields of the struct `kind`, including inherited ones, in the order of its constructor."""
    return tuple(Field(field.name, *_declared(field.type)) for field in msgspec.structs.fields(kind))


def _declared(kind: Any) -> tuple[Any, Role | None]:
    """Split an annotation into the type and the role."""
    if get_origin(kind) is not Annotated:
        return kind, None
    bare, *marks = get_args(kind)
    metadata = [mark for mark in marks if not isinstance(mark, Role)]
    role = next((mark for mark in marks if isinstance(mark, Role)), None)
    return (Annotated[(bare, *metadata)] if metadata else bare), role
