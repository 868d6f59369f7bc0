"""The bench of shared input: records, consumers, processes that wait and are watched, and its verdict."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from support.campaign import parameters

from bench import ensemble_input
from bench.harness.figures import write
from bench.input import cells, show
from bench.input.cells import Cell, Figure
from bench.input.consumers import Consumer
from bench.input.members import DESIGNS, text
from bench.input.records import SHAPE, Packed, decode, numbers, pack
from bench.input.team import StalledError, Team
from commplan import dsl

for _package in ("PIL", "sklearn", "skimage"):
    if importlib.util.find_spec(_package) is None:
        pytest.skip(f"{_package} is not installed", allow_module_level=True)
COUNT = 64


@pytest.fixture(name="records", scope="module")
def _records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("input") / "records.bin"
    pack(path, COUNT)
    return path


def test_records_are_jpegs_that_carry_their_numbers(records: Path):
    packed = Packed(records)
    assert len(packed) == COUNT
    assert packed[5][4:7] == b"\xff\xd8\xff" and int.from_bytes(packed[5][:4], "little") == 5
    batch = np.stack([decode(packed[number]) for number in (5, 0, 63)])
    assert batch.shape == (3, *SHAPE) and numbers(batch).tolist() == [5, 0, 63]
    assert batch.std() > 10  # pictures


def test_consumers_hold_what_they_saw_against_what_there_is():
    batch = np.zeros((4, *SHAPE), np.uint8)
    batch.reshape(4, -1)[:, 0] = [0, 1, 1, 3]
    consumer = Consumer("ids", 4)
    consumer(batch)
    assert consumer.epoch(4) == {"records": 4, "missing": 1, "again": 1}
    assert consumer.epoch(2) == {"records": 0, "missing": 2, "again": 0}
    step = Consumer("step", 4)
    step(batch)
    assert step.epoch(4)["records"] == 4


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("members", [1, 4])
def test_plans_of_all_designs_check(design: str, members: int):
    plan, problems = dsl.load(text(design, members, 2), "input.plan")
    assert plan is not None, problems


WAITING = """
import sys, time
from bench.input.team import answer, cannot
if sys.argv[1] == "cannot":
    cannot("it is not installed")
elif sys.argv[1] == "dies":
    raise SystemExit("no luck")
elif sys.argv[1] == "silent":
    time.sleep(600)
else:
    def epoch():
        before = time.process_time()
        while time.process_time() < before + 0.2:
            pass
        return {"records": 10, "missing": 0, "again": 0, "spent": time.process_time() - before}
    answer(epoch)
"""


def team(kind: str, count: int, folder: Path, timeout: float = 60.0) -> Team:
    command = [sys.executable, "-c", WAITING, kind]
    return Team([], [command] * count, cores=(min(os.sched_getaffinity(0)),), folder=folder, timeout=timeout)


def test_a_team_s_cpu_is_that_of_all_its_processes(tmp_path: Path):
    two = team("works", 2, tmp_path)
    try:
        block = two.block()
        assert block.cpu_s >= sum(answer["spent"] for answer in block.answers), "what each says is in it"
        assert [answer["records"] for answer in block.answers] == [10, 10]
        shared, private = two.memory()
        assert shared > private > 0
        pids = [member.process.pid for member in two.members]
        assert all(os.sched_getaffinity(pid) == {min(os.sched_getaffinity(0))} for pid in pids)
    finally:
        two.close()
    assert all(member.process.returncode == 0 for member in two.members)


@pytest.mark.parametrize(
    ("kind", "message"), [("cannot", "not installed"), ("dies", "no luck"), ("silent", "was silent for 2 s")]
)
def test_systems_that_do_not_answer_are_named_and_ended(
    kind: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("bench.input.team.END_S", 0.5)
    with pytest.raises(StalledError, match=message):
        team(kind, 1, tmp_path, timeout=2.0 if kind == "silent" else 60.0)


@pytest.mark.parametrize("peers", parameters([()], [(("grain",),)]))
def test_a_cell_is_measured(peers: tuple[str, ...], records: Path, tmp_path: Path):
    cell = cells.Asked(
        2, (min(os.sched_getaffinity(0)),), "ids", 2, ("all_shared", "duplicate", "plain", *peers)
    )
    results = cells.measure(cell, records, tmp_path, sys.executable, 100.0)
    shared, duplicate, plain = (results.of(name) for name in ("all_shared", "duplicate", "plain"))
    assert shared and duplicate and plain
    for result in (shared, duplicate, plain):
        assert (
            len(result.cpu_s) == len(result.rate) == 2
            and result.missing == result.again == 0
            and not result.failed
        )
    assert duplicate.made == pytest.approx(2 * 150_528) and shared.made == pytest.approx(150_528)
    assert len(results.decode_s) == len(results.consume_s) == len(results.apart_s) == 2 and results.limit > 0
    assert results.apart is not None and results.apart > 0
    shown = show.cell(results)
    assert "commplan, all_shared" in shown and "all, once" in shown and "2 members on 1 core" in shown
    assert ("Grain, duplicated" in shown) == bool(peers)


def cell(members: int, *, shared: float, memory: int = 10, missing: int = 0) -> Cell:
    figures = [
        Figure("all_shared", [shared] * 3, [1000.0] * 3, 150_528.0, missing, 0, memory, memory),
        Figure("plain", [2e-3, 2.1e-3, 1.9e-3], [90.0] * 3),
        Figure("grain", failed="grain is not installed"),
    ]
    return Cell(members, 1, "ids", [1.92e-3] * 3, [1e-6] * 3, figures)


def test_shared_designs_are_compared_with_duplicated_work(tmp_path: Path):
    good = show.Results({}, 512, 64, [cell(1, shared=2e-3), cell(12, shared=1.64e-4)])
    assert show.verdict(good).count("\n") == 1 and "12.2x less CPU" in show.verdict(good)
    bad = show.verdict(show.Results({}, 512, 64, [cell(12, shared=4e-4, memory=400_000_000, missing=3)]))
    assert "400 MB in addition" in bad and "missing or given twice" in bad
    assert "grain is not installed" in show.cell(good.cells[0])
    write(tmp_path / "found.json", good)
    assert msgspec.json.decode((tmp_path / "found.json").read_bytes(), type=show.Results) == good


def test_what_is_asked_is_checked(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        ensemble_input.main(["--records", "100"])
    assert "a multiple of 64" in capsys.readouterr().err
