"""Draws the plan graph: phases as boxes, stages as nodes, types and placements on the edges."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import msgspec

from commplan.explain.stages import phase_title, stage_lines
from commplan.ir.plan import (
    AxisKind,
    Load,
    MapStage,
    MergeStage,
    Phase,
    PickStage,
    Plan,
    Ref,
    SliceStage,
    Stage,
    name_of,
    operands,
    results,
)

Kind = Literal["source", "input", "state", "host", "device", "network", "output"]


class Node(msgspec.Struct, frozen=True):
    """A node of the graph.

    Attributes:
        id: An identifier that is unique in the drawing, in the syntax of both output languages.
        kind: The kind, which determines its appearance.
        texts: The lines of its label.
        line: Its line in the plan.
    """

    id: str
    kind: Kind
    texts: tuple[str, ...]
    line: int


class Edge(msgspec.Struct, frozen=True):
    """A value that flows from one node to another.

    Attributes:
        tail: The node that makes the value.
        head: The node that reads it.
        texts: Name and type, and placement; empty for records of a source. Equal texts with the same tail
            are one value.
        line: The line of the plan that makes the value; 0 if it is not looked up.
        back: Whether it is the new value of a state.
    """

    tail: str
    head: str
    texts: tuple[str, ...] = ()
    line: int = 0
    back: bool = False


class Box(msgspec.Struct, frozen=True):
    """A phase or a server axis with its nodes.

    Attributes:
        id: An identifier, as in `Node`.
        title: Its heading.
        nodes: Its nodes, in the order of the plan.
    """

    id: str
    title: str
    nodes: tuple[Node, ...]


class Drawing(msgspec.Struct, frozen=True):
    """A drawing, independent of the output language.

    Attributes:
        title: The heading, with the name of the plan.
        nodes: The nodes outside of boxes.
        boxes: The boxes.
        edges: The edges.
    """

    title: str
    nodes: tuple[Node, ...]
    boxes: tuple[Box, ...]
    edges: tuple[Edge, ...]

    @property
    def every_node(self) -> list[Node]:
        """All nodes, including those in boxes."""
        return [*self.nodes, *(node for box in self.boxes for node in box.nodes)]


def drawing(plan: Plan) -> Drawing:
    """The plan graph as boxes, nodes and edges.

    Sources, inputs and states are outside of the phases, once each; states on servers are in a box for the
    servers. Every other node belongs to its phase.
    """
    # Nodes outside of the phases.
    roots = [
        Node(f"source{i}", "source", (f"source {source.name}", str(source.type)), source.span.line)
        for i, source in enumerate(plan.sources)
    ]
    sources = {source.name: node.id for source, node in zip(plan.sources, roots, strict=True)}
    entry: dict[Ref, str] = {}
    servers = [axis for axis in plan.axes if axis.kind is AxisKind.SERVER]
    states_on = {axis.name: list[Node]() for axis in servers}
    for word, refs in (("input", plan.inputs), ("state", plan.states)):
        for i, ref in enumerate(refs):
            entry[ref] = f"{word}{i}"
            kind: Kind = "input" if word == "input" else "state"
            value = plan.value(ref)
            node = Node(entry[ref], kind, (f"{word} {value.name}",), value.span.line)
            states_on.get(value.placement.server or "", roots).append(node)
    boxes = [
        Box(f"server{i}", f"server {axis.name} = {axis.size or '?'}", tuple(states_on[axis.name]))
        for i, axis in enumerate(servers)
    ]
    edges: list[Edge] = []
    for index, phase in enumerate(plan.phases):
        box, arrows = _phase(plan, phase, f"phase{index}", entry, sources)
        boxes.append(box)
        edges += arrows
    return Drawing(f"plan {plan.name}", tuple(roots), tuple(boxes), tuple(edges))


def _phase(
    plan: Plan, phase: Phase, box: str, entry: Mapping[Ref, str], sources: Mapping[str, str]
) -> tuple[Box, list[Edge]]:
    """One phase: its nodes, and the edges that begin or end in it.

    Args:
        plan: The plan.
        phase: The phase.
        box: The identifier of its box.
        entry: The node of each input and state.
        sources: The node of each source.
    """
    nodes: list[Node] = []
    edges: list[Edge] = []
    maker = dict(entry)  # the node that makes each value
    for number, stage in enumerate(phase.stages):
        node = f"{box}_stage{number}"
        nodes.append(Node(node, _kind(plan, stage), stage_lines(stage), stage.span.line))
        if isinstance(stage, Load):
            edges.append(Edge(sources[stage.source], node))
        edges += [Edge(maker[ref], node, _label(plan, ref)) for ref in operands(stage)]
        maker |= dict.fromkeys(results(stage), node)
    for number, binding in enumerate(phase.outputs):
        node = f"{box}_output{number}"
        line = plan.value(binding.value).span.line
        nodes.append(Node(node, "output", (f"output {binding.name}",), line))
        edges.append(Edge(maker[binding.value], node, _label(plan, binding.value)))
    states = {name_of(ref): ref for ref in plan.states}
    edges += [
        Edge(maker[b.value], entry[states[b.name]], _label(plan, b.value), back=True) for b in phase.updates
    ]
    return Box(box, phase_title(phase), tuple(nodes)), edges


def _kind(plan: Plan, stage: Stage) -> Kind:
    """Where a stage runs: on the host, on one device, or on the network."""
    match stage:
        case Load():
            return "host"
        case MapStage():
            return "host" if plan.fn(stage.fn).where == "host" else "device"
        case SliceStage() | PickStage() | MergeStage():
            return "device"
        case _:
            return "network"


def _label(plan: Plan, ref: Ref) -> tuple[str, ...]:
    """The texts of an edge for a value."""
    value = plan.value(ref)
    return (f"{value.name} : {value.type}", str(value.placement))


class Look(NamedTuple):
    """The appearance of a kind of node.

    Attributes:
        fill: The fill color, `#RRGGBB`.
        shape: The shape in Graphviz.
        brackets: The brackets around a label in Mermaid, which determine the shape.
    """

    fill: str
    shape: str
    brackets: tuple[str, str] = ("[", "]")


_LOOKS: dict[Kind, Look] = {  # the report's page defines its own
    "source": Look("#f2efe6", "cylinder", ("[(", ")]")),
    "input": Look("#e8eef7", "parallelogram", ("[/", "/]")),
    "state": Look("#e8eef7", "box3d", ("[[", "]]")),
    "host": Look("#fdf3d8", "box"),
    "device": Look("#e3f4e1", "box"),
    "network": Look("#fbe3dd", "box"),
    "output": Look("#ffffff", "parallelogram", ("[/", "/]")),
}


def dot(plan: Plan) -> str:
    """The plan graph in the language of Graphviz."""
    picture = drawing(plan)
    lines = [f"digraph {_quote([picture.title])} {{", f"  label={_quote([picture.title])}; labelloc=t;",
             '  rankdir=TB; fontname="Helvetica"; compound=true;',
             '  node [fontname="Helvetica", fontsize=11, style=filled, color="#555555"];',
             '  edge [fontname="Helvetica", fontsize=9, color="#555555"];']  # fmt: skip
    lines += [f"  {_dot_node(node)}" for node in picture.nodes]
    for box in picture.boxes:
        lines += [f"  subgraph {_quote(['cluster_' + box.id])} {{", f"    label={_quote([box.title])};",
                  '    style=rounded; color="#999999";']  # fmt: skip
        lines += [f"    {_dot_node(node)}" for node in box.nodes]
        lines.append("  }")
    for edge in picture.edges:
        # The edge of a state's new value points upwards; it must not move the state below the phase.
        style = ", style=dashed, constraint=false" if edge.back else ""
        lines.append(f"  {edge.tail} -> {edge.head} [label={_quote(edge.texts)}{style}];")
    return "\n".join([*lines, "}"]) + "\n"


def _dot_node(node: Node) -> str:
    fill, shape, _ = _LOOKS[node.kind]
    thick = ", penwidth=2" if node.kind == "network" else ""
    return f'{node.id} [label={_quote(node.texts)}, shape={shape}, fillcolor="{fill}"{thick}];'


def _quote(lines: Iterable[str]) -> str:
    """A quoted string in DOT, in which only the quote and the backslash are special."""
    escaped = (line.replace("\\", "\\\\").replace('"', '\\"') for line in lines)
    return '"' + "\\n".join(escaped) + '"'


def mermaid(plan: Plan) -> str:
    """The plan graph as a Mermaid flowchart, which GitHub and many editors display."""
    picture = drawing(plan)
    lines = ["---", f"title: {picture.title}", "---", "flowchart TB"]
    lines += [f"  {_mermaid_node(node)}" for node in picture.nodes]
    for box in picture.boxes:
        lines.append(f"  subgraph {box.id}[{_entities([box.title])}]")
        lines += [f"    {_mermaid_node(node)}" for node in box.nodes]
        lines.append("  end")
    for edge in picture.edges:
        arrow = "-.->" if edge.back else "-->"
        label = f"|{_entities(edge.texts)}|" if edge.texts else ""
        lines.append(f"  {edge.tail} {arrow}{label} {edge.head}")
    used = {node.kind for node in picture.every_node}
    for kind, look in _LOOKS.items():
        thick = "stroke-width:2px," if kind == "network" else ""
        if kind in used:
            lines.append(f"  classDef {kind} fill:{look.fill},stroke:#555555,{thick}color:#222222")
    return "\n".join(lines) + "\n"


def _mermaid_node(node: Node) -> str:
    opening, closing = _LOOKS[node.kind].brackets
    return f"{node.id}{opening}{_entities(node.texts)}{closing}:::{node.kind}"


def _entities(lines: Iterable[str]) -> str:
    """A quoted Mermaid label. Characters that its parser or HTML would treat as markup become entities."""
    table = str.maketrans({"#": "#35;", '"': "#quot;", "<": "#lt;", ">": "#gt;", "&": "#amp;", "`": "#96;"})
    return '"' + "<br/>".join(line.translate(table) for line in lines) + '"'
