"""The ops of a schedule, one module each, and functions for all of them.

A module defines the fields of an op and its semantics; each backend defines how to run it. `base.BaseOp` has
the interface of an op.
"""

from collections.abc import Collection, Mapping
from typing import TypeVar, get_args

from commplan.ir import refs
from commplan.ir.ops.cast import Cast as Cast
from commplan.ir.ops.collective import Collective as Collective
from commplan.ir.ops.elastic import Elastic as Elastic
from commplan.ir.ops.encode import Decode as Decode
from commplan.ir.ops.encode import Encode as Encode
from commplan.ir.ops.exchange import Exchange as Exchange
from commplan.ir.ops.fragment import Merge as Merge
from commplan.ir.ops.fragment import Pick as Pick
from commplan.ir.ops.get import Get as Get
from commplan.ir.ops.local_sum import LocalSum as LocalSum
from commplan.ir.ops.map import Map as Map
from commplan.ir.ops.pack import Pack as Pack
from commplan.ir.ops.put import Put as Put
from commplan.ir.ops.read import Read as Read
from commplan.ir.ops.scale import Scale as Scale
from commplan.ir.ops.share import Share as Share
from commplan.ir.ops.slice import Slice as Slice
from commplan.ir.ops.unpack import Unpack as Unpack
from commplan.ir.ops.update import Update as Update
from commplan.ir.refs import Ref
from commplan.ir.transfer import ValueTypes
from commplan.ir.values import Value

# Any op.
Op = (
    Read | Map | Share | Pack | Unpack | Cast | Collective | LocalSum | Scale | Slice | Elastic
    | Update | Exchange | Put | Get | Pick | Merge | Encode | Decode
)  # fmt: skip
AnyOp = TypeVar("AnyOp", bound=Op)

# For each type of op, a function from an op to some of its values.
_OPERANDS = {kind: refs.getter(kind, kind.READS) for kind in get_args(Op)}
_RESULTS = {kind: refs.getter(kind, kind.WRITES) for kind in get_args(Op)}
_SHAPED_BY = {kind: refs.getter(kind, kind.SHAPED_BY) for kind in get_args(Op)}
_SERVER_OPERANDS = {kind: refs.getter(kind, kind.SERVER_OPERANDS) for kind in get_args(Op)}


def operands(op: Op) -> tuple[Ref, ...]:
    """The values that `op` reads, in the order of `READS`, without `after`."""
    return _OPERANDS[type(op)](op)


def results(op: Op) -> tuple[Ref, ...]:
    """The values that `op` makes, in the order of `WRITES`."""
    return _RESULTS[type(op)](op)


def shaped_by(op: Op) -> tuple[Ref, ...]:
    """The values whose pytree structure `op` copies, but whose elements it does not read."""
    return _SHAPED_BY[type(op)](op)


def server_operands(op: Op) -> tuple[Ref, ...]:
    """The operands of `op` that servers store."""
    return _SERVER_OPERANDS[type(op)](op)


def substitute(op: AnyOp, names: Mapping[Ref, Ref]) -> AnyOp:
    """`op` with operands renamed by `names`, both whole values and parts of values."""
    return refs.substitute(op, names, (*op.READS, *op.SHAPED_BY))


def rename_results(op: AnyOp, names: Mapping[Ref, Ref]) -> AnyOp:
    """`op` with results renamed by `names`."""
    return refs.substitute(op, names, op.WRITES)


def add_results(op: Op, types: ValueTypes, values: dict[Ref, Value], declared: Collection[Ref]) -> None:
    """Add the results of `op` to `values`.

    Args:
        op: The op.
        types: The axes, and the values that `op` reads.
        values: Receives the results by name.
        declared: The values that the plan defines. They are not added, except flat buffers.
    """
    for value in op.transfer(types):
        if value.id not in declared or value.kind == "flat":
            values[value.id] = value
