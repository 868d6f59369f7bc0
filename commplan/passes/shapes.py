"""Shapes of every value of a plan, from what is given for inputs, states and map results."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping

from commplan.diagnostics import CommplanError, Diagnostic, Note
from commplan.ir import plan as graph
from commplan.ir.layout import cut_all
from commplan.ir.schedule import Leaf, Value
from commplan.ir.types import ArrayType, Element, RecordsType, TreeType

Leaves = tuple[Leaf, ...]
Shapes = Mapping[str, Leaves]


def infer(plan: graph.Plan, sizes: Mapping[str, int], shapes: Shapes) -> dict[graph.Ref, Value]:
    """Every value of `plan` as one rank holds it.

    `sizes`: ranks along each axis. `shapes`: leaves by name, per dimensions omitted, split ones
    uncut, records without their batch. Raises every missing (CP0701), unknown (CP0702) and
    contradictory (CP0705) shape at once.
    """
    shaper = _Shaper(plan, sizes, shapes)
    shaper.check_names()
    for value in plan.values:
        shaper.whole(value.id)
    shaper.check_states()
    if shaper.problems:
        raise CommplanError(*shaper.problems.values())
    return {value.id: shaper.local(value) for value in plan.values}


class _Shaper:
    """One inference. `whole` is memoised; None stands for "already reported"."""

    def __init__(self, plan: graph.Plan, sizes: Mapping[str, int], shapes: Shapes) -> None:
        self.plan, self.sizes, self.shapes = plan, sizes, shapes
        self.problems: dict[str, Diagnostic] = {}
        self._values = {value.id: value for value in plan.values}
        self._makers = {r: s for ph in plan.phases for s in ph.stages for r in _results(s)}
        self._states = {self._values[ref].name: ref for ref in plan.states}
        self._inputs = {self._values[ref].name for ref in plan.inputs}
        self._known: dict[graph.Ref, Leaves | None] = {}
        self._sources = {source.name: source for source in plan.sources}

    def local(self, value: graph.Value) -> Value:
        """One rank's share of `value`: batch divided, split leaves cut."""
        leaves = self._known[value.id] or ()
        placement = value.placement
        ways = [self.sizes[axis] for axis in placement.split]
        if isinstance(value.type, RecordsType):
            batch = max(value.type.batch) // math.prod(ways)
            batched = tuple(Leaf(leaf.path, (batch, *leaf.shape), leaf.dtype) for leaf in leaves)
            return Value(value.id, "records", batched, placement)
        kind = "tree" if isinstance(value.type, TreeType) else "array"
        whole = leaves if ways else ()
        return Value(value.id, kind, cut_all(kind, leaves, ways), placement, whole)

    def whole(self, ref: graph.Ref) -> Leaves | None:
        """The leaves of `ref` before any cut (of one record, for records)."""
        if ref not in self._known:
            self._known[ref] = None  # a cycle of states reports itself as missing
            self._known[ref] = self._compute(self._values[ref])
        return self._known[ref]

    def _compute(self, value: graph.Value) -> Leaves | None:
        element = value.type.element if isinstance(value.type, RecordsType) else value.type
        if not isinstance(element, TreeType):
            return self._declared(value, element)
        maker = self._makers.get(value.id)
        if maker is None:
            return self._entry(value)
        match maker:
            case graph.Load():
                given = self._given(value.name) or self._given(maker.source)
                return given or self._missing(value, f"records of source `{maker.source}`")
            case graph.Map():
                return self._mapped(value, maker)
            case graph.Exchange():
                return self.whole(maker.states[maker.results.index(value.id)])
            case graph.Elastic():
                return self.whole(maker.operand if value.id == maker.pull else maker.center)
            case _:
                return self.whole(maker.operand)

    def _declared(self, value: graph.Value, element: Element) -> Leaves | None:
        if not isinstance(element, ArrayType):
            return ()
        leaves = (Leaf("", element.shape, element.dtype),)
        given = self.shapes.get(value.name)
        if given is not None and value.name in self._inputs | set(self._states) and given != leaves:
            return self._differs(value, given, leaves, "the plan declares")
        return leaves

    def _given(self, name: str) -> Leaves | None:
        return self.shapes.get(name)

    def _entry(self, value: graph.Value) -> Leaves | None:
        """An input or a state on entry: given, else what `at start` binds the state to."""
        given = self._given(value.name)
        if given is not None:
            return given
        if value.name not in self._states:
            return self._missing(value, "an input")
        bound = self._updates(value.name, start=True)
        for ref in filter(self._follows, bound):
            return self._structural(ref)
        return self._missing(value, "a state")

    def _updates(self, name: str, *, start: bool) -> list[graph.Ref]:
        phases = [ph for ph in self.plan.phases if not start or ph.kind == "start"]
        return [b.value for ph in phases for b in ph.updates if b.name == name]

    def _follows(self, ref: graph.Ref) -> bool:
        """Whether the shapes of `ref` follow from those of other values."""
        maker = self._makers.get(ref)
        if not isinstance(maker, graph.Map):
            return True
        return self.plan.fn(maker.fn).elementwise and bool(self._tree_operands(maker))

    def _structural(self, ref: graph.Ref) -> Leaves | None:
        """Shapes of what a state is bound to, without asking the state itself."""
        maker = self._makers.get(ref)
        return self._first_tree(maker) if isinstance(maker, graph.Map) else self.whole(ref)

    def _mapped(self, value: graph.Value, maker: graph.Map) -> Leaves | None:
        if value.name in self._states:
            return self.whole(self._states[value.name])
        given = self._given(value.name)
        elementwise = self.plan.fn(maker.fn).elementwise
        if given is not None and not (elementwise and value.name in self._inputs):
            return given
        if elementwise and self._tree_operands(maker):
            return self._first_tree(maker)
        return self._missing(value, f"a result of `{maker.fn}`, which is not elementwise,")

    def _tree_operands(self, maker: graph.Map) -> list[graph.Ref]:
        def is_tree(ref: graph.Ref) -> bool:
            kind = self._values[ref].type
            return isinstance(kind.element if isinstance(kind, RecordsType) else kind, TreeType)

        return [ref for ref in maker.operands if is_tree(ref)]

    def _first_tree(self, maker: graph.Map) -> Leaves | None:
        trees = self._tree_operands(maker)
        return self.whole(trees[0]) if trees else None

    def check_names(self) -> None:
        """Every name in `shapes` must be one of the plan's values or sources (CP0702)."""
        known = {value.name for value in self.plan.values} | set(self._sources)
        for name in self.shapes:
            if name in known:
                continue
            near = difflib.get_close_matches(name, sorted(known), 1)
            hint = f"did you mean `{near[0]}`?" if near else f"its values are: {', '.join(sorted(known))}"
            self._report(name, "CP0702", f"shapes are given for `{name}`, which the plan does not have", hint)

    def check_states(self) -> None:
        """What a state is bound to, and the centre of an elastic pull, must have its shapes (CP0705)."""
        for name, entry in self._states.items():
            for ref in self._updates(name, start=False):
                self._agree(self._values[ref], self.whole(ref), self.whole(entry), f"state `{name}` has")
        for maker in self._makers.values():
            if isinstance(maker, graph.Elastic):
                value = self._values[maker.operand]
                self._agree(value, self.whole(maker.operand), self.whole(maker.center), "its centre has")
            if isinstance(maker, graph.Exchange):
                value = self._values[maker.gradient]
                self._agree(
                    value, self.whole(maker.gradient), self.whole(maker.states[0]), "the weights have"
                )

    def _agree(self, value: graph.Value, found: Leaves | None, expected: Leaves | None, who: str) -> None:
        if found is None or expected is None or value.id in self.problems:
            return
        if [(x.path, x.shape, x.dtype) for x in found] != [(x.path, x.shape, x.dtype) for x in expected]:
            self._differs(value, found, expected, who)

    def _differs(self, value: graph.Value, found: Leaves, expected: Leaves, who: str) -> None:
        first = next(
            (
                f"`{a.path}`: expected {_show(b)}, found {_show(a)}"
                for a, b in zip(found, expected, strict=False)
                if a != b
            ),
            f"expected {len(expected)} leaves, found {len(found)}",
        )
        message = f"`{value.name}` has other shapes than {who}"
        self._report(
            value.id, "CP0705", message, first, "give one set of shapes, or another name", value=value
        )

    def _missing(self, value: graph.Value, what: str) -> None:
        self._report(
            value.id,
            "CP0701",
            f"no shapes are given for `{value.name}`, {what} of type tree".replace(",,", ","),
            f"pass shapes={{{value.name!r}: tree}} whose leaves have shape and dtype, or --shapes FILE with "
            f'{{"{value.name}": {{"w": {{"shape": [3], "dtype": "f32"}}}}}}',
            value=value,
        )

    def _report(
        self, key: str, code: str, message: str, *notes: str, value: graph.Value | None = None
    ) -> None:
        span = value.span if value else None
        remarks = tuple(Note(note) for note in notes)
        name = value.name if value else key
        if code == "CP0701" and any(
            p.code == code and k.rpartition(".")[0] == name for k, p in self.problems.items()
        ):
            return  # said once for the name
        self.problems[key] = Diagnostic(code, message, span, remarks, file=self.plan.file)


def _show(leaf: Leaf) -> str:
    return f"{leaf.path or 'array'} {leaf.dtype}[{', '.join(map(str, leaf.shape))}]"


def _results(stage: graph.Stage) -> tuple[graph.Ref, ...]:
    match stage:
        case graph.Load():
            return (stage.result, *((stage.count,) if stage.count else ()))
        case graph.Map() | graph.Exchange():
            return stage.results
        case graph.Elastic():
            return (stage.pull, stage.result)
        case _:
            return (stage.result,)
