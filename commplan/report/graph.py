"""The graph of each phase, from `explain.graph`, with copies of the values that the phase reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

from msgspec.structs import replace

from commplan.explain.graph import Box, Drawing, Edge, Node, drawing
from commplan.ir.plan import Plan
from commplan.report.document import PhaseGraph, cut_text, first_of

SHOWN = 250  # most stages and outputs of a phase
TEXT = 120  # most characters of a line in a box
OUTSIDE = re.compile(r"source|input|state")  # the beginnings of `Node.id` of nodes outside of phases
Shape = TypeVar("Shape", Node, Edge)


def graphs(plan: Plan) -> tuple[PhaseGraph, ...]:
    """One graph for each nonempty phase, in the order of the plan."""
    picture = drawing(plan)
    lines = {node.id: node.line for node in picture.every_node}
    phases = [box for box in picture.boxes if box.id.startswith("phase")]
    pairs = zip(plan.phases, phases, strict=True)
    return tuple(_graph(phase.name, box, picture, lines) for phase, box in pairs if box.nodes)


def _graph(phase: str, box: Box, picture: Drawing, lines: Mapping[str, int]) -> PhaseGraph:
    """The graph of one phase.

    Args:
        phase: name of the phase.
        box: its box in `picture`.
        picture: the drawing of the plan.
        lines: the plan line of each node.
    """
    # Nodes outside of phases. States on servers are drawn with the name of their server, without its box.
    outside = {node.id: node for node in picture.nodes}
    for servers in picture.boxes:
        for node in servers.nodes if servers.id.startswith("server") else ():
            texts = (*node.texts, f"on {servers.title.removeprefix('server ')}")
            outside[node.id] = replace(node, texts=texts)
    nodes, left_out = first_of(box.nodes, SHOWN, "stages and outputs")
    shown = {node.id for node in nodes}
    arrows = [edge for edge in picture.edges if (edge.head in shown and not edge.back) or edge.tail in shown]
    arrows = [edge for edge in arrows if all(_is_shown(end, shown) for end in (edge.tail, edge.head))]
    # The states that a phase reads are drawn above it, their new values below.
    reads = {edge.tail: outside[edge.tail] for edge in arrows if edge.tail in outside}
    sets = {edge.head: outside[edge.head] for edge in arrows if edge.back}
    after = [replace(node, id=_after(node.id), texts=(*node.texts, "from now on")) for node in sets.values()]
    edges = (
        replace(edge, head=_after(edge.head) if edge.back else edge.head, line=lines[edge.tail])
        for edge in arrows
    )
    placed = (*reads.values(), *nodes, *after)
    return PhaseGraph(phase, box.title, tuple(map(_cut, placed)), tuple(map(_cut, edges)), left_out)


def _is_shown(end: str, shown: set[str]) -> bool:
    """Whether the node `end` of an edge is drawn: nodes outside of phases always are."""
    return end in shown or OUTSIDE.match(end) is not None


def _after(node: str) -> str:
    """The id of the node for the new value of a state."""
    return f"{node}_after"


def _cut(shape: Shape) -> Shape:
    """Truncate the texts of a node or edge."""
    return replace(shape, texts=tuple(cut_text(text, TEXT) for text in shape.texts))
