"""`run.jit` on real ranks: matching steps run, and others are refused on all ranks before they run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support import mpirun, preflight_grid, preflight_servers, preflight_steps
from support.campaign import parameters

mpirun.needs_mpi()
SCRIPT = Path(preflight_steps.__file__)
PASSING = ("constant", "prints", "without_jit")
REFUSED = {
    "phases": (
        "rank 1 issues another collective than rank 0 as number 1 of its step `train`",
        "rank 0: all_reduce(sum) f32[6] over data by native, line 7 of the plan, in phase `step` (number 1",
        "rank 1: all_reduce(max) f32[5] over data by native, line 12 of the plan, in phase `norms` (number 1",
    ),
    "batch": (
        "rank 1 calls `train` with other arguments than rank 0",
        "rank 0: argument [2]: f32[4, 6]",
        "rank 1: argument [2]: f32[2, 6]",
    ),
    "accumulated": (
        "rank 1 issues another collective than rank 0 as number 3",
        "rank 1: all_reduce(sum) f32[6] over data by native, line 7 of the plan, in phase `step` (number 3",
    ),
    "own": (
        "rank 1 issues another collective than rank 0 as number 4",
        "rank 0: nothing more after 3",
        "rank 1: mpi4jax.allreduce(sum) f32[3] between ranks [0, 1] (number 4 of 4)",
    ),
    "own_order": (
        "rank 0: mpi4jax.allreduce(sum) f32[3] between ranks [0, 1] (number 4 of 5)",
        "rank 1: mpi4jax.allreduce(sum) f32[4] between ranks [0, 1] (number 4 of 5)",
    ),
}


def answers(cases: str) -> dict[str, dict[int, list[str]]]:
    """By case and rank, the outcome of each call."""
    said: dict[str, dict[int, list[str]]] = {}
    for line in mpirun.run(2, SCRIPT, "mpi", cases).splitlines():
        if not line.startswith("["):
            continue  # the output of a case
        number, name, words = json.loads(line)
        said.setdefault(name, {})[number] = words
    return said


@pytest.fixture(scope="module")
def said() -> dict[str, dict[int, list[str]]]:
    return answers(
        ",".join(("same", "later", *PASSING, *REFUSED, "untraceable", "differs", "checks", "miscounted"))
    )


def test_each_new_shape_is_compared_once(said: dict[str, dict[int, list[str]]]):
    assert said["same"][0] == said["same"][1] == ["ran, compared 5 times"]
    assert said["later"][0] == said["later"][1]
    first, second, third = said["later"][0]
    assert first == third == "ran"
    assert "rank 0: argument [2]: f32[6, 6]" in second and "rank 1: argument [2]: f32[8, 6]" in second


@pytest.mark.parametrize("case", PASSING)
def test_what_fits_together_runs(said: dict[str, dict[int, list[str]]], case: str):
    assert {word for words in said[case].values() for word in words} == {"ran"}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_on_all_ranks(said: dict[str, dict[int, list[str]]], case: str):
    assert said[case][0] == said[case][1]
    for answer in said[case][0]:  # the second call says the same
        assert answer.startswith("error[CP0854]: ")
        for words in REFUSED[case]:
            assert words in answer


def test_a_rank_that_compares_what_the_other_runs_is_refused_on_both():
    done = mpirun.start(2, SCRIPT, "mpi", "late_shape")
    assert done.returncode
    expected = "rank 1 calls `train` with argument [2]: f32[6, 6], rank 0 with argument [2]: f32[4, 6]"
    text = done.stdout + done.stderr
    assert f"error[CP0854]: {expected}" in text  # on the rank that fails first, which ends the job
    places = re.findall(r"note: rank (\d) [^/]* at \S+preflight_steps\.py:\d+ in ", text)
    assert {*places} == {"0", "1"}
    assert "prints the whole message" not in text


@pytest.mark.parametrize(
    ("case", "ranks"),
    parameters(
        [("stops", 2), ("ends", 3)],
        [("stops", 3), ("ends", 2), *((case, n) for case in ("stops_later", "ends_later") for n in (2, 3))],
    ),
)
def test_a_rank_that_stops_or_ends_during_a_comparison_is_named(case: str, ranks: int):
    done = mpirun.start(ranks, SCRIPT, "mpi", case, timeout=50)
    assert done.returncode
    last, text = ranks - 1, done.stdout + done.stderr
    if case.startswith("stops"):
        assert f"error[CP0834]: rank {last} is stopped (SIGSTOP, or a debugger)\n" in text
        # mpirun lets the stopped rank go on when it ends the job, and that one may print this, too.
        assert re.search(rf"note: rank {last} is PID (\d+) on \S+, and lives: kill -CONT \1 ", text)
    else:
        assert f"error[CP0834]: the program has ended on rank {last}\n" in text
        # Each rank that has waited raises the error: the first one that ends makes MPI abort the others.
        assert "note: the comparison of a step, called at " in text


def test_values_that_should_be_the_same_are_compared_before_the_first_step(
    said: dict[str, dict[int, list[str]]],
):
    assert said["differs"][0] == said["differs"][1]
    first, again, unchecked = said["differs"][0]
    assert first == again and unchecked == "ran"
    assert first.startswith("error[CP0861]: leaf `w` of `params` differs between rank 0 and rank 1\n")
    assert "rank 0: float32[6], 1.0, " in first and "rank 1: float32[6], 2.0, " in first


def test_a_rank_without_a_step_tells_the_others(said: dict[str, dict[int, list[str]]]):
    assert said["untraceable"][1] == ["ZeroDivisionError division by zero"]
    assert (
        "error[CP0854]: rank 1 has no step: ZeroDivisionError division by zero" in said["untraceable"][0][0]
    )


@pytest.mark.parametrize(
    ("case", "here", "away"), parameters([("first_away", 1, 0)], [("alone", 0, 1), ("checks_alone", 0, 1)])
)
def test_a_rank_that_does_not_come_is_named_in_time(case: str, here: int, away: int):
    said = answers(case)[case]
    assert said[here][0].startswith(f"error[CP0855]: rank {away} did not arrive")
    assert "under run.jit: a step under a bare jax.jit does not take part" in said[here][0]
    assert said[away] == ["away"]


@pytest.mark.parametrize(
    ("case", "rank", "late"), [("unwatched_alone", 0, 1), ("unwatched_first_away", 1, 0)]
)
def test_a_rank_that_does_not_come_is_printed_once_without_a_watchdog(case: str, rank: int, late: int):
    text = mpirun.start(2 if late else 3, SCRIPT, "mpi", case).stderr
    assert re.findall(
        r"commplan: (.*) within \d+ s\nnote: (.*) at \S+preflight_steps\.py:\d+ in .*, and waits", text
    ) == [(f"rank {late} has not arrived", f"rank {rank} calls `train`")]


def test_binding_compares_the_options_of_jax():
    said = answers("x64")["x64"]
    assert said[0] == said[1]
    message = "error[CP0845]: not every rank binds with the same jax_enable_x64: rank 1 differs from rank 0"
    assert said[0][0].startswith(message)
    assert "rank 0: False" in said[0][0] and "rank 1: True" in said[0][0]


def test_ranks_are_compared_where_they_take_part_in_the_same():
    """Members may differ in their steps; orders that go round in a circle are refused."""
    lines = sorted(mpirun.run(4, Path(preflight_grid.__file__)).splitlines())
    said = {line.partition(": ")[0]: line.partition(": ")[2] for line in lines}
    assert len(said) == 6 * 4
    for rank in range(4):
        assert said[f"members {rank}"] == str([2.0 + 2 * (rank // 2)] * 4)
        assert said[f"roles {rank}"] == str(7.0 if rank < 2 else 11.0)
        assert said[f"local {rank}"] == str(1.0 + rank)
        assert said[f"split {rank}"] == "8.0"
        assert "rank 1 issues another collective than rank 0 as number 1" in said[f"crossed {rank}"]
        assert "rank 0: all_reduce(sum) f32[4] over data" in said[f"crossed {rank}"]
        assert "rank 1: all_reduce(max) f32[3] over member" in said[f"crossed {rank}"]
        assert "rank 0: mpi4jax.allreduce(sum) f32[4] between ranks [0, 1, 2, 3]" in said[f"wrong {rank}"]
        assert "rank 1: mpi4jax.allreduce(sum) f32[4] between ranks [0, 1]" in said[f"wrong {rank}"]


def test_workers_are_compared_and_a_server_has_no_steps():
    lines = mpirun.run(3, Path(preflight_servers.__file__)).splitlines()
    assert sorted(lines) == ["0: 1.0", "1: 1.0", "2: CP0853"]


def test_collectives_that_miscount_are_refused_on_all_ranks(said: dict[str, dict[int, list[str]]]):
    preflight_steps.assert_miscounts_refused(said["miscounted"])


def test_collectives_are_tried_by_all_ranks_or_none(said: dict[str, dict[int, list[str]]]):
    preflight_steps.assert_checks_agreed(said["checks"], "rank")
