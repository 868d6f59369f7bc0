"""Records of ranks: the file, the blocking ranks, and the trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from commplan.cli import main
from commplan.diagnostics import CommplanError
from commplan.recorder import file as record_file
from commplan.recorder import reading
from commplan.recorder.blame import blame
from commplan.recorder.collectives import read_run
from commplan.recorder.file import (
    BEGIN,
    END,
    FAILED,
    GONE,
    ROUND,
    VERDICT,
    Call,
    Details,
    Event,
    Record,
    Recording,
    machine,
)
from commplan.recorder.lane import Lane
from commplan.recorder.reading import read_records
from commplan.recorder.trace import head, trace

PLAN = "images"


def record(rank: int, *events: Event, process: int | None = None, elsewhere: bool = False) -> Record:
    where = "another machine" if elsewhere else machine()
    pid = os.getpid() if process is None else process
    return Record(f"job.{rank}.rec", PLAN, rank, 3, "node", where, pid, 1.0, False, 0, tuple(events))


def gone() -> int:
    """The number of a process that has ended."""
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    return ended.pid


def run(name: str, begin: float, end: float | None, operation: int, runs: int = 1) -> tuple[Event, ...]:
    begun = Event(begin, BEGIN, name, operation, runs, 64)
    return (begun,) if end is None else (begun, Event(end, END, name, operation, runs, 0))


def test_who_has_not_come_holds_those_that_wait():
    waits = (*run("line 6", 1, 2, 1), *run("line 7", 3, None, 2))
    verdict = blame([record(0, *waits), record(1, *waits), record(2, *run("line 6", 1, 2, 1))])
    assert verdict.holders == {2: "it has not reached line 7"}
    assert verdict.ranks[0].waits is not None and verdict.ranks[0].waits.name == "line 7"
    assert verdict.ranks[2].last is not None and verdict.ranks[2].last.name == "line 6"


def test_who_came_and_went_on_holds_nobody():
    finished = run("line 6", 1, 2, 1)
    verdict = blame([record(0, *run("line 6", 1, None, 1)), record(1, *finished), record(2, *finished)])
    assert verdict.holders == {}


def test_a_run_behind_the_others_counts_as_not_come():
    waits = run("line 6", 4, None, 9, runs=9)
    behind = run("line 6", 1, 2, 8, runs=8)
    assert blame([record(0, *waits), record(1, *behind)]).holders == {1: "it has not reached line 6"}


def test_another_order_is_that_of_the_fewest():
    ranks = [record(0, *run("line 6", 1, None, 1)), record(1, *run("line 7", 1, None, 1))]
    verdict = blame([*ranks, record(2, *run("line 6", 1, None, 1))])
    assert verdict.holders == {1: "it waits in line 7, most others in line 6"}


def test_the_dead_hold_the_living():
    waits = run("line 6", 1, None, 1)
    verdict = blame([record(0, *waits), record(1, *waits, process=gone())])
    assert verdict.holders == {1: "it is dead"}
    assert verdict.missing == (2,)
    assert [rank.state for rank in verdict.ranks] == ["alive", "dead"]


@pytest.mark.parametrize(
    ("named", "ranks"), [("rank 1", [1]), ("each of ranks 1-3, 6, 7 and 2 more", [1, 2, 3, 6, 7])]
)
def test_who_was_stopped_when_the_job_ended_is_said_to_have_been(named: str, ranks: list[int]):
    """The waiting rank has ended with the verdict; the record of the stopped one does not show its end."""
    verdict_event = Event(9, VERDICT, f"{named} is stopped (SIGSTOP, or a debugger)", 0, 0, 0)
    events = (*run("line 6", 1, None, 1), verdict_event, Event(10, GONE, "exited with status 1", 0, 0, 0))
    verdict = blame([record(0, *events, process=gone()), record(1, process=gone())])
    reason = "it is stopped (SIGSTOP, or a debugger), according to the verdict of rank 0"
    assert verdict.holders == dict.fromkeys(ranks, reason)


def test_of_another_machine_nothing_is_known():
    waits = run("line 6", 1, None, 1)
    assert blame([record(0, *waits, elsewhere=True)]).ranks[0].state == "unknown"


def test_what_failed_is_not_finished_and_verdicts_are_told():
    events = (
        *run("line 6", 1, None, 1),
        Event(2, FAILED, "line 6", 1, 1, 0),
        Event(3, VERDICT, "rank 1 is", 0, 0, 0),
    )
    verdict = blame([record(0, *events)])
    assert verdict.ranks[0].waits is not None
    assert verdict.verdicts == {0: "rank 1 is"}


def test_how_far_an_operation_is_is_told_of_the_one_that_waits():
    at = [Event(3, ROUND, "line 7", 2, 1 << 32 | 6, 4), Event(4, ROUND, "line 7", 2, 5 << 32 | 6, 7)]
    waits = record(0, *run("line 6", 1, 2, 1), *run("line 7", 3, None, 2), *at)
    (rank,) = blame([waits]).ranks
    assert str(rank.progress) == "in round 5 of 6, waiting for rank 3 to take a message"
    (rank,) = blame([record(0, *run("line 7", 3, 5, 2), *at, *run("line 8", 6, None, 3))]).ranks
    assert rank.progress is None


def traced(*records: Record) -> dict[str, Any]:
    return json.loads(trace(read_run(records)))


def test_the_trace_has_a_slice_for_each_operation():
    events = (*run("line 6 of x.plan", 10.0, 10.5, 1), *run("line 7 of x.plan", 11.0, None, 2))
    document = traced(record(0, *events), record(1, *run("line 6 of x.plan", 10.0, 12.0, 1)))
    slices = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert [(each["pid"], each["ts"], each["dur"]) for each in slices] == [
        (0, 0.0, 5e5), (1, 0.0, 2e6), (0, 1e6, 1e6),
    ]  # fmt: skip
    assert [each["args"].get("state") for each in slices] == [None, None, "unfinished"]
    assert slices[0]["args"]["line"] == 6


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COMMPLAN_RECORDS", str(tmp_path))
    return tmp_path


def test_a_new_record_is_empty_and_goes_at_a_clean_end(place: Path):
    recording = Recording("5f0c", PLAN, 1, 4)
    (only,) = read_records([str(place)])
    assert only._replace(path="", host="", started=0.0, clock=0.0) == Record(
        "", PLAN, 1, 4, "", machine(), os.getpid(), 0.0, False, 0, ()
    )  # fmt: skip
    assert recording.path.stat().st_mode & 0o777 == 0o600
    recording.remove()
    assert list(place.iterdir()) == []


def test_the_folder_of_records_is_made(place: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COMMPLAN_RECORDS", str(place / "job" / "77"))
    recording = Recording("5f0c", PLAN, 1, 4)
    assert recording.path.parent == place / "job" / "77" and recording.path.exists()
    recording.remove()


def test_old_records_go_when_a_new_one_is_made(place: Path):
    old, other = place / f"{record_file.prefix()}old.0.rec", place / "commplan-someone.rec"
    for path in (old, other):
        path.write_bytes(b"x")
        os.utime(path, (1, 1))
    Recording("new", PLAN, 0, 1)
    assert not old.exists() and other.exists()


def test_the_ring_keeps_the_last_events(place: Path):
    recording = Recording("5f0c", PLAN, 0, 1)
    memory, header = recording.memory, record_file.HEADER
    fields = list(header.unpack_from(memory))
    capacity, extra = fields[7], 5
    fields[8], fields[9] = capacity + extra, 1
    header.pack_into(memory, 0, *fields)
    memory[header.size : header.size + 6] = b"line 6"
    events_at = header.size + record_file.NAME * record_file.MOST_NAMES
    for index in range(capacity + extra):
        at = events_at + record_file.EVENT.size * (index % capacity)
        record_file.EVENT.pack_into(memory, at, index, BEGIN, 0, index, index, 8)
    (only,) = read_records([str(recording.path)])
    assert only.lost == extra
    assert [event.operation for event in only.events] == list(range(extra, capacity + extra))
    assert {event.name for event in only.events} == {"line 6"}


def test_what_is_overwritten_while_it_is_read_is_lost(place: Path, monkeypatch: pytest.MonkeyPatch):
    recording = Recording("5f0c", PLAN, 0, 1)
    memory, header = recording.memory, record_file.HEADER
    fields = list(header.unpack_from(memory))
    capacity = fields[7]
    fields[8], fields[9] = capacity, 1
    header.pack_into(memory, 0, *fields)
    events_at = header.size + record_file.NAME * record_file.MOST_NAMES
    for index in range(capacity):
        at = events_at + record_file.EVENT.size * index
        record_file.EVENT.pack_into(memory, at, index, BEGIN, 0 if index != 20 else 999, index, 1, 8)
    before = recording.path.read_bytes()
    fields[8] = capacity + 7  # seven events came while the file was read, and an eighth is being written
    header.pack_into(memory, 0, *fields)
    after = recording.path.read_bytes()[: header.size]
    monkeypatch.setattr(reading, "_pieces", lambda *_: [before, after])
    (only,) = read_records([str(recording.path)])
    assert only.lost == 8
    assert [event.operation for event in only.events] == [*range(8, 20), *range(21, capacity)]


def test_a_record_is_kept_on_demand(place: Path, monkeypatch: pytest.MonkeyPatch):
    recording = Recording("5f0c", PLAN, 0, 6, {"member": 2, "data": 3})
    monkeypatch.setenv("COMMPLAN_KEEP_RECORDS", "1")
    recording.remove()
    (only,) = read_records([str(place)])
    assert (only.plan, only.axes) == (PLAN, {"member": 2, "data": 3})
    monkeypatch.setenv("COMMPLAN_KEEP_RECORDS", "0")
    recording.remove()
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("numbers", [(3, 3), (-1, 2), (0, 2**40)])
def test_a_record_of_no_rank_is_refused(place: Path, numbers: tuple[int, int]):
    Recording("5f0c", PLAN, *numbers)
    with pytest.raises(CommplanError, match="damaged record"):
        read_records([str(place)])


def test_records_that_are_being_created_are_left_out_of_a_folder(place: Path):
    recording = Recording("job", PLAN, 0, 2)
    for number, content in enumerate((b"", bytes(4096))):
        (place / recording.path.name.replace(".0.rec", f".{number + 1}.rec")).write_bytes(content)
    assert [record.rank for record in read_records([str(place)])] == [0]


def test_records_of_another_version_are_left_out_of_a_folder(place: Path):
    Recording("5f0c", PLAN, 0, 2)
    other = Recording("5f0c", PLAN, 1, 2).path
    other.write_bytes(record_file.MAGIC + (1).to_bytes(8, "little") + bytes(100))  # which was shorter
    assert [record.rank for record in read_records([str(place)])] == [0]
    with pytest.raises(CommplanError, match="is a record of version 1"):
        read_records([str(other)])


@pytest.mark.parametrize("content", [b"", b"commplan", b"x" * record_file.SIZE])
def test_other_files_are_refused(tmp_path: Path, content: bytes):
    path = tmp_path / "a.rec"
    path.write_bytes(content)
    with pytest.raises(CommplanError) as caught:
        read_records([str(path)])
    assert caught.value.diagnostics[0].code == "CP1114"
    with pytest.raises(CommplanError):
        read_records([str(tmp_path / "missing.rec")])


def test_a_record_that_claims_millions_of_ranks_costs_no_memory_for_each(
    place: Path, capsys: pytest.CaptureFixture[str]
):
    lane = Lane(Recording("5f0c", PLAN, 1, 2**24))
    lane.begin(lane.name("line 6", "serve"), 1, 0)
    records = read_records([str(place)])
    verdict = blame(records)
    assert verdict.missing[:2] == (0, 2) and len(verdict.missing) == 1000 and verdict.absent == 2**24 - 1
    tracemalloc.start()
    assert len(head(read_run(records))["missing"]) == 1000
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    main(["blame"])
    assert ", 100 and 16,777,115 more: they ended well" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["device", "pipe"])
def test_what_is_no_regular_file_is_no_record(place: Path, kind: str):
    Recording("5f0c", PLAN, 0, 2)
    odd = place / f"{record_file.prefix()}5f0c.1.rec"
    if kind == "pipe":
        os.mkfifo(odd)
    else:
        odd.symlink_to("/dev/zero")
    assert [record.rank for record in read_records([str(place)])] == [0]
    with pytest.raises(CommplanError, match=f"CP1114.*it is a {kind}, not a regular file"):
        read_records([str(odd)])


def test_the_command_says_that_there_are_none(place: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["blame"]) == 1
    assert "CP1114" in capsys.readouterr().err
    assert main(["trace", "-o", str(place / "out.json")]) == 1


def test_the_command_reads_what_is_there(place: Path, capsys: pytest.CaptureFixture[str]):
    for rank in range(2):
        Recording("5f0c", PLAN, rank, 2)
    assert main(["blame", "--format", "json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)["runs"]
    assert report["plan"] == PLAN and len(report["ranks"]) == 2 and report["holders"] == []
    assert main(["trace", "-o", str(place / "out.json")]) == 0
    assert ": 2 ranks, 0 events; open it at" in capsys.readouterr().err
    Recording("6f0c", PLAN, 0, 2)
    assert main(["trace", "-o", str(place / "out.json")]) == 1
    assert "2 runs" in capsys.readouterr().err


def test_the_command_says_what_another_host_alone_knows(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    recording = Recording("5f0c", PLAN, 0, 2)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(sys.modules["commplan.recorder.blame"], "machine", lambda: "another")
        assert main(["blame", str(place)]) == 0
    host = read_records([str(recording.path)])[0].host
    assert f"to see whether processes on {host} run, use commplan blame there" in capsys.readouterr().out
    assert main(["blame", str(place)]) == 0
    assert "told there alone" not in capsys.readouterr().out


def test_without_files_the_last_run_is_shown(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for job, plan in (("b", "first"), ("a", "last")):
        Recording(job, plan, 0, 1)
    monkeypatch.setattr("commplan.cli.records.state", lambda _: "dead")
    main(["blame", "--format", "json"])
    assert [each["plan"] for each in json.loads(capsys.readouterr().out)["runs"]] == ["last"]
    main(["blame", str(place), "--format", "json"])
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 2


def lane(rank: int, name: str, *events: Event, call: Call | None = None) -> Record:
    return record(rank, *events)._replace(path=f"job.{rank}.{name}.rec", lane=name, call=call)


def task(kind: str, runs: int, operation: int, awaits: int | None = None) -> tuple[Event, ...]:
    """A task that began at 5 s and has waited for a rank since 6 s."""
    begun = Event(5, BEGIN, "line 9", operation, runs, 0, Details(kind, "run", 0, "-", 0, "", ()))
    return (begun,) if awaits is None else (begun, begun._replace(seconds=6, kind=ROUND, nbytes=2 * awaits))


def test_who_waits_for_a_batch_or_a_server_is_not_to_blame():
    """Ranks 0 and 1 wait in a collective for 2, rank 2 for a batch, and the producer of the batch for an
    answer."""
    collective = run("line 6", 1, None, 1)
    first = [record(0, *collective), record(1, *collective), record(2), record(3)]
    waits = lane(2, "input", *task("wait", 4, 1, awaits=3))
    makes = lane(3, "input", *task("make", 4, 1))
    assert blame([*first, waits, makes]).holders == {3: "it has not made its part of batch 4 of line 9"}
    asks = lane(3, "requests", *task("request", 2, 1, awaits=4))
    serves = lane(4, "server", *task("serve", 2, 1))
    holders = blame([*first, waits, makes, asks, serves]).holders
    assert holders == {4: "it has not answered request 2 of line 9"}
    slow = makes._replace(call=Call("host function `f`", 5.0, "a.py:3 in f"))
    (reason,) = blame([*first, waits, slow]).holders.values()
    assert ": it is in host function `f`, for " in reason and reason.endswith("; its Python: a.py:3 in f")
    stopped = makes._replace(process=gone())
    records = [each._replace(process=gone()) if each.rank == 3 else each for each in first]
    assert blame([*records, waits, stopped]).holders == {3: "it is dead"}


def test_ranks_that_wait_for_one_another_end_the_search():
    """Rank 1 waits in a collective for 0, which waits for a batch of 1: either may be wrong."""
    waits = lane(0, "input", *task("wait", 4, 1, awaits=1))
    assert blame([record(0), waits, record(1, *run("line 6", 1, None, 1))]).holders == {}


def test_lanes_of_a_rank_lie_beside_its_record_and_leave_with_it(place: Path):
    recording = Recording("5f0c", PLAN, 0, 2)
    lane = Lane(recording.lane("input"))
    name = lane.name("line 9 of a.plan", "wait", "run")
    assert (
        name == lane.name("line 9 of a.plan", "wait", "run") != lane.name("line 9 of a.plan", "make", "run")
    )
    operation = lane.begin(name, 3, 1 << 32 | 2)
    lane.awaits(name, operation, 1)
    lane.recording.put_call(Call("source `a`", 2.0, "a.py:3 in f"))
    first, second = read_records([str(place)])
    assert (first.lane, second.lane, second.rank) == ("", "input", 0)
    assert [(event.kind, event.runs, event.nbytes) for event in second.events] == [
        (BEGIN, 3, 1 << 32 | 2), (ROUND, 0, 2),
    ]  # fmt: skip
    assert second.events[0].details is not None and second.events[0].details.kind == "wait"
    assert second.call is not None and second.call.text == "source `a`" and second.call.stack == "a.py:3 in f"
    lane.end(name, operation, 3)
    recording.remove()
    assert read_records([str(place)]) == []


def test_what_failed_in_a_lane_is_kept_with_how_the_process_ended(place: Path):
    recording = Recording("5f0c", PLAN, 0, 2)
    lane = Lane(recording.lane("input"))
    lane.end(lane.name("line 9", "wait"), 1, 1, failed=True)
    recording.remove()
    assert [record.ended for record in read_records([str(place)])] == ["has ended"] * 2
    recording.put_call(Call("source `a`", 2.0, "x" * 5000))  # longer than its room
    assert read_records([str(recording.path)])[0].call is not None


def test_who_ended_well_is_not_dead(place: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COMMPLAN_KEEP_RECORDS", "1")
    program = (
        "from commplan.recorder.file import start_recording\n"
        "start_recording('5f0c', 'p', 0, 1)\n"
        "raise SystemExit(0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    (rank,) = blame(read_records([str(place)])).ranks
    assert rank.state == "ended" and rank.end == "has ended"
    raised = program.replace("raise SystemExit(0)", "raise KeyError('own')").replace("5f0c", "6f0c")
    subprocess.run([sys.executable, "-c", raised], check=False, stderr=subprocess.DEVNULL)
    (rank,) = blame(read_records([str(place / f"{record_file.prefix()}6f0c.0.rec")])).ranks
    assert rank.end == "has ended with KeyError: 'own'"


def test_who_ended_with_a_verdict_is_not_to_blame(monkeypatch: pytest.MonkeyPatch):
    """Rank 1 is still in a run before that of the others, which have ended because of it."""
    verdict_event = Event(4, VERDICT, "rank 1 does not answer", 0, 0, 0)
    records = [
        record(rank, *run("line 6", 2, None, 6, runs=6), verdict_event, process=gone()) for rank in (0, 2)
    ]
    behind = record(1, *run("line 6", 1, None, 5, runs=5))
    verdict = blame([*records, behind], lambda record: f"{record.path}:3 in f")
    assert verdict.holders == {1: "it is still in line 6, run 5; its Python: job.1.rec:3 in f"}
    assert [rank.state for rank in verdict.ranks] == ["ended", "alive", "ended"]
    states = {os.getpid(): "stopped"}
    monkeypatch.setattr(
        sys.modules["commplan.recorder.blame"], "process_state", lambda number, _: states.get(number, "dead")
    )
    lives = f"process {os.getpid()} on node lives, and kill -CONT {os.getpid()} lets it continue"
    assert blame([*records, behind]).holders == {1: f"it is stopped: {lives}"}
