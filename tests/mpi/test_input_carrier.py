"""The transport under real `mpirun`: rows arrive, deaths are reported or survived, and no wait hangs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support import mpirun
from support.campaign import parameters

from bench.harness.mpirun import ULFM

mpirun.needs_mpi()

WORKER = Path(__file__).parent / "input_worker.py"


def played(
    folder: Path, words: dict[str, Any], *options: str, timeout: float = 120, forked: bool = True
) -> tuple[dict[int, dict[str, Any]], subprocess.CompletedProcess[str]]:
    """The output of each rank that ended normally."""
    words = {"batches": 5, "rows": 24, "last": 7, **words}
    command = mpirun.command(len(words["hosts"]), WORKER, folder, json.dumps(words), forked=forked)
    done = mpirun.started([command[0], *options, *command[1:]], timeout)
    reports = [json.loads(path.read_text()) for path in folder.glob("said-*.json")]
    print(f"mpirun ended with {done.returncode}\n{done.stdout}\n{done.stderr}")  # shown if a test fails
    return {report["process"]: report for report in reports}, done


@pytest.mark.parametrize(
    ("design", "readers", "hosts"),
    parameters(
        [
            ("all_shared", None, (0, 1, 0, 1)),
            ("single_broadcast", 1, (0, 1, 1, 2)),
            ("multi_broadcast", 3, (0, 1, 2, 3)),
        ],
        [
            ("all_shared", None, (0, 1)),
            ("single_broadcast", 2, (0, 1, 2, 3)),
            ("multi_broadcast", 2, (0, 0, 1)),
        ],
    ),
)
def test_every_host_has_every_row(tmp_path: Path, design: str, readers: int | None, hosts: tuple[int, ...]):
    reports, done = played(tmp_path, {"design": design, "readers": readers, "hosts": hosts})
    assert done.returncode == 0, done.stderr
    assert set(reports) == set(range(len(hosts)))
    for process, report in reports.items():
        leads = process == hosts.index(hosts[process])
        assert (report["error"], report["wrong"]) == (None, [])
        assert report["carried"] == (list(range(5)) if leads else [])


FEW_TAGS = """
#include <mpi.h>
#include <stdio.h>
int MPI_Comm_get_attr(MPI_Comm comm, int key, void* value, int* found) {
  static int highest = 32767;  /* the least that the standard allows */
  int code = PMPI_Comm_get_attr(comm, key, value, found);
  if (key == MPI_TAG_UB && *found) {
    *(int**)value = &highest;
    fputs("few tags\\n", stderr);
  }
  return code;
}
"""


def test_rows_are_not_taken_for_the_last_message_of_an_mpi_with_few_tags(tmp_path: Path):
    source, library = tmp_path / "few_tags.c", tmp_path / "few_tags.so"
    source.write_text(FEW_TAGS)
    compile_it = [str(mpirun.MPIRUN.with_name("mpicc")), "-shared", "-fPIC", str(source), "-o", str(library)]
    mpirun.ended_well(mpirun.started(compile_it))
    words = {"design": "all_shared", "hosts": (0, 1)}
    reports, done = played(tmp_path, words, "-x", f"LD_PRELOAD={library}", forked=False)
    assert done.returncode == 0 and "few tags" in done.stderr, done.stderr
    assert [(reports[n]["error"], reports[n]["wrong"]) for n in (0, 1)] == [(None, []), (None, [])]


def test_a_host_without_the_engine_is_named_on_all(tmp_path: Path):
    reports, _ = played(tmp_path, {"design": "all_shared", "hosts": (0, 1, 2), "without_engine": [1]})
    failure = "CP0830: the MPI engine cannot be compiled: no mpicxx was found"
    assert reports[1]["error"] == failure
    for process in (0, 2):
        assert reports[process]["error"].startswith(
            failure.replace("the", "host 1 failed: the", 1) + "; line 7"
        )


def test_hosts_at_different_speeds_wait_for_each_other_without_working(tmp_path: Path):
    words = {"design": "all_shared", "hosts": (0, 1, 2), "pause": {"1": 0.5}}
    reports, done = played(tmp_path, words)
    assert done.returncode == 0, done.stderr
    assert [report["wrong"] for report in reports.values()] == [[], [], []]
    # Five pauses of half a second; a wait that spins would be all of it.
    assert reports[0]["cpu"] < reports[1]["cpu"] + 1.0


def test_who_leaves_is_named(tmp_path: Path):
    words = {"design": "all_shared", "hosts": (0, 1, 2), "leave": {"1": 2}}
    reports, _ = played(tmp_path, words)
    message = (
        "CP0935: host 1 left: its batches were closed before the epoch's end; line 7 waits for the parts of"
    )
    assert reports[0]["error"] == reports[2]["error"] == f"{message} every host"
    assert reports[0]["carried"] == reports[2]["carried"] == [0, 1]


def test_who_is_silent_is_named(tmp_path: Path):
    """All other ranks name it, whichever detects it first, and so does the silent rank when it arrives."""
    words = {"design": "all_shared", "hosts": (0, 1, 2), "pause": {"1": 6.0}, "timeout": {"0": 1.0}}
    reports, _ = played(tmp_path, words)
    assert set(reports) == {0, 1, 2}
    for report in reports.values():
        assert report["error"].startswith("CP0937: process 1 on host 1 was silent for 1 s; line 7"), report


def test_a_host_may_be_behind_while_nobody_waits_for_its_rows(tmp_path: Path):
    words = {"design": "all_shared", "hosts": (0, 1), "pause": {"1": 2.5}, "timeout": {"0": 0.5}}
    reports, done = played(tmp_path, {**words, "batches": 2, "unhurried": [0]})
    assert done.returncode == 0 and reports[0]["error"] is None, done.stderr
    assert reports[0]["carried"] == [0, 1]


def test_who_waits_for_another_one_in_turn_is_not_blamed(tmp_path: Path):
    """Rows come from host to host, and all give up at once."""
    words = {"design": "single_broadcast", "readers": 1, "hosts": (0, 1, 2, 3), "pause": {"0": 3.0}}
    reports, _ = played(tmp_path, {**words, "timeout": dict.fromkeys("123", 1.0)})
    for process in (1, 2, 3):
        assert reports[process]["error"].startswith("CP0937: process 0 on host 0 was silent for 1 s; line 7")


def test_a_thread_that_carries_does_not_outlive_the_interpreter():
    """The thread was never joined, and would wait for the interpreter's lock while MPI waits for it at
    exit."""
    done = mpirun.started(mpirun.command(2, WORKER.with_name("carrier_exit_worker.py")), 60)
    assert (done.returncode, sorted(done.stdout.split("\n"))) == (0, ["", "rank 0 ends", "rank 1 ends"])


def test_continue_needs_an_mpi_that_goes_on(tmp_path: Path):
    words = {"design": "all_shared", "hosts": (0, 1), "on_failure": "continue"}
    reports, _ = played(tmp_path, words)
    assert {report["error"][:6] for report in reports.values()} == {"CP0936"}


def test_a_death_is_told_to_all_others(tmp_path: Path):
    words = {"design": "all_shared", "hosts": (0, 1, 2, 3), "die": {"2": 2}}
    reports, _ = played(tmp_path, words, *ULFM)
    assert set(reports) == {0, 1, 3}
    message = "CP0935: process 2 (rank 2, host 2) of 4 died; line 7 waits for the parts of every host"
    assert {report["error"] for report in reports.values()} == {message}
    assert {tuple(report["carried"]) for report in reports.values()} == {(0, 1)}


@pytest.mark.parametrize(
    ("design", "readers", "victim"),
    parameters(
        [
            ("all_shared", None, 2),
            ("single_broadcast", 2, 1),  # the root
            ("multi_broadcast", 1, 0),  # the only reader
        ],
        [
            ("single_broadcast", 2, 0),  # a maker
            ("single_broadcast", 1, 3),  # the end of the chain
            ("multi_broadcast", 2, 1),
        ],
    ),
)
def test_the_others_go_on_when_a_host_dies(tmp_path: Path, design: str, readers: int | None, victim: int):
    words = {"design": design, "readers": readers, "hosts": (0, 1, 2, 3), "die": {str(victim): 2}}
    reports, _ = played(tmp_path, {**words, "on_failure": "continue"}, *ULFM)
    assert set(reports) == {0, 1, 2, 3} - {victim}
    makers = range(4) if readers is None else range(readers)
    for report in reports.values():
        assert (report["error"], report["wrong"], report["carried"]) == (None, [], list(range(5)))
        assert bool(report["regrouped"]) == (victim in makers)
        assert all(victim not in division for _, division in report["regrouped"])


def test_the_next_process_of_a_host_speaks_for_it(tmp_path: Path):
    """And when it dies too, the host is lost, and its parts are made elsewhere."""
    words = {"design": "all_shared", "hosts": (0, 1, 1, 2), "die": {"1": 2, "2": 4}, "batches": 6}
    reports, _ = played(tmp_path, {**words, "on_failure": "continue"}, *ULFM)
    assert set(reports) == {0, 3}
    for report in reports.values():
        assert (report["error"], report["wrong"], report["carried"]) == (None, [], list(range(6)))
        assert [number for number, _ in report["regrouped"]] == [4]


def test_a_process_that_cannot_find_out_who_is_left_says_so(tmp_path: Path):
    words = {"design": "all_shared", "hosts": (0, 1, 2), "lose": {"1": 2}}
    reports, _ = played(tmp_path, {**words, "on_failure": "continue"}, *ULFM)
    assert reports[1]["carried"] == [0, 1]
    assert reports[1]["error"].startswith(
        "CP0938: the thread that determines the remaining processes has ended: SystemExit"
    )
    for report in (reports[0], reports[2]):
        assert report["error"].startswith("CP0938: host 1 failed: the thread that determines the remaining")


def test_one_host_may_be_all_that_is_left(tmp_path: Path):
    words = {"design": "all_shared", "hosts": (0, 1, 2), "die": {"0": 1, "2": 3}}
    reports, _ = played(tmp_path, {**words, "on_failure": "continue"}, *ULFM)
    assert (reports[1]["error"], reports[1]["wrong"], reports[1]["carried"]) == (None, [], list(range(5)))
    assert reports[1]["regrouped"][-1][1] == [1, 1, 1]
