"""Merged records of a run: one time scale, the last rank, the trace in the format of viewers, the summary."""

from __future__ import annotations

import json
import math
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from support.records import data_parallel

from commplan.cli import main
from commplan.recorder.collectives import Run, read_run
from commplan.recorder.file import BEGIN, END, FAILED, VERDICT, WAITED, Details, Event, Record, Recording
from commplan.recorder.summary import summary
from commplan.recorder.trace import trace

AXES = {"node": 2, "data": 2}
TRUE_OFFSETS = (0.0, 3.25)  # the offset of the clock of each host


def details(kind: str = "all_reduce", root: int = 0, axes: str = "node,data", opens: str = "") -> Details:
    return Details(kind, "ring", 4096, "float32", root, opens, tuple(axes.split(",")))


def record(rank: int, *events: Event, host: int = 0, lost: int = 0) -> Record:
    machine = f"{host:036d}pid:[1]"
    return Record(
        f"job.{rank}.rec", "p", rank, 4, f"node{host}", machine, 1, 1.0, False, lost, events, 0.0, AXES
    )


def once(
    number: int,
    begin: float,
    end: float,
    collective: Details | None = None,
    line: int = 7,
    wait: float | None = None,
) -> tuple[Event, ...]:
    name = f"line {line} of x.plan"
    begun = (
        Event(begin, BEGIN, name, number, number, 64, collective),
        Event(end, END, name, number, number, 0, collective),
    )
    waited = Event(end + 0.5, WAITED, "", number, 0, int(wait * 1e9)) if wait is not None else None
    return (*begun, waited) if waited else begun


def two_hosts(seed: int, steps: int = 40, drift: float = 0.0) -> list[Record]:
    """A step of two all-reduces over four ranks on two hosts, whose clocks differ."""
    chance, events = random.Random(seed), defaultdict[int, list[Event]](list)
    now = 10.0
    for step in range(1, steps + 1):
        for line, opens in ((7, "step"), (9, "")):
            begins = [now + chance.uniform(0, 0.004) for _ in range(4)]
            for rank, begin in enumerate(begins):
                clock = TRUE_OFFSETS[rank // 2] * (1 + drift * step)
                end = max(begins) + chance.uniform(0.001, 0.003)
                at, number = (begin - clock, end - clock), 2 * step - (line == 7)
                rank_events = once(number, *at, details(opens=opens), line)
                events[rank] += [event._replace(runs=step) for event in rank_events]
            now = max(begins) + 0.01
    return [record(rank, *events[rank], host=rank // 2) for rank in range(4)]


@pytest.mark.parametrize("seed", range(5))
def test_clocks_of_hosts_are_bounded_by_their_collectives(seed: int) -> None:
    run = read_run(two_hosts(seed))
    first, second = run.clocks
    assert (first.offset, first.uncertainty) == (0.0, 0.0)
    assert second.lower <= TRUE_OFFSETS[1] <= second.upper
    assert abs(second.offset - TRUE_OFFSETS[1]) <= second.uncertainty < 0.003
    assert run.clock_collectives == 80
    for collective in run.collectives:
        assert min(each.end for each in collective) >= max(each.begin for each in collective) - 1e-6


def test_clocks_that_drift_follow_the_latest_collectives() -> None:
    run = read_run(two_hosts(1, drift=1e-3))
    assert 0 < run.clock_collectives < 80
    assert run.clocks[1].lower <= TRUE_OFFSETS[1] * 1.04 + 1e-6


def test_without_a_common_collective_hosts_are_not_compared() -> None:
    run = read_run([record(0, *once(1, 1.0, 2.0), host=0), record(1, *once(1, 1.0, 2.0), host=1)])
    assert math.isinf(run.clocks[1].uncertainty) and run.clocks[1].offset == 0.0
    assert json.loads(trace(run))["otherData"]["clocks"]["hosts"][1]["uncertainty_us"] is None


def test_between_clocks_that_cannot_be_compared_nobody_is_last() -> None:
    """A broadcast bounds clocks from one side alone."""
    collective = details("broadcast", root=3)
    records = [record(rank, *once(1, 10 + rank, 15, collective), host=rank // 2) for rank in range(4)]
    assert [each.holder for each in read_run(records).slices] == [None] * 4


def test_processes_of_one_machine_have_its_clock() -> None:
    stepped = record(1, *once(1, 2.0, 3.0, details()))._replace(clock=1.0)  # set back by a second in between
    run = read_run([record(0, *once(1, 1.0, 2.0, details())), stepped])
    assert {(each.begin, each.end) for each in run.slices} == {(1.0, 2.0)}


def holders(kind: str, root: int = 0, axes: str = "node,data") -> list[tuple[int | None, float]]:
    """The ranks that each of four ranks waits for; rank 2 is one second late and rank 3 two."""
    collective = details(kind, root, axes)
    late = (0.0, 0.0, 1.0, 2.0)
    run = read_run([record(rank, *once(1, 10 + late[rank], 13, collective)) for rank in range(4)])
    holder_of = {each.rank: (each.holder, each.waited_s) for each in run.slices}
    return [holder_of[rank] for rank in range(4)]


def test_who_came_last_holds_those_that_depend_on_it() -> None:
    assert holders("all_reduce") == [(3, 2.0), (3, 2.0), (3, 1.0), (None, 0.0)]
    assert holders("broadcast", root=2) == [(2, 1.0), (2, 1.0), (None, 0.0), (None, 0.0)]
    assert holders("reduce", root=1) == [(None, 0.0), (3, 2.0), (None, 0.0), (None, 0.0)]
    assert holders("shift", root=1) == [(3, 2.0), (None, 0.0), (None, 0.0), (None, 0.0)]
    # Over `data` ranks 0 and 1 are a group, over `node` 0 and 2; roots count along the axes in order.
    assert holders("all_gather", axes="data") == [(None, 0.0), (None, 0.0), (3, 1.0), (None, 0.0)]
    assert holders("all_gather", axes="node") == [(2, 1.0), (3, 2.0), (None, 0.0), (None, 0.0)]
    assert holders("broadcast", 1, "data,node") == [(2, 1.0), (2, 1.0), (None, 0.0), (None, 0.0)]


def test_of_a_collective_with_a_missing_record_nothing_is_said() -> None:
    run = read_run([record(rank, *once(1, 10.0 + rank, 15.0, details())) for rank in range(3)])
    assert [each.holder for each in run.slices] == [None] * 3
    assert json.loads(trace(run))["otherData"]["missing"] == [3]


def test_who_has_not_come_holds_those_that_wait_to_the_end() -> None:
    begun = once(1, 10.0, 15.0, details())
    for unfinished in (begun[:1], (begun[0], begun[1]._replace(kind=FAILED))):
        waiting = [record(rank, *once(0, 1.0, 2.0, details()), *unfinished) for rank in range(3)]
        run = read_run([*waiting, record(3, *once(0, 1.0, 2.0, details()), *once(1, 14.0, 15.0, line=9))])
        assert [(each.waited_s, each.margin) for each in run.slices if each.state] == [(5.0, 5.0)] * 3
        (seven,) = (line for line in summary(run).lines if line.line == 7)
        assert seven.waited == pytest.approx(15.0) and seven.last == ((3, 1),)
        assert seven.unfinished == 1 and valid(json.loads(trace(run)))
        (seven,) = summary(read_run(waiting)).lines
        assert seven.waited == 0.0, "rank 3 has left no record"


def valid(document: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The events by `ph`, held to the trace event format as Chrome and Perfetto read it."""
    assert set(document) <= {"traceEvents", "displayTimeUnit", "otherData"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    events, latest = defaultdict[str, list[dict[str, Any]]](list), 0.0
    for event in document["traceEvents"]:
        events[event["ph"]].append(event)
        assert type(event["pid"]) is int and type(event["tid"]) is int and type(event["name"]) is str
        assert isinstance(event.get("args", {}), dict)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name") and type(event["args"]["name"]) is str
            continue
        assert type(event["cat"]) is str and event["ts"] >= latest and math.isfinite(event["ts"])
        latest = event["ts"]
        if event["ph"] == "X":
            assert isinstance(event["dur"], float) and 0 <= event["dur"] < math.inf
        elif event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")
        else:
            assert event["ph"] in ("s", "f") and type(event["id"]) is int
    named = {(event["pid"], event["tid"]) for event in events["M"] if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in events["X"] + events["i"]} <= named
    # Slices of a track are consecutive: viewers nest overlapping ones, and drop partial overlaps.
    ends = defaultdict[tuple[int, int], float](float)
    for event in events["X"]:
        track = event["pid"], event["tid"]
        assert event["ts"] >= ends[track] - 1e-3
        ends[track] = event["ts"] + event["dur"]
    starts, finishes = ({event["id"]: event for event in events[ph]} for ph in "sf")
    assert len(starts) == len(events["s"]) == len(events["f"]) and starts.keys() == finishes.keys()
    for flow, finish in finishes.items():
        assert finish["bp"] == "e" and finish["ts"] >= starts[flow]["ts"] - 1e-3
        assert all(starts[flow][key] == finish[key] for key in ("name", "cat"))
        for end in (starts[flow], finish):  # bound to the slice that is there at that time
            assert any(
                slice_["ts"] - 1e-3 <= end["ts"] <= slice_["ts"] + slice_["dur"] + 1e-3
                for slice_ in events["X"]
                if (slice_["pid"], slice_["tid"]) == (end["pid"], end["tid"])
            )
    return events


def overlapping() -> Run:
    """Two collectives at once on rank 0: the program waits for one, and the other fails."""
    events = [*once(1, 1.0, 4.0, details(), wait=0.25), *once(2, 2.0, 3.0, details(), 9, wait=0.0)]
    failed = Event(8.0, FAILED, "line 9 of x.plan", 3, 3, 0)
    begun = Event(5.0, BEGIN, "line 9 of x.plan", 3, 3, 64)
    return read_run([record(0, *events, begun, failed, Event(9.0, VERDICT, "rank 1 is dead", 0, 0, 0))])


@pytest.mark.parametrize("run", [read_run(two_hosts(3)), overlapping(), read_run([record(0)])])
def test_the_trace_is_one_that_viewers_take(run: Run) -> None:
    valid(json.loads(trace(run)))


def test_slices_say_what_they_are_and_arrows_who_came_last() -> None:
    run = read_run(two_hosts(3), {("step", 7, "all_reduce"): [0.002]})
    events = valid(json.loads(trace(run)))
    first = events["X"][0]["args"]
    assert first["line"] == 7 and first["step"] == 1 and first["phase"] == "step"
    assert (first["kind"], first["algorithm"], first["nbytes"]) == ("all_reduce", "ring", 4096)
    assert first["predicted_us"] == pytest.approx(2000.0)
    assert all("predicted_us" not in event["args"] for event in events["X"] if event["args"]["line"] == 9)
    assert len(events["s"]) == sum(each.margin > 0 for each in run.slices)
    assert all(event["args"]["last"] != event["pid"] for event in events["X"] if "last" in event["args"])


def test_what_runs_at_once_lies_on_tracks_of_its_own() -> None:
    events = valid(json.loads(trace(overlapping())))
    network = [
        (event["tid"], event["args"].get("state")) for event in events["X"] if event["cat"] == "network"
    ]
    assert network == [(1, None), (2, None), (1, "failed")]
    (wait, _) = [event for event in events["X"] if event["cat"] == "wait"]
    assert wait["dur"] in (0.0, pytest.approx(250_000.0))


def test_the_summary_counts_steps_waits_and_bandwidth() -> None:
    totals = summary(read_run(two_hosts(3), {("step", 7, "all_reduce"): [0.001]}))
    (steps,) = totals.steps
    assert steps.phase == "step" and steps.count == 40
    assert 0.1 < steps.communicating < 0.7 and steps.waiting == steps.communicating and steps.hidden == 0
    seven, nine = totals.lines
    assert (seven.line, seven.count, nine.line, nine.count) == (7, 40, 9, 40)
    assert 0.001 < seven.transfer < 0.003 and seven.transfer <= seven.seconds <= seven.p95
    assert seven.bandwidth == pytest.approx(4096 / seven.transfer)
    assert seven.drift == pytest.approx(seven.transfer / 0.001) and nine.drift is None
    assert sum(times for _, times in seven.last) + seven.unsure == 40


def test_what_passes_beside_other_work_is_hidden() -> None:
    """Each step of 10 s has a collective of 4 s for which the program waits one second."""
    events: list[Event] = []
    for step in range(1, 6):
        events += once(step, 10.0 * step, 10.0 * step + 4, details(opens="step", axes="x"), wait=1.0)
    alone = record(0, *events)._replace(axes={"x": 1}, ranks=1)
    (steps,) = summary(read_run([alone])).steps
    assert steps.seconds == pytest.approx(10.0) and steps.communicating == pytest.approx(0.4)
    assert steps.hidden == pytest.approx(0.75)


def test_the_first_run_of_a_phase_is_not_measured() -> None:
    """The first run takes 30 s and the others 10 s. The last one has no end."""
    begins = (10.0, 40.0, 50.0, 60.0)
    events = [
        once(step, begin, begin + 4, details(opens="step", axes="x")) for step, begin in enumerate(begins, 1)
    ]

    def steps_of(runs: int) -> list[tuple[int, float, float]]:
        alone = record(0, *(event for run in events[:runs] for event in run))
        run = read_run([alone._replace(axes={"x": 1}, ranks=1)])
        return [(steps.count, steps.seconds, steps.p95) for steps in summary(run).steps]

    assert [steps_of(runs) for runs in (1, 2)] == [[], []]
    assert steps_of(3) == [(3, 10.0, 10.0)] and steps_of(4) == [(4, 10.0, 10.0)]


def test_steps_go_on_where_a_ring_has_wrapped() -> None:
    records = [each._replace(events=each.events[61:], lost=61) for each in two_hosts(3)]
    totals = summary(read_run(records))
    assert totals.lost == 4 * 61 and totals.steps[0].count == 40
    assert totals.lines[0].count + totals.lines[1].count < 80


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COMMPLAN_RECORDS", str(tmp_path))
    return tmp_path


def test_the_command_summarizes(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data_parallel(place)
    assert main(["trace", "summarize", str(place)]) == 0
    out = capsys.readouterr().out
    assert "plan data_parallel: 8 of 8 ranks on 1 host" in out
    assert (
        "phase step: 6 runs, 1 s each" in out and "rank 3 6x" in out and "line 16: all_gather native" in out
    )
    assert main(["trace", "summarize", str(place), "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["lines"][0]["last"] == {"3": 6} and data["missing"] == [] and data["steps"][0]["hidden"] == 0


def test_steps_whose_bytes_are_unknown_have_no_bandwidth(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data_parallel(place, nbytes=0)
    assert main(["trace", "summarize", str(place)]) == 0
    assert "0 B" not in capsys.readouterr().out


def test_the_command_says_what_a_ring_has_lost(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data_parallel(place, steps=2500)
    (place / next(path.name for path in place.iterdir() if path.name.endswith(".7.rec"))).unlink()
    assert main(["trace", "summarize", str(place)]) == 0
    message = capsys.readouterr().err
    assert "the first 12,656 of 70,000 events (18%) have been overwritten" in message
    assert "no record of ranks 7" in message


def test_two_records_of_a_rank_are_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Recording("5f0c", "p", 0, 2).path
    (place / "again").mkdir()
    copied = place / "again" / path.name
    copied.write_bytes(path.read_bytes())
    assert main(["trace", "summarize", str(path), str(copied)]) == 1
    assert "are both records of rank 0" in capsys.readouterr().err


def test_an_empty_ring_has_no_summary(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Recording("5f0c", "p", 0, 2)
    assert main(["trace", "summarize", str(place)]) == 1
    assert "there is no collective in" in capsys.readouterr().err


def test_the_command_wants_a_place_or_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace"]) == 2
    assert "trace summarize" in capsys.readouterr().err


@pytest.mark.parametrize(("plan", "ranks", "says"), [("q", 4, "of plan `p`"), ("p", 8, "of 4 ranks")])
def test_records_of_another_plan_are_refused(
    place: Path, capsys: pytest.CaptureFixture[str], plan: str, ranks: int, says: str
) -> None:
    Recording("5f0c", "p", 0, 4)
    text = f"plan {plan}\naxis data = {ranks}\ninput g : f32[4] partial data\n"
    (place / "x.plan").write_text(text + "each step {\n g = reduce g over data by sum\n output g\n}\n")
    words = ["--plan", str(place / "x.plan"), "-o", str(place / "out.json")]
    assert main(["trace", str(place), *words]) == 1
    assert says in capsys.readouterr().err
