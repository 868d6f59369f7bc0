"""`commplan report`: the contents of its document, its omissions and its errors."""

from __future__ import annotations

import io
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from support.records import data_parallel
from support.reports import (
    COMPLETE,
    EXAMPLES,
    RACKS,
    ROOT,
    SMALL,
    document,
    evil,
    leaves,
    many_leaves,
    report,
    trace,
)

from commplan import dsl
from commplan.cli import main
from commplan.report.document import EventLane, LaneEvent
from commplan.report.graph import graphs
from commplan.report.lanes import LANES, condensed

BOTH = {"params": SMALL, "grads": SMALL}


@pytest.fixture(scope="module")
def ensemble(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return document(report(tmp_path_factory.mktemp("report"), "ensemble_training", shapes=BOTH))


def test_every_stage_has_its_line_and_every_line_its_text(ensemble: dict[str, Any]) -> None:
    texts = dict(map(tuple, ensemble["source"]["lines"]))
    stages = [node for graph in ensemble["graphs"] for node in graph["nodes"] if "stage" in node["id"]]
    assert [graph["title"] for graph in ensemble["graphs"]] == ["at start", "each step", "phase evaluate"]
    assert len(stages) == 7
    for node in stages:
        assert node["texts"][0].split()[0] in texts[node["line"]]


def test_values_carry_their_placement(ensemble: dict[str, Any]) -> None:
    step = next(graph for graph in ensemble["graphs"] if graph["phase"] == "step")
    labels = {tuple(edge["texts"]) for edge in step["edges"] if edge["texts"]}
    assert ("grads : tree", "per member partial data") in labels
    ids = {node["id"] for node in step["nodes"]}
    assert all({edge["tail"], edge["head"]} <= ids for edge in step["edges"])


def test_times_are_those_of_simulate(
    ensemble: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shapes = tmp_path / "shapes.json"
    shapes.write_text(json.dumps(BOTH))
    words = [EXAMPLES / "plans" / "ensemble_training.plan", "--shapes", shapes, "--format", "json"]
    main(["simulate", *map(str, words), "--topology", str(EXAMPLES / "topologies" / "h100_64.toml")])
    simulated = json.loads(capsys.readouterr().out)
    for phase, expected in zip(ensemble["phases"], simulated["phases"], strict=True):
        assert phase["seconds"] == expected["seconds"]
        events = [event for lane in phase["lanes"] for event in lane["events"]]
        assert len(events) + phase["untimed"] == len(expected["ops"])
        assert sum(event["busy"] for event in events) == pytest.approx(
            sum(op["seconds"] for op in expected["ops"])
        )


def test_proofs_are_those_of_verify(ensemble: dict[str, Any]) -> None:
    proofs = ensemble["proofs"]
    assert proofs["proved"].startswith("equivalent to its plan")
    assert any("`decode`" in text for text in proofs["assumed"])
    assert proofs["not_checked"]
    assert {each["proof"] for each in proofs["collectives"]} == {"assumed: the backend's own"}
    assert any("exactly once" in text for text in proofs["facts"])


def test_choices_name_what_they_rejected(ensemble: dict[str, Any]) -> None:
    share = next(choice for choice in ensemble["choices"] if choice["by"] == "share")
    assert share["span"]["line"] == 22
    assert any(text.startswith("duplicate") for text in share["rejected"])


def test_links_are_told_apart(tmp_path: Path) -> None:
    large = {"w": {"shape": [1024, 1024], "dtype": "f32"}}
    shapes = {"params": large, "grads": large}
    page = report(tmp_path, "parameter_server_dedicated", "--backend", "mpi", shapes=shapes, topology=RACKS)
    machine = document(page)["machine"]
    step = machine["phases"].index("step")
    hosts = [host for rack in machine["members"] for host in rack["members"]]
    assert [host["holds"] for host in hosts[-2:]] == ["rank 6, server 0", "rank 7, server 1"]
    assert min(host["down"][step] for host in hosts[-2:]) > 3 * max(host["down"][step] for host in hosts[:6])
    assert machine["left_out"] == ""


def test_a_state_stands_above_its_phase_and_below_it(tmp_path: Path) -> None:
    shapes = {"params": SMALL, "grads": SMALL}
    page = report(tmp_path, "parameter_server_dedicated", "--backend", "mpi", shapes=shapes, topology=None)
    content = document(page)
    step = next(graph for graph in content["graphs"] if graph["phase"] == "step")
    states = [node for node in step["nodes"] if node["kind"] == "state"]
    assert [node["texts"][1:] for node in states] == [["on hub = 2"], ["on hub = 2", "from now on"]]
    assert content["machine"] is None and content["phases"] == []


def test_a_saved_schedule_is_shown_with_its_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "two_level.plan"
    plan.write_text((EXAMPLES / "plans" / "two_level.plan").read_text())
    (tmp_path / "s.json").write_text(json.dumps({"grads": SMALL}))
    saved = tmp_path / "two_level.schedule.json"
    assert main(["compile", str(plan), "--shapes", str(tmp_path / "s.json"), "-o", str(saved)]) == 0
    content = document(report(tmp_path, saved))
    assert content["source"]["whole"] and content["graphs"] and content["phases"]
    plan.unlink()
    content = document(report(tmp_path, saved))
    assert not content["source"]["whole"]
    assert content["source"]["lines"][0][1].startswith("grads = reduce grads over node, gpu by mean")


def test_large_machines_are_drawn_in_part(tmp_path: Path) -> None:
    page = report(tmp_path, "data_parallel", "--ranks", "65536", shapes=BOTH, topology="h100_65536")
    machine = document(page)["machine"]
    assert machine["places"] == 65536 and "busiest of its level" in machine["left_out"]
    assert sum(max(1, member["hidden"]) for member in machine["members"]) == 256
    assert page.stat().st_size < 1_000_000


def test_many_leaves_make_a_small_page(tmp_path: Path) -> None:
    page = report(tmp_path, many_leaves(tmp_path, "1 KiB"), shapes={"grads": leaves(800)})
    (phase,) = document(page)["phases"]
    assert "combined in groups" in phase["left_out"]
    assert sum(len(lane["events"]) for lane in phase["lanes"]) <= 3000
    assert page.stat().st_size < 5_000_000


def test_graphs_of_many_stages_say_what_they_leave_out() -> None:
    count = 300
    inputs = "".join(f"input g{i} : f32[4] partial data\n" for i in range(count))
    stages = "".join(f" g{i} = reduce g{i} over data by sum\n output g{i}\n" for i in range(count))
    plan, _ = dsl.load(f"plan many\naxis data = 2\n{inputs}each step {{\n{stages}}}\n", "many.plan")
    assert plan is not None
    (graph,) = graphs(plan)
    assert graph.left_out == "350 of 600 stages and outputs are not shown"
    ids = {node.id for node in graph.nodes}
    assert all({edge.tail, edge.head} <= ids for edge in graph.edges)


def test_stdin_and_stdout(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = "plan p\naxis data = 2\ninput g : f32[4] partial data\n"
    text += "each step {\n g = reduce g over data by sum\n output g\n}\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert main(["report", "-", "-o", "-"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("<!DOCTYPE html>") and page.endswith("</html>\n")
    assert '"name":"\\u003cstdin\\u003e"' in page and "reduce g over data" in page


def lane(name: str, count: int, names: int = 1) -> EventLane:
    return EventLane(
        name, tuple(LaneEvent(f"op{i % names}", 3, float(i), 0.5, "device", busy=0.5) for i in range(count))
    )


def test_neighbors_stand_together_and_nothing_is_lost() -> None:
    (shown,), remark = condensed([lane("device", 1000)], 100)
    assert len(shown.events) == 100 and sum(event.count for event in shown.events) == 1000
    assert sum(event.busy for event in shown.events) == 500
    assert shown.events[1].start == 10 and shown.events[1].seconds == 9.5
    assert "1,000 events are combined in groups of up to 10 neighbors" in remark


def test_what_cannot_stand_together_is_cut_and_said() -> None:
    lanes = [
        EventLane(
            "device", tuple(LaneEvent(f"op{i % 2}", 3, float(i), i + 1.0, "device") for i in range(1000))
        )
    ]
    (shown,), remark = condensed(lanes, 100)
    assert len(shown.events) == 100 and min(event.seconds for event in shown.events) == 901
    assert "900 of 1,000 are shorter than" in remark
    few, remark = condensed([lane(str(i), 1) for i in range(LANES + 2)])
    assert len(few) == LANES and f"2 of {LANES + 2} lanes" in remark


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_run_is_shown_from_its_first_event(tmp_path: Path, wrapped: bool) -> None:
    run = tmp_path / "run.json"
    named = {"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "rank 7"}}
    later = COMPLETE | {"ts": 1e6 + 300, "args": {}, "cat": "python"}
    run.write_text(trace(named, later, COMPLETE, {"ph": "B", "ts": 3}, wrapped=wrapped))
    recorded = document(report(tmp_path, "data_parallel", "--trace", run, shapes=BOTH))["traces"][0]
    assert recorded["seconds"] == pytest.approx(550e-6)
    (lane,) = recorded["lanes"]
    assert (lane["group"], lane["name"]) == ("rank 7", "thread 2")
    assert [(event["line"], event["work"]) for event in lane["events"]] == [(16, "network"), (0, "other")]
    assert lane["events"][0]["start"] == 0


def test_records_are_shown_beside_the_prediction(tmp_path: Path) -> None:
    folder = data_parallel(tmp_path)
    page = report(tmp_path, "data_parallel", "--records", folder, shapes=BOTH)
    content = document(page)
    (shown,) = content["traces"]
    assert shown["phase"] == "step" and shown["name"].startswith("run ")
    assert [lane["name"] for lane in shown["lanes"]] == [f"rank {rank}" for rank in range(8)]
    first, second = shown["lanes"][0]["events"]
    assert (first["line"], first["start"], first["last"]) == (16, 0, 3)
    assert first["waited"] == pytest.approx(0.013, abs=1e-6)
    predicted = next(phase for phase in content["phases"] if phase["name"] == "step")
    busy = [event["busy"] for lane in predicted["lanes"] for event in lane["events"] if event["algorithm"]]
    assert [first["predicted"], second["predicted"]] == pytest.approx(busy[:2])
    (gathered, scattered) = content["measured"]["lines"]
    assert (gathered["kind"], scattered["kind"]) == ("all_gather", "all_to_all")
    assert gathered["count"] == 6 and gathered["last"] == [[3, 6]]
    assert gathered["transfer"] == pytest.approx(0.007, abs=1e-6)
    assert content["measured"]["steps"][0]["seconds"] == pytest.approx(1.0, abs=1e-6)


def test_records_of_another_plan_have_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = data_parallel(tmp_path)
    plan = str(EXAMPLES / "plans" / "two_level.plan")
    shapes = tmp_path / "shapes.json"
    shapes.write_text(json.dumps({"grads": SMALL}))
    words = ["report", plan, "--shapes", str(shapes), "-o", str(tmp_path / "out.html")]
    words += ["--records", str(folder)]
    assert main(words) == 1
    assert "CP1114" in capsys.readouterr().err and not (tmp_path / "out.html").exists()
    assert main([*words, "--trace", "run.json"]) == 2


@pytest.mark.parametrize(
    "text", ["", "{", '{"events": []}', "[]", '[{"ph": "X", "ts": "soon"}]', trace({"ph": "B"})]
)
def test_a_file_that_is_no_trace_is_refused(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run.json"
    run.write_text(text)
    plan = str(EXAMPLES / "plans" / "data_parallel.plan")
    assert main(["report", plan, "-o", str(tmp_path / "out.html"), "--trace", str(run)]) == 1
    assert "CP1113" in capsys.readouterr().err
    assert not (tmp_path / "out.html").exists()


def test_mistakes_are_told_as_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = str(EXAMPLES / "plans" / "data_parallel.plan")
    out = str(tmp_path / "out.html")
    assert main(["report", plan, "-o", out, "--topology", "nowhere.toml"]) == 1
    assert "CP0712" in capsys.readouterr().err
    assert main(["report", "nowhere.plan", "-o", out]) == 1
    assert "CP0001" in capsys.readouterr().err
    shapes = tmp_path / "shapes.json"
    shapes.write_text(json.dumps(BOTH))
    assert main(["report", plan, "-o", str(tmp_path / "no" / "out.html"), "--shapes", str(shapes)]) == 1
    assert "CP1101" in capsys.readouterr().err
    assert main(["report", plan]) == 2
    assert "-o" in capsys.readouterr().err


def test_programs_are_told_where_the_page_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = report(tmp_path, "data_parallel", "--format", "json", shapes=BOTH)
    printed = json.loads(capsys.readouterr().out)
    assert (printed["plan"], printed["output"], printed["nbytes"]) == (
        "data_parallel",
        str(page),
        page.stat().st_size,
    )


# --- the page itself ---


class Tags(HTMLParser):
    """The scripts of a page, and all its references to other files."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts, self.addresses = 0, list[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.addresses += [
            str(value) for name, value in attrs if name in ("src", "href") and not str(value).startswith("#")
        ]


def test_nothing_in_a_plan_becomes_markup(tmp_path: Path) -> None:
    plain = report(tmp_path, "two_level", shapes={"grads": SMALL}).read_text(encoding="utf-8")
    (tmp_path / "evil").mkdir()
    page = evil(tmp_path / "evil")
    text = page.read_text(encoding="utf-8")
    counted, allowed = Tags(), Tags()
    counted.feed(text)
    allowed.feed(plain)
    assert counted.scripts == allowed.scripts and "alert(1)</script>" not in text and "<img" not in text
    assert not counted.addresses and not allowed.addresses
    assert document(page)["source"]["lines"][0][1].startswith("# </script>")


def test_colors_can_be_read() -> None:
    css = (ROOT / "commplan" / "report" / "assets" / "page.css").read_text(encoding="utf-8")
    blocks = re.findall(r":root[^{]*\{([^}]*)\}", css)
    assert len(blocks) == 4  # light, dark twice, printed
    for block in blocks:
        colors = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
        on_ground = [
            (text, ground)
            for text in ("text", "muted", "accent", "good", "doubt")
            for ground in ("ground", "surface", "raised")
        ]
        kinds = ("network", "device", "host", "input", "source", "output", "other", "value", "mark")
        for text, ground in [*on_ground, *(("text", kind) for kind in kinds)]:
            assert contrast(colors[text], colors[ground]) >= 4.5, (text, ground, block[:40])
        for kind in (*kinds[:7], "mark"):
            assert contrast(colors[f"{kind}-edge"], colors["ground"]) >= 3, kind


def contrast(text: str, ground: str) -> float:
    """As WCAG 2.2 defines it."""
    lights = sorted(map(luminance, (text, ground)))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_the_command_alone_uses_the_report() -> None:
    sources = [
        path for room in ("commplan", "dsl", "lowering", "runtime") for path in (ROOT / room).rglob("*.py")
    ]
    users = {
        path.relative_to(ROOT).parts[:2]
        for path in sources
        if "commplan.report" in path.read_text(encoding="utf-8")
    }
    assert users == {("commplan", "cli"), ("commplan", "report")}
