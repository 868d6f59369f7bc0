"""The plan's graph for the page: `explain.graph` with a copy of what a phase reads inside each phase."""

from __future__ import annotations

import re
from collections.abc import Mapping

from commplan.explain.graph import Box, Drawing, drawing
from commplan.explain.graph import Edge as Arrow
from commplan.ir.plan import Plan, Value
from commplan.report.cut import cut_text, first_of
from commplan.report.document import Edge, Graph, Node

SHOWN = 250  # nodes of a phase
TEXT = 120  # characters of a line in a box
OUTSIDE = re.compile(r"source|input|state")


def graphs(plan: Plan) -> tuple[Graph, ...]:
    """One graph for each phase that does or puts out something."""
    picture = drawing(plan)
    lines = _lines(plan)
    values = {f"{value.name} : {value.type}": value for value in plan.values}
    phases = [box for box in picture.boxes if box.id.startswith("phase")]
    named = zip(plan.phases, phases, strict=True)
    return tuple(_graph(phase.name, box, picture, lines, values) for phase, box in named if box.nodes)


def _lines(plan: Plan) -> dict[str, int]:
    """The plan line of each node of the drawing."""
    lines = {f"source{i}": source.span.line for i, source in enumerate(plan.sources)}
    for word, refs in (("input", plan.inputs), ("state", plan.states)):
        lines |= {f"{word}{i}": plan.value(ref).span.line for i, ref in enumerate(refs)}
    for number, phase in enumerate(plan.phases):
        lines |= {f"phase{number}_stage{i}": stage.span.line for i, stage in enumerate(phase.stages)}
        for i, binding in enumerate(phase.outputs):
            lines[f"phase{number}_output{i}"] = plan.value(binding.value).span.line
    return lines


def _graph(
    phase: str, box: Box, picture: Drawing, lines: Mapping[str, int], values: Mapping[str, Value]
) -> Graph:
    outside = {node.id: node for node in picture.nodes}
    for servers in picture.boxes:
        for node in servers.nodes if servers.id.startswith("server") else ():
            held = (*node.lines, f"on {servers.title.removeprefix('server ')}")
            outside[node.id] = type(node)(node.id, node.kind, held)
    nodes, left_out = first_of(box.nodes, SHOWN, "stages and outputs")
    shown = {node.id for node in nodes}
    arrows = [edge for edge in picture.edges if (edge.head in shown and not edge.back) or edge.tail in shown]
    arrows = [edge for edge in arrows if all(_is_shown(end, shown) for end in (edge.tail, edge.head))]
    # States that a phase reads stand above it, what becomes of them below.
    reads = [outside[edge.tail] for edge in arrows if edge.tail in outside]
    sets = [outside[edge.head] for edge in arrows if edge.back]
    before = {node.id: Node(node.id, node.kind, _cut(node.lines), lines[node.id]) for node in reads}
    after = {
        _after(node.id): Node(_after(node.id), node.kind, _cut((*node.lines, "from now on")), lines[node.id])
        for node in sets
    }
    inside = [Node(node.id, node.kind, _cut(node.lines), lines.get(node.id, 0)) for node in nodes]
    edges = tuple(
        Edge(edge.tail, _after(edge.head) if edge.back else edge.head, _cut(edge.lines),
             _line(edge, lines, values), back=edge.back)
        for edge in arrows
    )  # fmt: skip
    return Graph(phase, box.title, (*before.values(), *inside, *after.values()), edges, left_out)


def _is_shown(end: str, shown: set[str]) -> bool:
    return end in shown or OUTSIDE.match(end) is not None


def _after(node: str) -> str:
    return f"{node}_after"


def _line(edge: Arrow, lines: Mapping[str, int], values: Mapping[str, Value]) -> int:
    """Where the value of an edge is made: the line of the node that it leaves."""
    value = values.get(edge.lines[0]) if edge.lines else None
    return lines.get(edge.tail, value.span.line if value else 0)


def _cut(texts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(cut_text(text, TEXT) for text in texts)
