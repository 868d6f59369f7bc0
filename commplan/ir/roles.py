"""The roles of fields: whether a field says what a schedule computes, or only how, at what price, or in what
words.

Each field of each struct of a schedule declares its role in its annotation: `lane: Cost[str]`.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin

import msgspec

T = TypeVar("T")


class Role(enum.Enum):
    """What a field is for, and where a wrong value of it is found."""

    MEANING = "what is computed: compared with the plan"
    STRUCTURE = "follows from the other fields: derived again on load, and compared"
    EXECUTION = (
        "how and when ops run: obeyed by runtimes, with the same result for every value that is accepted"
    )
    COST = "read by passes and cost models alone"
    PRESENTATION = "places and texts for people, never an identity"


Meaning = Annotated[T, Role.MEANING]
Structure = Annotated[T, Role.STRUCTURE]
Execution = Annotated[T, Role.EXECUTION]
Cost = Annotated[T, Role.COST]
Presentation = Annotated[T, Role.PRESENTATION]


class Field(NamedTuple):
    """A field of a struct: its name, its type without the role, and its role (None: undeclared)."""

    name: str
    type: Any
    role: Role | None


@functools.cache
def fields(kind: type[msgspec.Struct]) -> tuple[Field, ...]:
    """The fields of a struct, inherited ones included."""
    return tuple(Field(field.name, *_declared(field.type)) for field in msgspec.structs.fields(kind))


def structs(kind: Any) -> Iterator[type[msgspec.Struct]]:
    """The structs that a value of type `kind` can hold, at any depth, each once.

    Fields of presentation are not followed: all that they hold is presentation.
    """
    visited = dict[type[msgspec.Struct], None]()
    stack: list[Any] = [kind]
    while stack:
        item = stack.pop()
        if not (isinstance(item, type) and issubclass(item, msgspec.Struct)):
            stack += reversed(get_args(item))
        elif item not in visited:
            visited[item] = None
            followed = [field.type for field in fields(item) if field.role is not Role.PRESENTATION]
            stack += reversed(followed)
    return iter(visited)


def table(kind: Any) -> str:
    """The fields of all structs in `kind` by their roles, as a table in Markdown."""
    lines = ["| |" + "".join(f" {role.name.lower()} |" for role in Role), "|---" * (len(Role) + 1) + "|"]
    for struct in structs(kind):
        by_role = {role: [f"`{f.name}`" for f in fields(struct) if f.role is role] for role in Role}
        if any(by_role.values()):
            cells = "".join(f" {', '.join(names)} |" if names else " |" for names in by_role.values())
            lines.append(f"| {_title(struct)} |{cells}")
    return "\n".join(lines) + "\n"


def _title(struct: type[msgspec.Struct]) -> str:
    """What the table calls a struct: the op `map` and the stage `map` have the same class name."""
    *_, folder, module = struct.__module__.split(".")
    if folder in ("ops", "stages"):
        return f"{folder[:-1]} `{struct.__struct_config__.tag}`"
    return f"`{module}.{struct.__name__}`"


def _declared(kind: Any) -> tuple[Any, Role | None]:
    """A type without the role in its annotation, and the role."""
    if get_origin(kind) is not Annotated:
        return kind, None
    bare, *marks = get_args(kind)
    rest = [mark for mark in marks if not isinstance(mark, Role)]
    role = next((mark for mark in marks if isinstance(mark, Role)), None)
    return (Annotated[(bare, *rest)] if rest else bare), role
