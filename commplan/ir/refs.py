"""References to values: their names, and the fields of ops and stages that hold them.

A struct lists the fields that hold references in class attributes such as `READS`; the functions here read
and rename them.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, TypeVar, get_args, get_origin

import msgspec

from commplan.ir import roles
from commplan.ir.types import Ref

Node = TypeVar("Node", bound=msgspec.Struct)


def name_of(ref: Ref) -> str:
    """The part before the last dot, which is the name without the version: `grads` for `grads.1`.

    Empty for a text without a dot.
    """
    return ref.rpartition(".")[0]


def base_name(ref: Ref) -> str:
    """The value of the plan that passes derived `ref` from: `grads.1` for `grads.1/shard` and `grads.1~2`."""
    return ref.partition("/")[0].partition("~")[0]


@cache
def getter(kind: type[msgspec.Struct], fields: tuple[str, ...]) -> Callable[[Any], tuple[Ref, ...]]:
    """A function that returns the references in some fields of a struct, in the order of the fields.

    Args:
        kind: The type of the struct.
        fields: The names of the fields. A field holds

            - a reference, or a tuple of references,
            - a reference or something else, such as None or a number, which is skipped, or
            - a struct with `READS`, or a tuple of such structs; a reference in several of these is returned
              once.
    """
    if not fields:
        return lambda node: ()
    types = {field.name: field.type for field in roles.fields(kind)}
    field_types = [types[name] for name in fields]
    get = attrgetter(*fields)
    values = [_values(field_type) for field_type in field_types]
    # Passes call these functions for each op many times, so the frequent cases have fast ones.
    if len(fields) == 1:
        get_single = values[0]
        return get if get_single is tuple else lambda node: tuple(get_single(get(node)))
    if all(field_type is Ref for field_type in field_types):
        return get
    pairs = zip(values, field_types, strict=True)
    if all(get_refs is _optional or field_type is Ref for get_refs, field_type in pairs):
        return lambda node: tuple([item for item in get(node) if isinstance(item, str)])
    return lambda node: tuple(
        [ref for get_refs, item in zip(values, get(node), strict=True) for ref in get_refs(item)]
    )


def substitute(node: Node, names: Mapping[Ref, Ref], fields: tuple[str, ...]) -> Node:
    """`node` with the references in `fields` renamed by `names`; others are kept."""
    return msgspec.structs.replace(node, **{name: _renamed(getattr(node, name), names) for name in fields})


def _values(kind: Any) -> Callable[[Any], Iterable[Ref]]:
    """A function from the content of a field of type `kind` to the values that it names."""
    if kind is Ref:
        return lambda item: (item,)
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if kind in (tuple[Ref, ...], tuple[str, ...]):
        return tuple
    if get_origin(kind) is tuple:
        (name,) = get_args(kind)[0].READS
        get: Callable[[Any], Ref] = attrgetter(name)
        return lambda items: dict.fromkeys(map(get, items))
    if hasattr(kind, "READS"):
        return getter(kind, kind.READS)
    return _optional


def _optional(item: Any) -> tuple[Ref, ...]:
    """`item` if it is a reference; nothing for None and numbers."""
    return (item,) if isinstance(item, str) else ()


def _renamed(item: Any, names: Mapping[Ref, Ref]) -> Any:
    """The content of a field with its references renamed."""
    if isinstance(item, str):
        return names.get(item, item)
    if isinstance(item, tuple):
        return tuple(_renamed(inner, names) for inner in item)  # pyright: ignore[reportUnknownVariableType]
    return substitute(item, names, item.READS) if hasattr(item, "READS") else item
