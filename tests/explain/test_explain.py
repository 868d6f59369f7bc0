"""Explanations: the ops and the traffic of every plan line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

import commplan
from commplan.diagnostics import Span
from commplan.explain import report
from commplan.explain.report import Explanation, Traffic, explain_plan
from commplan.explain.stages import phase_title, stage_text
from commplan.ir import schedule as ir
from commplan.ir.plan import Algorithm, Arg, AxisKind, MergeStage, PickStage
from commplan.ir.remark import Alternative, Choice
from commplan.ir.types import DType, timed
from commplan.topology import Level, Topology
from commplan.verify.claims import claims

PLANS = Path(__file__).resolve().parents[2] / "examples" / "plans"
SHAPES = {"kernel": {"shape": [256, 64], "dtype": "float32"}, "bias": {"shape": [64], "dtype": "float32"}}


def explained(name: str, **options: object) -> tuple[commplan.Plan, ir.Schedule, Explanation]:
    plan = commplan.load(PLANS / f"{name}.plan")
    trees = {ref.rpartition(".")[0] for ref in (*plan.graph.inputs, *plan.graph.states)}
    trees = {t for t in trees if str(plan.graph.value(f"{t}.0").type) == "tree"}
    shapes = dict.fromkeys(sorted(trees), SHAPES)
    sizes = {axis.name: 2 for axis in plan.graph.axes if axis.size is None}
    program = plan.compile(shapes=shapes, axes=sizes, **options)
    return plan, program.schedule, explain_plan(plan.graph, program.schedule)


def step(explanation: Explanation) -> report.PhaseLines:
    return next(phase for phase in explanation.phases if phase.name == "step")


def fake(sizes: dict[str, int]) -> ir.Schedule:
    axes = tuple(ir.Axis(name, AxisKind.REPLICA, size) for name, size in sizes.items())
    return ir.Schedule("t", "", axes, (), (), (), (), (), ())


@pytest.mark.parametrize(
    ("kind", "ranks", "nbytes", "sent"),
    [
        ("all_reduce", 4, 1000, 1500), ("reduce_scatter", 4, 1000, 750), ("all_to_all", 8, 800, 700),
        ("all_gather", 4, 100, 300), ("broadcast", 4, 100, 100), ("broadcast", 1, 100, 0),
        ("all_reduce", 1, 9, 0),
    ],
)  # fmt: skip
def test_least_bytes_of_a_collective(kind: str, ranks: int, nbytes: int, sent: int):
    op = ir.Collective(kind, "y", "x", ("a",), DType.F32, nbytes, Span(1, 1, 1, 2))
    (entry,) = report.traffic(op, fake({"a": ranks}))
    assert (entry.ranks, entry.nbytes) == (ranks, sent)


def test_a_hierarchy_is_charged_level_by_level():
    via = Algorithm("hierarchical", (Arg("gpu"), Arg("native", "node")))
    op = ir.Collective(
        "all_reduce", "y", "x", ("node", "gpu"), DType.F32, 800, Span(1, 1, 1, 2), algorithm=via
    )
    # Inside: scatter 700 and gather 7 x 100; between nodes: 2 x 3/4 of one eighth.
    assert report.traffic(op, fake({"node": 4, "gpu": 8})) == (
        Traffic(("gpu",), 8, 1400, "(n-1)/n S + (n-1) S"),
        Traffic(("node",), 4, 150, "2(n-1)/n S"),
    )
    spread = msgspec.structs.replace(op, kind="broadcast")
    assert [entry.nbytes for entry in report.traffic(spread, fake({"node": 4, "gpu": 8}))] == [800, 800]


def test_every_line_of_the_plan_is_there_with_its_ops():
    plan, schedule, explanation = explained("data_parallel")
    lines = step(explanation).lines
    assert [line.line for line in lines] == [s.span.line for s in plan.graph.phase("step").stages]
    ops = schedule.phase("step").ops
    assert sum(len(line.ops) for line in lines) == len(ops)
    assert lines[0].stage.startswith("grads = reduce grads over data by mean { bucket = 25 MiB")


def test_rows_that_only_fill_a_batch_are_counted():
    plan, schedule, explanation = explained("ensemble_training")
    assert "up to 63 rows of the last batch of 64 repeat records" in explanation.text()
    counted = explain_plan(plan.graph, schedule, records={"images": 1797}).text()
    assert "59 of 1,856 rows of an epoch in batches of 64 repeat records to fill the batch" in counted
    whole = step(explain_plan(plan.graph, schedule, records={"images": 1856}))
    assert all(not line.filler for line in whole.lines)


def test_buckets_and_wire_bytes_of_data_parallel():
    _, _, explanation = explained("data_parallel")
    (line,) = step(explanation).lines
    nbytes = (256 * 64 + 64) * 4
    assert [bucket.nbytes for bucket in line.buckets] == [nbytes]
    assert len(line.buckets[0].leaves) == 2
    kinds = [op.kind for op in line.ops]
    assert kinds.index("pack") < kinds.index("all_to_all") < kinds.index("all_gather") < kinds.index("unpack")
    # bfloat16 both ways: 7/8 of half the bytes to scatter, and the same to gather.
    assert [(entry.axes, entry.nbytes) for entry in line.traffic] == [(("data",), 2 * nbytes // 2 * 7 // 8)]


def test_two_level_moves_an_eighth_between_nodes():
    _, _, explanation = explained("two_level")
    over = {entry.axes: entry.nbytes for entry in step(explanation).traffic}
    nbytes = (256 * 64 + 64) * 4
    assert over == {("gpu",): 2 * nbytes * 7 // 8, ("node",): 2 * (nbytes // 8) * 3 // 4}


def test_what_is_packed_is_counted_once():
    plan = commplan.load(PLANS / "data_parallel.plan")
    tree = {name: {"shape": [9_000_000], "dtype": "f32"} for name in "ab"}
    schedule = plan.compile(shapes={"params": tree, "grads": tree}, passes="bucket").schedule
    packs = [
        each
        for line in step(explain_plan(plan.graph, schedule)).lines
        for each in line.ops
        if each.kind == "pack"
    ]
    assert len(packs) == 2 and [pack.nbytes for pack in packs] == [36_000_000] * 2


def test_stages_are_worded_as_they_are_written():
    """Every stage of every example, on one line, reads like its source without the alignment."""
    for path in PLANS.glob("*.plan"):
        plan = commplan.load(path)
        source = " ".join(line.partition("#")[0] for line in path.read_text(encoding="utf-8").splitlines())
        plain = re.sub(r"\s+", " ", source)
        for phase in plan.graph.phases:
            assert f"{phase_title(phase)} {{" in plain
            for stage in phase.stages:
                if not isinstance(stage, PickStage | MergeStage):  # the checker adds these
                    assert stage_text(stage) in plain


def test_text_names_lines_bytes_and_choices():
    _, _, explanation = explained("two_level")
    text = explanation.text()
    assert text.startswith("plan two_level, compiled for jax\n  axes: node = 4, gpu = 8\n  passes: ")
    assert (
        "each step\n  line 11: grads = reduce grads over node, gpu by mean via hierarchical(gpu, node)"
        in text
    )
    assert "each rank moves at least" in text
    choice = Choice("bucket", "64 KiB", "it is fast", None, ("1 KiB: slow",))
    shown = msgspec.structs.replace(explanation, choices=(choice,)).text()
    assert "  bucket chose 64 KiB: it is fast\n    rejected: 1 KiB: slow\n" in shown


@pytest.mark.parametrize("path", sorted(PLANS.glob("*.plan")), ids=lambda path: path.stem)
def test_every_example_is_explained_and_becomes_json(path: Path):
    plan, schedule, explanation = explained(path.stem)
    assert [phase.name for phase in explanation.phases] == [phase.name for phase in plan.graph.phases]
    counted = sum(len(line.ops) for phase in explanation.phases for line in phase.lines)
    assert counted == sum(len(phase.ops) for phase in schedule.phases)
    decoded = json.loads(msgspec.json.encode(explanation))
    assert decoded["plan"] == plan.name
    assert msgspec.json.decode(msgspec.json.encode(explanation), type=Explanation) == explanation
    text = explanation.text()
    for phase in explanation.phases:
        assert f"\n{phase.title}\n" in text


RACKS = Topology("racks", (Level("host", 4, 6e-5, 25e6), Level("rack", 2, 1.2e-4, 2.5e6)))
SUMS = """plan sums
axis data = 8
input grads : tree partial data
each step {
    grads = reduce grads over data by mean
    output grads
}
"""


def test_buffers_count_what_is_in_them_and_times_say_whose_they_are():
    plan = commplan.loads(SUMS)
    shapes = {"grads": {name: {"shape": [1 << 20], "dtype": "f32"} for name in "abcd"}}
    program = plan.compile(shapes=shapes, topology=RACKS, passes="bucket{max=4MiB},select")
    text = explain_plan(plan.graph, program.schedule).text()
    assert "4 x pack into f32, 16 MiB" in text
    assert re.search(r"for 4 x all_reduce of 4 MiB .*\n *alone [0-9.]+ m?s  \(each of 4, model of", text)
    program = plan.compile(shapes=shapes, topology=RACKS)
    searched = explain_plan(plan.graph, program.schedule).text().partition("search chose")[2]
    assert re.search(r"exposed [0-9.]+ m?s  \(.*model of", searched)
    shapes["grads"]["e"] = {"shape": [3], "dtype": "f32"}
    program = plan.compile(shapes=shapes, topology=RACKS, passes="bucket{max=4MiB},select")
    text = explain_plan(plan.graph, program.schedule).text()
    assert re.search(r"for 5 x all_reduce of up to 4 MiB .*\n *alone [0-9.]+ m?s  \(the largest, m", text)


def test_what_a_wire_type_rejects_is_not_what_was_asked_for():
    text = SUMS.replace(" by sum", " by sum { wire = bf16, accumulate = f32 }").replace(
        " by mean", " by mean { wire = bf16, accumulate = f32 }"
    )
    plan = commplan.loads(text)
    shapes = {"grads": {name: {"shape": [1 << 20], "dtype": "f32"} for name in "abcd"}}
    program = plan.compile(shapes=shapes, axes={"data": 8}, passes="bucket{max=4MiB},wire")
    explanation = explain_plan(plan.graph, program.schedule).text()
    assert explanation.count("wire chose") == 1  # four buckets, for one reason
    assert "/b0` and 3 more: sent in bf16, added in f32: " in explanation
    assert "rejected: one all_reduce that sends and adds in bf16: the sum must be in f32\n" in explanation
    assert "rejected: one all_reduce that sends and adds in f32: 2 x the bytes\n" in explanation


def test_choices_come_with_their_times_and_those_of_the_others():
    plan = commplan.loads(SUMS)
    program = plan.compile(shapes={"grads": SHAPES}, topology=RACKS, backend="mpi")
    explanation = explain_plan(plan.graph, program.schedule)
    assert (explanation.backend, explanation.placement) == ("mpi", {"data": "host x 4, rack x 2"})
    (line,) = step(explanation).lines
    chosen = next(choice for choice in line.choices if choice.by == "select")
    assert chosen.seconds is not None and chosen.alternatives
    times = [other.seconds for other in chosen.alternatives]
    assert times == sorted(times)
    text = explanation.text()
    assert "axes: data = 8 on host x 4, rack x 2" in text
    assert "(model of topology `racks`, nothing measured)" in text
    assert re.search(r"rejected: binomial_tree +[0-9.]+ m?s, .*(longer|as long)", text)
    data = json.loads(msgspec.json.encode(explanation))
    selected = next(c for c in data["phases"][0]["lines"][0]["choices"] if c["by"] == "select")
    assert selected["alternatives"][0].keys() == {"what", "seconds", "why"}


def test_a_hierarchy_over_the_levels_of_one_axis_is_charged_level_by_level():
    spread = (ir.Spread("host", 4), ir.Spread("rack", 2))
    schedule = msgspec.structs.replace(
        fake({"data": 8}), axes=(ir.Axis("data", AxisKind.REPLICA, 8, spread),)
    )
    via = Algorithm("hierarchical", (Arg("ring", "host"), Arg("ring", "rack")))
    op = ir.Collective("all_reduce", "y", "x", ("data",), DType.F32, 800, Span(1, 1, 1, 2), algorithm=via)
    charges = [(entry.axes, entry.ranks, entry.nbytes) for entry in report.traffic(op, schedule)]
    assert charges == [(("host",), 4, 1200), (("rack",), 2, 200)]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (5.0, "5 s"),
        (0.0032, "3.2 ms"),
        (4.5e-5, "45 us"),
        (1234.0, "1234 s"),
        (2e-8, "20 ns"),
        (2e-12, "0.002 ns"),
        (0.0, "0 us"),
    ],
)
def test_times_in_words(seconds: float, text: str):
    assert timed(seconds) == text


SERVED = """plan served
axis   worker = 3
server hub    = 2
input params  : tree per worker
input grads   : tree partial worker
state weights : tree on hub
state moment  : tree on hub
fn begin(tree) -> tree on device elementwise
fn adam(tree, tree, tree) -> tree, tree on device elementwise
at start {
    weights = broadcast params over worker from 0
    moment  = map begin(weights)
}
each step {
    weights, moment = exchange grads into weights, moment with adam over worker by mean
    output weights
}
phase look { output weights }
"""


@pytest.fixture(scope="module")
def served() -> Explanation:
    plan = commplan.loads(SERVED)
    shapes = {"params": SHAPES, "grads": SHAPES, "moment": {"mu": SHAPES, "nu": SHAPES}}
    return explain_plan(plan.graph, plan.compile(shapes=shapes, backend="mpi").schedule)


def test_servers_have_a_line_of_their_own_that_says_who_serves(served: Explanation) -> None:
    head = served.text().splitlines()[:3]
    assert head == [
        "plan served, compiled for mpi", "  axes: worker = 3", "  servers: hub = 2 (ranks 3 and 4)"
    ]  # fmt: skip
    assert served.servers == ("hub",)
    _, _, alone = explained("easgd_async")
    assert "\n  servers: master = 1 (rank 4); servers need MPI: " in alone.text()


def test_what_counts_of_an_exchange_is_what_travels(served: Explanation) -> None:
    """Moments stay with the servers."""
    (line,) = step(served).lines
    nbytes = (256 * 64 + 64) * 4
    assert [(op.kind, op.nbytes) for op in line.ops] == [("exchange", nbytes)]
    assert line.sent == nbytes
    start = served.phases[0]
    assert [line.sent for line in start.lines] == [nbytes, 2 * nbytes]
    assert "      put moment on hub, " in served.text()


def test_a_phase_that_asks_servers_for_a_state_says_so(served: Explanation) -> None:
    (line,) = served.phases[-1].lines
    assert (line.line, line.stage, line.sent) == (6, "get weights from hub", 8)  # it asks both servers
    text = served.text().partition("\nphase look\n  line 6: get weights from hub\n")[2]
    assert text.startswith("      get weights from hub, 64.2 KiB  [network]\n")
    assert "each worker sends " in text


def test_a_phase_that_moves_nothing_says_so() -> None:
    text = (PLANS / "easgd_sync.plan").read_text(encoding="utf-8")
    plan = commplan.loads(f"{text}\nphase look {{ output center }}\n")
    text = explain_plan(plan.graph, plan.compile(shapes={"params": SHAPES}).schedule).text()
    assert "\nphase look\n  nothing moves: `center` as on entry\n\nproved: " in text


def test_what_was_rejected_has_a_reason_where_nothing_tells_times() -> None:
    _, _, explanation = explained("parameter_hub")
    text = explanation.text()
    assert "rejected: one owner of all parts: without a topology its time is not known\n" in text
    assert not re.search(r": *$", text, re.MULTILINE)


def test_times_of_others_are_told_where_that_of_the_taken_is_not_known() -> None:
    alternatives = (Alternative("ring", 0.0032), Alternative("native", 0.5, "too large"))
    shown = report.Explanation(
        "p", {"data": 2}, "", (), (Choice("place", "x", "so", alternatives=alternatives),)
    )
    assert "rejected: ring      3.2 ms\n" in shown.text()
    assert "rejected: native    500 ms; too large\n" in shown.text()


def test_what_is_proved_and_what_is_believed() -> None:
    plan = commplan.loads((PLANS / "easgd_sync.plan").read_text(encoding="utf-8"))
    schedule = plan.compile(shapes={"params": SHAPES}).schedule
    report = explain_plan(plan.graph, schedule)
    assert report.claims == claims(schedule)
    outputs = sum(len(phase.outputs) for phase in schedule.phases)
    assert f"\nproved: equivalent to its plan: {outputs} output" in report.text()
    assert "\nassumed: the backend's own collectives: broadcast over worker (line " in report.text()
    assert "\nnot checked: the results of functions; " in report.text()


def test_functions_and_servers_are_believed(served: Explanation) -> None:
    assert served.claims is not None
    assert served.claims.assumed[-1] == "answers of servers depend on messages of workers alone"
    assert any(text.startswith("the functions bound are those that") for text in served.claims.assumed)


def test_a_schedule_without_its_plan_is_not_compared() -> None:
    plan = commplan.loads((PLANS / "easgd_sync.plan").read_text(encoding="utf-8"))
    schedule = plan.compile(shapes={"params": SHAPES}).schedule
    alone = claims(msgspec.structs.replace(schedule, origin=None))
    assert alone.proved == "consistent, but not compared with a plan"
    assert alone.not_checked[0] == "whether it is equivalent to a plan"
