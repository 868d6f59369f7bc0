"""References to values: the fields of ops and stages that hold them."""

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, TypeVar, get_args, get_origin

import msgspec

from commplan.ir import roles
from commplan.ir.types import Ref

Node = TypeVar("Node", bound=msgspec.Struct)


def name_of(ref: Ref) -> str:
    """The name without the version: `grads` for `grads.1`."""
    return ref.rpartition(".")[0]


def base_name(ref: Ref) -> str:
    """The value before passes divided it: `grads.1` for `grads.1/shard`."""
    return ref.partition("/")[0].partition("~")[0]


@cache
def getter(kind: type[msgspec.Struct], fields: tuple[str, ...]) -> Callable[[Any], tuple[Ref, ...]]:
    """A function that returns the values named by `fields` of a struct of `kind`, in field order.

    A field holds one value, several, an optional one (or a number), or structs with `READS`. Values in a
    tuple of structs are returned once each.
    """
    if not fields:
        return lambda node: ()
    types = {field.name: field.type for field in roles.fields(kind)}
    kinds = [types[name] for name in fields]
    get = attrgetter(*fields)
    values = [_values(kind) for kind in kinds]
    if len(fields) == 1:
        get_single = values[0]
        return get if get_single is tuple else lambda node: tuple(get_single(get(node)))
    if all(kind is Ref for kind in kinds):
        return get
    if all(get_refs is _optional or kind is Ref for get_refs, kind in zip(values, kinds, strict=True)):
        return lambda node: tuple([item for item in get(node) if isinstance(item, str)])
    return lambda node: tuple(
        [ref for get_refs, item in zip(values, get(node), strict=True) for ref in get_refs(item)]
    )


def substitute(node: Node, names: Mapping[Ref, Ref], fields: tuple[str, ...]) -> Node:
    """`node` with the references in `fields` renamed by `names`."""
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
    return (item,) if isinstance(item, str) else ()


def _renamed(item: Any, names: Mapping[Ref, Ref]) -> Any:
    if isinstance(item, str):
        return names.get(item, item)
    if isinstance(item, tuple):
        return tuple(_renamed(inner, names) for inner in item)  # pyright: ignore[reportUnknownVariableType]
    return substitute(item, names, item.READS) if hasattr(item, "READS") else item
