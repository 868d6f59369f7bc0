"""Drawings of plan graphs, as DOT and as Mermaid."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import commplan
from commplan.explain import graph as draw
from commplan.ir.plan import Plan

PLANS = sorted((Path(__file__).resolve().parents[2] / "examples" / "plans").glob("*.plan"))


def plan(text: str) -> Plan:
    return commplan.loads(text).graph


SMALL = """
plan small
ensemble member = 2
axis data = 4
source images : bytes
fn decode(bytes) -> u8[8], i32 on host
fn bump(tree) -> tree on device elementwise
input grads : tree per member partial data
state total : tree per member
at start {
    total = reduce grads over data by sum
}
each step {
    raw, valid = load images batch 64 split data visit exactly_once seed 17
    pixels, labels = map decode(raw)
    grads = reduce grads over data by mean via native { bucket = 25 MiB, overlap = backward }
    total = map bump(total)
    output pixels, labels, grads
}
phase look { output total }
"""


def test_nodes_boxes_and_labels_say_what_the_plan_says():
    picture = draw.drawing(plan(SMALL))
    assert [box.title for box in picture.boxes] == ["at start", "each step", "phase look"]
    step = picture.boxes[1]
    assert [node.kind for node in step.nodes] == [
        "host",
        "host",
        "network",
        "device",
        "output",
        "output",
        "output",
    ]
    assert step.nodes[0].texts == ("load batch 64", "split data", "visit exactly_once seed 17")
    assert step.nodes[2].texts == (
        "reduce by mean", "over data", "via native", "{ bucket = 25 MiB, overlap = backward }",
    )  # fmt: skip
    labels = {edge.texts for edge in picture.edges}
    assert ("grads : tree", "per member partial data") in labels
    assert ("raw : 64 x bytes", "split data") in labels


SERVED = """
plan served
axis worker = 4
server hub = 2
input params : tree per worker
input grads : tree partial worker
state weights : tree on hub
fn sgd(tree, tree) -> tree on device elementwise
at start { weights = broadcast params over worker from 0 }
each step {
    weights = exchange grads into weights with sgd over worker by mean
    output weights
}
"""


def test_states_stand_with_the_servers_that_hold_them():
    picture = draw.drawing(plan(SERVED))
    assert [box.title for box in picture.boxes] == ["server hub = 2", "at start", "each step"]
    assert [node.texts for node in picture.boxes[0].nodes] == [("state weights",)]
    assert {node.texts for node in picture.nodes} == {("input params",), ("input grads",)}


def test_edges_join_existing_nodes_and_states_come_back():
    picture = draw.drawing(plan(SMALL))
    ids = [node.id for node in (*picture.nodes, *(node for box in picture.boxes for node in box.nodes))]
    assert len(ids) == len(set(ids))
    assert {end for edge in picture.edges for end in (edge.tail, edge.head)} <= set(ids)
    back = [edge for edge in picture.edges if edge.back]
    state = next(node.id for node in picture.nodes if node.kind == "state")
    assert [edge.head for edge in back] == [state, state]


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_every_example_is_drawn_in_both_languages(path: Path):
    graph = commplan.load(path).graph
    dot, mermaid = draw.dot(graph), draw.mermaid(graph)
    assert dot.startswith(f'digraph "plan {graph.name}" {{') and dot.endswith("}\n")
    assert dot.count("{") == dot.count("}")
    for phase in graph.phases:
        assert dot.count(f'subgraph "cluster_phase{graph.phases.index(phase)}"') == 1
    assert mermaid.startswith(f"---\ntitle: plan {graph.name}\n---\nflowchart TB\n")
    boxes = len(draw.drawing(graph).boxes)
    assert len(re.findall(r"^  subgraph ", mermaid, re.M)) == boxes
    assert len(re.findall(r"^  end$", mermaid, re.M)) == boxes
    arrows = len(draw.drawing(graph).edges)
    assert len(re.findall(r"^  \w+ -> \w+ \[", dot, re.M)) == arrows
    assert len(re.findall(r"^  \w+ -\.?->\|?", mermaid, re.M)) == arrows
    # Outside of quotes no character is left that either language would read as markup.
    for line in mermaid.splitlines():
        assert line.count('"') % 2 == 0
        assert not re.search(r'"[^"]*[<>`][^"]*"', line.replace("<br/>", ""))


def test_text_is_escaped():
    nasty = ('a "quoted" \\ <b>', "x | y & `z` # 1")
    assert draw._quote(nasty) == '"a \\"quoted\\" \\\\ <b>\\nx | y & `z` # 1"'
    assert draw._entities(nasty) == ('"a #quot;quoted#quot; \\ #lt;b#gt;<br/>x | y #amp; #96;z#96; #35; 1"')


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_graphviz_reads_what_is_written(path: Path):
    graph = commplan.load(path).graph
    done = subprocess.run(
        ["dot", "-Tplain"], input=draw.dot(graph), capture_output=True, text=True, check=True
    )
    assert not done.stderr
    picture = draw.drawing(graph)
    nodes = len(picture.nodes) + sum(len(box.nodes) for box in picture.boxes)
    assert len(re.findall(r"^node ", done.stdout, re.M)) == nodes
