"""Reductions and broadcasts within groups of ranks that are a part of an axis, which `jax.lax` does not have
where values are typed.

They have no derivative of their own: their callers give them that of what they carry out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import numpy as np
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import batching, mlir

from commplan.ir.axes import groups as groups_along
from commplan.lowering.jax.typing_shim import jax

Array = Any
Groups = tuple[tuple[int, ...], ...]
_CHANNEL, _BETWEEN_DEVICES = 1, 1  # as JAX numbers all of its own, and StableHLO the kind of channel


def all_reduce(x: Array, axes: tuple[str, ...], groups: Sequence[Sequence[int]], op: str = "sum") -> Array:
    """The sum, maximum or minimum of `x`, numbers, over the ranks of each of `groups`.

    groups: ranks counted row-major over `axes`, first named major; each in one group. op: sum, max or min.
    """
    return _grouped.bind(x, kind=op, groups=_devices(axes, groups))


def broadcast(x: Array, axes: tuple[str, ...], groups: Sequence[Sequence[int]], root: int) -> Array:
    """`x` of the rank in place `root` of each of `groups`, as in `all_reduce`. GPUs only."""
    first = [(group[root], *group[:root], *group[root + 1 :]) for group in groups]
    return _grouped.bind(x, kind="broadcast", groups=_devices(axes, first))


def _devices(axes: tuple[str, ...], groups: Sequence[Sequence[int]]) -> Groups:
    """The devices of each group, as the mesh around us counts them."""
    mesh: Any = jax.sharding.get_abstract_mesh()
    sizes = {str(name): int(size) for name, size in dict(mesh.shape).items()}
    return tuple(
        tuple(ranks[place] for place in group) for ranks in groups_along(axes, sizes) for group in groups
    )


_grouped: Any = Primitive("commplan_grouped")


def _lowered(ctx: Any, x: Any, *, kind: Literal["sum", "max", "min", "broadcast"], groups: Groups) -> Any:
    own, types = cast("Any", stablehlo), cast("Any", ir)
    common: dict[str, Any] = {
        "replica_groups": types.DenseIntElementsAttr.get(np.array(groups, np.int64)),
        "channel_handle": own.ChannelHandle.get(_CHANNEL, _BETWEEN_DEVICES),
    }
    if kind == "broadcast":
        operation = {"results": [x.type], "operands": [x], "attributes": common}  # builders differ by version
        return types.Operation.create("stablehlo.collective_broadcast", **operation).results
    operation = own.AllReduceOp([x.type], [x], use_global_device_ids=True, **common)
    element = types.RankedTensorType.get([], types.RankedTensorType(x.type).element_type)
    body = operation.regions[0].blocks.append(element, element)
    with types.InsertionPoint(body):
        combine = {"sum": own.add, "max": own.maximum, "min": own.minimum}[kind]
        own.return_([combine(*body.arguments)])
    return operation.results


def _batched(args: Sequence[Any], dims: Sequence[Any], **options: Any) -> tuple[Any, Any]:
    return _grouped.bind(args[0], **options), dims[0]


def _type(aval: Any, **_: Any) -> Any:
    return aval


_grouped.def_abstract_eval(_type)
cast("Any", mlir).register_lowering(_grouped, _lowered)
batching.primitive_batchers[_grouped] = _batched
