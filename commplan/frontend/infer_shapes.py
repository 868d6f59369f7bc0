"""Infer the shapes of all values of a plan from those of inputs, states and map results.

`infer` runs after `bind_axes` and before `lower`. It also reports missing and contradictory shapes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from commplan.diagnostics import fail_if
from commplan.frontend.shape_errors import (
    Leaves,
    ShapeReport,
    Shapes,
    check_agreement,
    check_names,
    fragments,
    is_tree,
)
from commplan.ir import plan as graph
from commplan.ir.fragments import FragmentLayout, is_divisible
from commplan.ir.schedule import Leaf, Value
from commplan.ir.shard_shapes import cut_all
from commplan.ir.types import ArrayType, RecordsType, TreeType


def infer(plan: graph.Plan, sizes: Mapping[str, int], shapes: Shapes) -> dict[graph.Ref, Value]:
    """All values of `plan` as held by one rank, by reference.

    Args:
        plan: The plan.
        sizes: The number of ranks along each axis, by name.
        shapes: Leaves of trees by the name of the value, or of the source for loads. They are those of one
            member (without `per` dimensions), before any split, and of one record for records. Shapes of
            states and results that the plan implies may be missing.

    Raises:
        CommplanError: With all missing (CP0701), unknown (CP0702) and contradictory (CP0705) shapes, and
            scalars that cannot be cut into fragments (CP0773).
    """
    report = ShapeReport(plan.file)
    check_names(plan, shapes, report)
    shaper = _Shaper(plan, sizes, shapes, report)
    leaves = {value.id: shaper.whole(value.id) for value in plan.values}
    check_agreement(plan, shapes, leaves, report)
    fail_if(report.problems)
    return {value.id: shaper.local(value) for value in plan.values}


class _Shaper:
    """The inference of one plan. `whole` must be called for all values before `local`.

    `whole` and the methods that it calls return the leaves of whole values, before any split, and per record
    for records. None means that they are unknown, and that this is or will be reported.
    """

    def __init__(
        self, plan: graph.Plan, sizes: Mapping[str, int], shapes: Shapes, report: ShapeReport
    ) -> None:
        self.plan, self.sizes, self.shapes = plan, sizes, shapes
        self._report = report
        self._values = {value.id: value for value in plan.values}
        self._states = {self._values[ref].name: ref for ref in plan.states}
        self._inputs = {self._values[ref].name for ref in plan.inputs}
        self._fragments = fragments(plan)
        self._leaves: dict[graph.Ref, Leaves | None] = {}

    def local(self, value: graph.Value) -> Value:
        """One rank's shard of `value`, whose batch is divided and whose leaves are cut along `split` axes."""
        leaves = self._leaves[value.id] or ()
        placement = value.placement
        ways = [self.sizes[axis] for axis in placement.split]
        if isinstance(value.type, RecordsType):
            batch = max(value.type.batch) // math.prod(ways)
            batched = tuple(Leaf(leaf.path, (batch, *leaf.shape), leaf.dtype) for leaf in leaves)
            return Value(value.id, "records", batched, placement)
        kind = "tree" if isinstance(value.type, TreeType) else "array"
        if kind == "tree" and ways and self._global_batch(value.id):
            kind = "records"  # cut between records, not through flattened leaves
            return Value(value.id, kind, cut_all(kind, leaves, ways), placement)
        whole = leaves if ways else ()
        return Value(value.id, kind, cut_all(kind, leaves, ways), placement, whole)

    def _global_batch(self, ref: graph.Ref) -> int | None:
        """The global batch size of a tree or array that a per-record function makes on the device, else None.

        The leading dimension of its leaves counts records. If members have different batches, this is the
        largest one.
        """
        maker = self.plan.stage(ref)
        if not isinstance(maker, graph.MapStage) or not maker.per_record:
            return None
        operand_types = (self._values[operand].type for operand in maker.operands)
        records = next((each for each in operand_types if isinstance(each, RecordsType)), None)
        are_records = isinstance(self._values[ref].type, RecordsType)
        return None if are_records or records is None else max(records.batch)

    def whole(self, ref: graph.Ref) -> Leaves | None:
        """The leaves of `ref` before any split, per record for records. Results are cached."""
        if ref not in self._leaves:
            self._leaves[ref] = None  # a cycle that comes back here is reported by the outer call
            self._leaves[ref] = self._compute(self._values[ref])
        return self._leaves[ref]

    def _compute(self, value: graph.Value) -> Leaves | None:
        """As `whole`, from the declared type, or for trees from the stage that makes `value`."""
        element = value.type.element if isinstance(value.type, RecordsType) else value.type
        if not isinstance(element, TreeType):
            return (Leaf("", element.shape, element.dtype),) if isinstance(element, ArrayType) else ()
        maker = self.plan.stage(value.id)
        if maker is None:
            return self._entry(value)
        match maker:
            case graph.Load():
                record = self.shapes.get(value.name, self.shapes.get(maker.source))
                if record is None:
                    return self._report.missing(value, f"records of source `{maker.source}`")
                return record
            case graph.MapStage():
                leaves, batch = self._map_leaves(value, maker), self._global_batch(value.id)
                if leaves is None or batch is None:
                    return leaves
                return tuple(Leaf(leaf.path, (batch, *leaf.shape), leaf.dtype) for leaf in leaves)
            case graph.ExchangeStage():
                return self.whole(maker.states[maker.results.index(value.id)])
            case graph.PickStage():
                return self._pieces(maker, maker.operand)
            case graph.MergeStage():
                return self._merged(maker)
            case graph.ElasticStage():
                return self.whole(maker.operand if value.id == maker.pull else maker.center)
            case _:
                return self.whole(maker.operand)

    def _pieces(self, maker: graph.PickStage | graph.MergeStage, ref: graph.Ref) -> Leaves | None:
        """The leaves of a fragment of the input or state `ref`. Reports CP0773 for a scalar."""
        leaves = self.whole(ref)
        scalar = next((leaf for leaf in leaves or () if not is_divisible(leaf, maker.rows)), None)
        if scalar is not None:
            message = f"{scalar.label(ref)} is a scalar, which cannot be cut into fragments"
            note = "give it a dimension, or use an optimizer without a count of steps"
            return self._report.add("CP0773", ref, message, note, value=self._values[ref])
        layout = FragmentLayout(maker.fragments, math.prod(self.sizes[axis] for axis in maker.rows))
        return leaves and tuple(map(layout.piece, leaves))

    def _merged(self, maker: graph.MergeStage) -> Leaves | None:
        """The leaves of the whole value. Reports CP0705 if the piece does not have those of a fragment."""
        piece, expected = self.whole(maker.piece), self._pieces(maker, maker.whole)
        if piece is not None and expected is not None and piece != expected:
            subject = f"a fragment of `{graph.name_of(maker.whole)}`"
            self._report.differs(self._values[maker.piece], piece, expected, subject)
        return self.whole(maker.whole)

    def _entry(self, value: graph.Value) -> Leaves | None:
        """The leaves of an input or state, as passed in.

        Those of a state may be missing. Then they are those of the value that phase `at start` binds to it,
        if a stage other than `map` or an elementwise function of trees makes that value.
        """
        leaves = self.shapes.get(value.name)
        if leaves is not None:
            return leaves
        if value.name not in self._states:
            return self._report.missing(value, "an input")
        start = (phase for phase in self.plan.phases if phase.kind == "start")
        bound = [b.value for phase in start for b in phase.updates if b.name == value.name]
        for ref in bound:
            maker = self.plan.stage(ref)
            if not isinstance(maker, graph.MapStage):
                return self.whole(ref)
            if self.plan.fn(maker.fn).elementwise and self._tree_operands(maker):
                return self._like_operand(maker, ref)  # does not depend on the shape of the state
        return self._report.missing(value, "a state")

    def _map_leaves(self, value: graph.Value, maker: graph.MapStage) -> Leaves | None:
        """The leaves of a result of `map`, from the first of these that applies.

        1. In a phase in fragments, the operands: passed shapes are those of whole values.
        2. The shapes passed for its name, unless the function is built in, or is elementwise and the name is
           that of an input.
        3. The operands of an elementwise function.
        4. The state of the same name.
        """
        passed, fn = self.shapes.get(value.name), self.plan.fn(maker.fn)
        if value.id in self._fragments and self._tree_operands(maker):
            return self._like_operand(maker, value.id)
        if passed is not None and fn.body is None and not (fn.elementwise and value.name in self._inputs):
            return passed
        if fn.elementwise and self._tree_operands(maker):
            return self._like_operand(maker, value.id)
        if value.name in self._states:
            return self.whole(self._states[value.name])
        return self._report.missing(value, f"a result of `{maker.fn}`, which is not elementwise,")

    def _tree_operands(self, maker: graph.MapStage) -> list[graph.Ref]:
        """The operands that are trees, or records of trees."""
        return [ref for ref in maker.operands if is_tree(self._values[ref])]

    def _like_operand(self, maker: graph.MapStage, ref: graph.Ref) -> Leaves | None:
        """The leaves of the result `ref` of an elementwise function.

        They are those of the first tree operand. For a built-in function, result i has those of operand i,
        except that a cast changes their types.
        """
        body = self.plan.fn(maker.fn).body
        if body is None:
            return self.whole(self._tree_operands(maker)[0])
        index = maker.results.index(ref)
        leaves = self.whole(maker.operands[index])
        return leaves and (body.results([leaves]) if body.dtype else (leaves,))[0]
