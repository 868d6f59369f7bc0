"""Reductions and broadcasts within groups of ranks along axes, which `jax.lax` lacks for typed values.

They are one primitive, which has no derivative; callers define one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import jax
import numpy as np
from jax import Array
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import batching, mlir

from commplan.ir.axes import groups as groups_along
from commplan.lowering.collective_primitives import GROUPED

Groups = tuple[tuple[int, ...], ...]  # the devices of each group, in the numbers of the mesh
_CHANNEL = 1  # the channel id that JAX uses for its own collectives
_BETWEEN_DEVICES = 1  # StableHLO's type of channels from device to device


def all_reduce(x: Array, axes: tuple[str, ...], groups: Sequence[Sequence[int]], op: str = "sum") -> Array:
    """The sum, maximum or minimum of `x` over the ranks of each group.

    Args:
        x: This rank's operand: numbers, not booleans.
        axes: The axes along which the ranks are counted, row-major, the first axis major.
        groups: The ranks of each group; each rank is in one group, and all groups have the same size.
        op: The reduction: sum, max or min.
    """
    return _grouped.bind(x, kind=op, axes=axes, groups=_devices(axes, groups))


def broadcast(x: Array, axes: tuple[str, ...], groups: Sequence[Sequence[int]], root: int) -> Array:
    """`x` of the rank at index `root` of this rank's group. GPUs only; see `all_reduce` for the arguments."""
    first = [(group[root], *group[:root], *group[root + 1 :]) for group in groups]
    return _grouped.bind(x, kind="broadcast", axes=axes, groups=_devices(axes, first))


def _devices(axes: tuple[str, ...], groups: Sequence[Sequence[int]]) -> Groups:
    """The devices of each group, as numbered by the surrounding mesh."""
    mesh: Any = jax.sharding.get_abstract_mesh()
    sizes = {str(name): int(size) for name, size in dict(mesh.shape).items()}
    return tuple(
        tuple(ranks[index] for index in group) for ranks in groups_along(axes, sizes) for group in groups
    )


_grouped: Any = Primitive(GROUPED)


def _lowered(
    ctx: Any, x: Any, *, kind: Literal["sum", "max", "min", "broadcast"], axes: Any, groups: Groups
) -> Any:
    """Emit the StableHLO operation."""
    dialect, types = cast("Any", stablehlo), cast("Any", ir)
    common: dict[str, Any] = {
        "replica_groups": types.DenseIntElementsAttr.get(np.array(groups, np.int64)),
        "channel_handle": dialect.ChannelHandle.get(_CHANNEL, _BETWEEN_DEVICES),
    }
    if kind == "broadcast":
        # The builders of operations differ between versions of JAX.
        operation = {"results": [x.type], "operands": [x], "attributes": common}
        return types.Operation.create("stablehlo.collective_broadcast", **operation).results
    operation = dialect.AllReduceOp([x.type], [x], use_global_device_ids=True, **common)
    element = types.RankedTensorType.get([], types.RankedTensorType(x.type).element_type)
    body = operation.regions[0].blocks.append(element, element)
    with types.InsertionPoint(body):
        combine = {"sum": dialect.add, "max": dialect.maximum, "min": dialect.minimum}[kind]
        dialect.return_([combine(*body.arguments)])
    return operation.results


def _batched(args: Sequence[Any], dims: Sequence[Any], **options: Any) -> tuple[Any, Any]:
    return _grouped.bind(args[0], **options), dims[0]


def _type(aval: Any, **_: Any) -> Any:
    return aval


_grouped.def_abstract_eval(_type)
cast("Any", mlir).register_lowering(_grouped, _lowered)
batching.primitive_batchers[_grouped] = _batched
