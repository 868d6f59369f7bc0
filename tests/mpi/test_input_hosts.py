"""Input shared between hosts under `mpirun`: the same bits by every design, and the contract after deaths."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from support import host_processes, mpirun
from support.campaign import parameters

mpirun.needs_mpi()

WORKER = Path(__file__).parent / "input_hosts_worker.py"
GOES_ON = ["--with-ft", "ulfm", "--mca", "async_mpi_finalize", "1"]
SHARED = Path("/dev/shm")


def run(
    folder: Path, hosts: str, *options: str, well: bool = True, **words: Any
) -> dict[int, dict[str, Any]]:
    """The output of the ranks that end normally."""
    command = mpirun.command(len(hosts.split(",")), WORKER, folder, hosts, json.dumps(words))
    done = mpirun.started([command[0], *options, *command[1:]])
    assert not well or done.returncode == 0, done.stderr
    runs = {run for path in folder.glob("runs-*") for run in path.read_text().split()}
    assert not [path for run in runs for path in SHARED.glob(f"commplan-*{run}*")], "nothing stays there"
    reports = {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json")}
    assert well or reports, done.stderr
    return reports


@pytest.mark.parametrize("hosts", parameters(["a,b,a,b"], ["a,b,c,d"]))
def test_every_design_gives_every_rank_the_same_bits(tmp_path: Path, hosts: str):
    reports = run(tmp_path, hosts, what="everything", designs=host_processes.DESIGNS)
    assert set(reports) == {0, 1, 2, 3}
    once = sorted(host_processes.RECORDS[:, 0].tolist() * 2)
    for design, readers in zip(host_processes.DESIGNS, (4, 4, 2, 3), strict=True):
        for report in reports.values():
            assert len(report[design]["items"]) == 6
            assert report[design]["items"] == report["duplicate"]["items"], design
        decoded = sorted(record for report in reports.values() for record in report[design]["decoded"])
        assert decoded == sorted(once * 4 if design == "duplicate" else once), design
        assert sum(bool(report[design]["decoded"]) for report in reports.values()) == readers, design
        # Only the first rank of each host speaks.
        names = hosts.split(",")
        speaks = [names.index(name) == place and design != "duplicate" for place, name in enumerate(names)]
        assert [sum(reports[rank][design]["moved"]) > 0 for rank in range(4)] == speaks, design


def test_an_error_on_one_host_reaches_all(tmp_path: Path):
    reports = run(tmp_path, "a,a,b", what="failing")
    assert {report["code"] for report in reports.values()} == {"CP0906"}, reports
    assert len({report["message"] for report in reports.values()}) == 1


# With three readers on four processes a host makes nothing: it learns in another way who has which batch.
SOME = "multi_broadcast(readers = 3)"
CASES = {
    "a host": (SOME, "a,b,c,d", {"2": {"batch": 2}}),
    "a leader": (SOME, "a,b,b,c", {"1": {"batch": 2}}),
    "a whole host, one after another": ("all_shared", "a,b,b,c", {"1": {"batch": 2}, "2": {"batch": 4}}),
    "an heir and another host": ("all_shared", "a,b,b,c", {"2": {"decoding": 3}, "3": {"batch": 4}}),
    "a reader, and a host without one": (SOME, "a,b,b,c", {"2": {"decoding": 3}, "3": {"batch": 4}}),
}


FEW = ("a whole host, one after another", "a reader, and a host without one")


@pytest.mark.parametrize("case", parameters(FEW, [case for case in CASES if case not in FEW]))
def test_every_record_is_visited_whoever_dies(tmp_path: Path, case: str):
    design, hosts, die = CASES[case]
    words = {"what": "survived", "design": design, "on_failure": "continue", "epochs": 2, "die": die}
    reports = run(tmp_path, hosts, *GOES_ON, well=False, **words)
    assert set(reports) == {rank for rank in range(4) if str(rank) not in die}
    every = sorted(host_processes.RECORDS[:, 0].tolist())
    first = next(iter(reports.values()))
    for report in reports.values():
        assert report.get("labels") == first["labels"], report
        assert [sorted(chain.from_iterable(epoch)) for epoch in report["labels"]] == [every] * 2


def test_a_death_ends_the_others_where_the_plan_says_so(tmp_path: Path):
    words = {"what": "survived", "design": "all_shared", "on_failure": "stop", "epochs": 3}
    reports = run(tmp_path, "a,b,b,c", *GOES_ON, well=False, die={"3": {"batch": 2}}, **words)
    assert set(reports) == {0, 1, 2}
    assert {report["code"] for report in reports.values()} <= {"CP0935", "CP0920"}, reports
    assert reports[0]["message"].startswith("process 3 (rank 3, host 2) of 4 died; line 8 waits"), reports[0]
