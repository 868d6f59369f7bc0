"""The rules of single ops: what shapes, dtypes and axes go in and come out."""

from __future__ import annotations

import itertools
import math
import re

from commplan.ir.layout import cut, row_size
from commplan.ir.plan import AxisKind, name_of
from commplan.ir.schedule import (
    Cast,
    Collective,
    Elastic,
    Exchange,
    Get,
    Leaf,
    LocalSum,
    Map,
    Op,
    Pack,
    Part,
    Put,
    Read,
    Scale,
    Share,
    Slice,
    Unpack,
    Update,
    Value,
)
from commplan.ir.stages import rules
from commplan.ir.types import ArrayType, DType
from commplan.verify.algorithms import check_algorithm
from commplan.verify.scope import Scope
from commplan.verify.servers import check_server_op

_LANES = re.compile(r"host_read|host_compute|device|network(:.+)?")


def check_op(scope: Scope, op: Op) -> None:
    """Report what is wrong with `op`, whose operands and results are known to exist."""
    if not _LANES.fullmatch(op.lane):
        scope.report.add("CP0735", f"there is no lane `{op.lane}`", op.span)
    match op:
        case Read():
            _read(scope, op)
        case Map():
            _map(scope, op)
        case Share():
            _share(scope, op)
        case Pack():
            _pack(scope, op)
        case Unpack():
            _unpack(scope, op)
        case Cast():
            wanted = tuple(Leaf(x.path, x.shape, op.dtype) for x in scope.values[op.operand].leaves)
            _leaves(scope, op, scope.values[op.result], wanted)
        case Collective():
            _collective(scope, op)
        case LocalSum():
            _local_sum(scope, op)
        case Scale():
            _scale(scope, op)
        case Slice():
            _slice(scope, op)
        case Elastic():
            _elastic(scope, op)
        case Update():
            _leaves(scope, op, scope.values[op.delta], scope.values[op.operand].leaves)
            _leaves(scope, op, scope.values[op.result], scope.values[op.operand].leaves)
        case Exchange():
            _exchange(scope, op)
        case Put() | Get():
            _leaves(scope, op, scope.values[op.result], scope.values[op.operand].leaves)
            check_server_op(scope, op)


def _leaves(scope: Scope, op: Op, value: Value, wanted: tuple[Leaf, ...]) -> None:
    if value.leaves != wanted:
        message = f"`{value.id}` has the leaves {_show(value.leaves)}, {_show(wanted)} were expected"
        scope.report.add("CP0731", message, op.span)


def _show(leaves: tuple[Leaf, ...]) -> str:
    shown = [f"{leaf.path or 'array'} {leaf.dtype}{list(leaf.shape)}" for leaf in leaves[:3]]
    return ", ".join([*shown, "..."] if len(leaves) > 3 else shown) or "none"


def _axes(scope: Scope, op: Op, axes: tuple[str, ...], *, kind: AxisKind | None = None) -> bool:
    """Whether `axes` are known, no servers, named once, and of `kind` where one is wanted."""
    for axis in axes:
        if axis not in scope.sizes:
            scope.report.add("CP0734", f"there is no axis `{axis}`", op.span)
            return False
        if scope.kinds[axis] is AxisKind.SERVER or (kind and scope.kinds[axis] is not kind):
            scope.report.add("CP0734", f"`{axis}` is a {scope.kinds[axis]} and cannot be used here", op.span)
            return False
    if len(set(axes)) != len(axes):
        scope.report.add("CP0734", f"an axis is named twice: {', '.join(axes)}", op.span)
        return False
    return True


def _read(scope: Scope, op: Read) -> None:
    value, report = scope.values[op.result], scope.report
    source = next((s for s in scope.schedule.sources if s.name == op.source), None)
    if source is None:
        report.add("CP0730", f"there is no source `{op.source}`", op.span)
        return
    if value.kind != "records":
        report.add("CP0731", f"`{op.result}` is read, but is no batch of records", op.span)
    if not op.batch or min(op.batch) < 1:
        report.add("CP0735", f"a batch of {list(op.batch)} records cannot be read", op.span)
        return
    report.refuse("CP0735", rules.dropped_tail(op.visit, op.tail), op.span)
    report.refuse("CP0735", rules.short_tail(op.tail, op.split), op.span)
    if not _axes(scope, op, op.split) or not _axes(scope, op, op.per, kind=AxisKind.ENSEMBLE):
        return
    ways = scope.ranks(op.split)
    report.refuse("CP0735", rules.even_batch(op.batch, op.split, scope.ranks), op.span)
    report.refuse("CP0735", rules.member_batches(op.batch, op.clock, scope.ranks), op.span)
    local = max(op.batch) // ways
    if isinstance(source.type, ArrayType):
        _leaves(scope, op, value, (Leaf("", (local, *source.type.shape), source.type.dtype),))
    elif any(leaf.shape[:1] != (local,) for leaf in value.leaves):
        report.add("CP0731", f"`{op.result}` does not hold {local} records on each rank", op.span)
    if value.placement.split != op.split:
        report.add(
            "CP0734", f"`{op.result}` is {value.placement}, but is read split {list(op.split)}", op.span
        )
    if op.count is not None:
        _leaves(scope, op, scope.values[op.count], (Leaf("", (), DType.I32),))


def _map(scope: Scope, op: Map) -> None:
    fn = scope.axes.fns.get(op.fn)
    if fn is None:
        scope.report.add("CP0730", f"there is no function `{op.fn}`", op.span)
        return
    for what, found, wanted in (
        ("operands", len(op.operands), len(fn.operands)),
        ("results", len(op.results), len(fn.results)),
    ):
        if found != wanted:
            scope.report.add("CP0731", f"`{op.fn}` has {wanted} {what}, {found} are written", op.span)
            return
    lane = "host_compute" if fn.where == "host" else "device"
    if op.lane != lane or op.random != fn.random:
        scope.report.add("CP0735", f"`{op.fn}` is a {fn.where} function, but runs on lane {op.lane}", op.span)
    _axes(scope, op, op.per, kind=AxisKind.ENSEMBLE)
    types = zip((*op.operands, *op.results), (*fn.operands, *fn.results), strict=True)
    for index, (ref, kind) in enumerate(types):
        value = scope.values[ref]
        by_record = op.per_record and (value.kind == "records" or index >= len(op.operands))
        if not isinstance(kind, ArrayType) or not value.leaves:
            continue
        if len(value.leaves) != 1 or value.leaves[0].dtype != kind.dtype:
            scope.report.add("CP0731", f"`{ref}` is {_show(value.leaves)}, `{op.fn}` wants {kind}", op.span)
        elif by_record and value.leaves[0].shape[1:] != kind.shape:
            scope.report.add("CP0731", f"records of `{ref}` are {_show(value.leaves)}, not {kind}", op.span)


def _share(scope: Scope, op: Share) -> None:
    operand, result = scope.values[op.operand], scope.values[op.result]
    name = name_of(op.operand)
    scope.report.refuse("CP0731", rules.loaded(name, records=operand.kind == "records"), op.span)
    _leaves(scope, op, result, operand.leaves)
    if not _axes(scope, op, op.axes, kind=AxisKind.ENSEMBLE):
        return
    varying = [axis for axis in op.axes if operand.placement.varies(axis)]
    scope.report.refuse("CP0734", rules.alike(name, varying), op.span)
    scope.report.refuse("CP0735", rules.chosen("readers", op.readers, op.axes, scope.ranks), op.span)


def _part_fits(scope: Scope, op: Pack | Unpack, part: Part, value: Value, columns: int) -> bool:
    """Whether `part` lies inside leaf and buffer; `value` holds the leaf, a buffer row `columns`."""
    if not 0 <= part.leaf < len(value.leaves):
        scope.report.add("CP0731", f"`{value.id}` has no leaf {part.leaf}", op.span)
        return False
    row = row_size(value.kind, value.leaves[part.leaf], op.ways)
    inside = part.start >= 0 and part.size >= 1 and part.start + part.size <= row
    if not inside or not 0 <= part.offset <= columns - part.size:
        where = f"elements {part.start} to {part.start + part.size} of leaf {part.leaf} of `{value.id}`"
        scope.report.add(
            "CP0731", f"{where} do not lie inside its row of {row} and the buffer's of {columns}", op.span
        )
        return False
    return True


def _pack(scope: Scope, op: Pack) -> None:
    result = scope.values[op.result]
    if result.kind != "flat":
        scope.report.add("CP0731", f"`{op.result}` is packed, but is not flat", op.span)
        return
    if op.ways < 1 or result.leaves[0].size % op.ways:
        scope.report.add("CP0735", f"{result.leaves[0].size} elements have no {op.ways} equal rows", op.span)
        return
    columns, taken = result.leaves[0].size // op.ways, list[tuple[int, int]]()
    for part in op.parts:
        value = scope.values[part.value]
        if not _part_fits(scope, op, part, value, columns):
            return
        if value.leaves[part.leaf].dtype != result.leaves[0].dtype:
            dtype = value.leaves[part.leaf].dtype
            scope.report.add(
                "CP0732", f"a leaf of {dtype} is packed into a buffer of {result.leaves[0].dtype}", op.span
            )
        taken.append((part.offset, part.offset + part.size))
    taken.sort()
    if any(before[1] > after[0] for before, after in itertools.pairwise(taken)):
        scope.report.add("CP0731", f"two parts overlap in `{op.result}`", op.span)


def _unpack(scope: Scope, op: Unpack) -> None:
    result = scope.values[op.result]
    if op.ways < 1:
        scope.report.add("CP0735", f"a buffer has no {op.ways} rows", op.span)
        return
    runs: dict[int, list[tuple[int, int]]] = {index: [] for index in range(len(result.leaves))}
    for part in op.parts:
        buffer = scope.values[part.value]
        if buffer.kind != "flat" or buffer.leaves[0].size % op.ways:
            scope.report.add("CP0731", f"`{part.value}` is no flat buffer of {op.ways} rows", op.span)
            return
        if not _part_fits(scope, op, part, result, buffer.leaves[0].size // op.ways):
            return
        if buffer.leaves[0].dtype != result.leaves[part.leaf].dtype:
            dtype = result.leaves[part.leaf].dtype
            scope.report.add(
                "CP0732", f"a leaf of {dtype} is unpacked from {buffer.leaves[0].dtype}", op.span
            )
        runs[part.leaf].append((part.start, part.start + part.size))
    for index, leaf in enumerate(result.leaves):
        end = 0
        for start, stop in sorted(runs[index]):
            if start != end:
                break
            end = stop
        if end != row_size(result.kind, leaf, op.ways) or len(set(runs[index])) != len(runs[index]):
            scope.report.add(
                "CP0731", f"leaf `{leaf.path}` of `{op.result}` is not unpacked exactly once", op.span
            )


def _collective(scope: Scope, op: Collective) -> None:
    operand, result, report = scope.values[op.operand], scope.values[op.result], scope.report
    if not op.axes or not _axes(scope, op, op.axes):
        if not op.axes:
            report.add("CP0734", "a collective over no axis", op.span)
        return
    reduces = op.kind in ("all_reduce", "reduce_scatter", "reduce")
    rooted = op.kind in ("broadcast", "reduce")
    if reduces != (op.op is not None):
        report.add("CP0735", f"{op.kind} and op {op.op} do not go together", op.span)
    if rooted != (op.root is not None):
        report.add("CP0735", f"{op.kind} and root {op.root} do not go together", op.span)
    elif op.root is None or not report.refuse("CP0735", rules.root(op.root, op.axes, scope.ranks), op.span):
        check_algorithm(scope, op)
    report.refuse("CP0735", rules.summable(op.op or "", operand.leaves, op.operand), op.span)
    if op.nbytes != operand.nbytes:
        report.add("CP0732", f"`{op.operand}` has {operand.nbytes} bytes, not {op.nbytes}", op.span)
    widest = max((leaf.dtype.nbytes for leaf in operand.leaves), default=op.dtype.nbytes)
    known = {leaf.dtype for leaf in operand.leaves} or {op.dtype}
    if op.dtype not in known or op.dtype.nbytes != widest:
        report.add("CP0732", f"{op.dtype} is not the widest type of `{op.operand}`", op.span)
    _collective_shapes(scope, op, operand, result)
    _collective_placements(scope, op, operand, result)


def _collective_shapes(scope: Scope, op: Collective, operand: Value, result: Value) -> None:
    ways, flat = scope.ranks(op.axes), operand.kind == "flat"
    if flat != (result.kind == "flat"):
        scope.report.add(
            "CP0731", f"`{op.operand}` is {operand.kind}, `{op.result}` is {result.kind}", op.span
        )
        return
    size = operand.leaves[0].size if flat else 0
    if flat and op.kind in ("reduce_scatter", "all_to_all") and size % ways:
        scope.report.add("CP0731", f"{size} elements of `{op.operand}` are no {ways} equal rows", op.span)
        return
    match op.kind:
        case "reduce_scatter" | "all_to_all" if flat:
            size = size // ways if op.kind == "reduce_scatter" else size
            _leaves(scope, op, result, (Leaf("", (size,), operand.leaves[0].dtype),))
        case "all_gather" if flat:
            _leaves(scope, op, result, (Leaf("", (size * ways,), operand.leaves[0].dtype),))
        case "reduce_scatter":
            _leaves(scope, op, result, tuple(cut(operand.kind, leaf, ways) for leaf in operand.leaves))
        case "all_gather":
            _leaves(scope, op, operand, tuple(cut(operand.kind, leaf, ways) for leaf in result.leaves))
        case "all_to_all":
            scope.report.add(
                "CP0731", f"`{op.operand}` is {operand.kind}: an all_to_all moves flat buffers", op.span
            )
        case _:
            _leaves(scope, op, result, operand.leaves)


def _collective_placements(scope: Scope, op: Collective, operand: Value, result: Value) -> None:
    for axis in op.axes:
        if op.kind != "all_to_all" and not operand.placement.varies(axis):
            scope.report.add("CP0734", f"`{op.operand}` is the same over `{axis}` already", op.span)
        left = result.placement.varies(axis)
        if left != (op.kind in ("reduce_scatter", "all_to_all", "reduce")):
            state = "still differs" if left else "does not differ"
            scope.report.add("CP0734", f"`{op.result}` {state} over `{axis}` after {op.kind}", op.span)


def _local_sum(scope: Scope, op: LocalSum) -> None:
    operand, result = scope.values[op.operand], scope.values[op.result]
    if operand.kind != "flat" or op.ways < 1 or operand.leaves[0].size % op.ways:
        scope.report.add("CP0731", f"`{op.operand}` is no flat buffer of {op.ways} rows", op.span)
        return
    leaf = operand.leaves[0]
    _leaves(scope, op, result, (Leaf("", (leaf.size // op.ways,), leaf.dtype),))


def _scalar(scope: Scope, op: Op, ref: str) -> None:
    value = scope.values[ref]
    if len(value.leaves) != 1 or value.leaves[0].shape:
        scope.report.add("CP0731", f"`{ref}` is {_show(value.leaves)}: a scalar was expected", op.span)


def _scale(scope: Scope, op: Scale) -> None:
    _leaves(scope, op, scope.values[op.result], scope.values[op.operand].leaves)
    if isinstance(op.by, str):
        _scalar(scope, op, op.by)
    elif op.by == 0 or not math.isfinite(op.by):
        scope.report.add("CP0735", f"`{op.operand}` is scaled by {op.by}", op.span)


def _slice(scope: Scope, op: Slice) -> None:
    if not op.axes:
        scope.report.add("CP0734", f"`{op.result}` is sliced over no axis", op.span)
    if not op.axes or not _axes(scope, op, op.axes):
        return
    operand, result = scope.values[op.operand], scope.values[op.result]
    ways = len(op.owners) or scope.ranks(op.axes)
    _leaves(scope, op, result, tuple(cut(operand.kind, leaf, ways) for leaf in operand.leaves))
    if op.owners:
        _owners(scope, op, result)
    elif result.placement.split != (*operand.placement.split, *op.axes):
        over = ", ".join(op.axes)
        scope.report.add("CP0734", f"`{op.result}` is {result.placement} sliced over `{over}`", op.span)


def _owners(scope: Scope, op: Slice, result: Value) -> None:
    """Every part has one owner, and ranks differ in what they keep."""
    if len(set(op.owners)) != len(op.owners):
        scope.report.add("CP0735", f"a rank owns two parts of `{op.operand}`: {list(op.owners)}", op.span)
    if not all(0 <= rank < scope.ranks(op.axes) for rank in op.owners):
        scope.report.add(
            "CP0735", f"there is no such owner among {scope.ranks(op.axes)} ranks: {list(op.owners)}", op.span
        )
    if result.placement.split or not all(result.placement.varies(axis) for axis in op.axes):
        placement = result.placement
        scope.report.add("CP0734", f"`{op.result}` is {placement}, but only owners keep its parts", op.span)


def _elastic(scope: Scope, op: Elastic) -> None:
    _axes(scope, op, op.axes)
    wanted = scope.values[op.operand].leaves
    _leaves(scope, op, scope.values[op.center], wanted)
    _leaves(scope, op, scope.values[op.pull], wanted)
    for scalar in (op.eta, op.rho):
        if isinstance(scalar, str):
            _scalar(scope, op, scalar)
    if (op.mode == "sync") != (op.result is None):
        scope.report.add("CP0735", f"an elastic op in mode {op.mode} has the wrong results", op.span)
    check_server_op(scope, op)


def _exchange(scope: Scope, op: Exchange) -> None:
    _axes(scope, op, op.axes)
    if op.fn not in scope.axes.fns:
        scope.report.add("CP0730", f"there is no function `{op.fn}`", op.span)
    if len(op.results) != len(op.states):
        scope.report.add(
            "CP0731", f"{len(op.states)} states are exchanged for {len(op.results)} results", op.span
        )
        return
    for state, result in zip(op.states, op.results, strict=True):
        _leaves(scope, op, scope.values[result], scope.values[state].leaves)
    if op.weight is not None:
        _scalar(scope, op, op.weight)
    check_server_op(scope, op)
