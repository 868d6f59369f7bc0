"""The shared code of the benches: test data that reveals mistakes, figures, verdicts, watched processes."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from bench import collectives, fused, prediction
from bench.collectives import entries, rows, share_of_openmpi, ways
from bench.collectives import parser as collectives_parser
from bench.harness.arguments import size
from bench.harness.figures import Results, heading, read, size_text, table, time_text, write
from bench.harness.group import Group
from bench.harness.plans import chosen, schedule
from bench.harness.stage import Figure, Surroundings, topology
from bench.harness.work import KINDS, MOST_RANKS, Work, count_of, expected, operand, wrong
from bench.netlab import Lab, Shape
from commplan.diagnostics import CommplanError
from commplan.topology import parse_topology

LINE = 24e6  # bytes a second
RANKS = 4


# Data


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 5, MOST_RANKS])
@pytest.mark.parametrize("variant", [0, 1])
def test_what_is_expected_is_what_the_operands_make(kind: str, ranks: int, variant: int):
    work = Work(kind, (count_of(kind, 4 * 130, ranks), count_of(kind, 4, ranks)))
    for tensor in range(2):
        operands = [operand(work, tensor, rank, ranks, variant).astype(np.int64) for rank in range(ranks)]
        total = sum(operands) if kind != "all_gather" else np.concatenate(operands)
        for rank in range(ranks):
            whole = operands[0] if kind == "broadcast" else total
            block = len(whole) // ranks
            target = whole[rank * block : (rank + 1) * block] if kind == "reduce_scatter" else whole
            results = expected(work, tensor, rank, ranks, variant)
            assert results.dtype == np.float32
            assert np.array_equal(results.astype(np.int64), target)


def test_sums_stay_exact_in_float32():
    work = Work("all_reduce", (61,))
    assert expected(work, 0, 0, MOST_RANKS, 0).max() <= 2**24


@pytest.mark.parametrize("mistake", ["missing", "twice", "swapped", "stale", "short", "fewer"])
def test_mistakes_show(mistake: str):
    work, variant = Work("all_reduce", (200, 3)), 1
    terms = [operand(work, 0, rank, RANKS, variant) for rank in range(RANKS)]
    right = [expected(work, i, 2, RANKS, variant) for i in range(2)]
    assert wrong(work, right, 2, RANKS, variant) == ""
    results = {
        "missing": [right[0] - terms[1], right[1]],
        "twice": [right[0] + terms[3] - terms[2], right[1]],
        "swapped": [right[0][::-1].copy(), right[1]],
        "stale": [expected(work, i, 2, RANKS, 0) for i in range(2)],
        "short": [right[0][:-1], right[1]],
        "fewer": right[:1],
    }[mistake]
    assert wrong(work, results, 2, RANKS, variant)


def test_buffers_of_blocks_are_rounded_up():
    assert count_of("all_reduce", 4, 6) == 1
    assert count_of("all_gather", 4, 6) == 6
    assert count_of("reduce_scatter", 64 << 10, 6) == 16386


# Figures


def figure(label: str, kind: str, nbytes: int, seconds: list[float], **more: str) -> Figure:
    work, cpu = Work(kind, (nbytes // 4,)), [0.001] * len(seconds)
    return Figure(label, label.split(maxsplit=1)[0], work, RANKS, seconds, cpu, **more)


def test_bus_bandwidth_is_that_of_nccl_tests():
    rates = {kind: figure("torch", kind, 1 << 20, [1.0]).bus / (1 << 20) for kind in KINDS}
    assert rates == {"all_reduce": 1.5, "broadcast": 1.0, "reduce_scatter": 0.75, "all_gather": 0.75}


def test_time_and_spread_are_median_and_quartiles():
    measured = figure("torch", "broadcast", 4, [1.0, 2.0, 3.0, 4.0, 100.0])
    assert measured.time == 3.0
    assert measured.spread == pytest.approx(1 / 3)
    assert figure("torch", "broadcast", 4, [1.0]).spread == 0.0


def test_texts():
    assert [size_text(n) for n in (4, 16 << 10, 4 << 20, 65544)] == ["4 B", "16 KiB", "4 MiB", "65544 B"]
    assert [time_text(t) for t in (2.5e-5, 4.56e-4, 0.0123, 0.456, 1.5, 12.3)] == [
        "25.0 us", "456 us", "12.3 ms", "456 ms", "1.50 s", "12.3 s",
    ]  # fmt: skip
    assert table([["a", "n", "chosen"], ["bc", "10", "x"]]) == "a    n  chosen\nbc  10  x"
    assert [size(text) for text in ("4B", "16KiB", "64 MiB", "8")] == [4, 16 << 10, 64 << 20, 8]
    with pytest.raises(SystemExit):
        collectives_parser().parse_args(["--sizes", "4parsec"])
    with pytest.raises(SystemExit):
        collectives_parser().parse_args(["--systems", "nccl"])


def example(shape: Shape | None = None) -> Results:
    shape = shape or Shape()
    lab = Lab(shape)
    rates = {"host": LINE} | ({"uplink": LINE} if shape.racks > 1 else {})
    where = Surroundings("2026-01-01", shape, "reno", rates, [host.name for host in lab.ranks],
                         topology(lab, rates), 2, (0.0, 0.0, 0.0), "3.11", {})  # fmt: skip
    size = 4 << 20
    perfect = 1.5 * size / LINE
    return Results(
        "collectives",
        where,
        [
            figure("commplan", "all_reduce", size, [perfect * 1.02], note="ring call"),
            figure("openmpi", "all_reduce", size, [perfect * 2]),
            figure("torch", "all_reduce", size, [perfect * 1.01]),
            figure("commplan via torus", "all_reduce", size, [perfect]),
            figure("commplan", "all_reduce", 1024, [3e-4]),
            figure("openmpi", "all_reduce", 1024, [1.1e-4]),
            figure("torch", "all_reduce", 1024, [2e-4]),
            figure("empty call", "empty", 1024, [5e-5]),
        ],
    )


def test_small_messages_are_compared_with_openmpi_and_empty_calls():
    figures = example().figures
    assert share_of_openmpi(figures[4:]) == pytest.approx(3e-4 / (1.1e-4 + 1.2 * 5e-5))
    assert share_of_openmpi(figures[:4]) == 0.0  # no empty call is measured for large ones


def test_rows_show_what_is_missing():
    figures = [figure("commplan", "broadcast", 4, [2.0]), figure("xla", "broadcast", 4, [1.0]),
             figure("torch", "broadcast", 4, [], missing="no broadcast")]  # fmt: skip
    _, ours, theirs, missing = rows(figures, example().surroundings)
    assert (ours[7:9], theirs[7:9], missing[1]) == (["", "0.50"], ["", "1.00"], "no broadcast")


@pytest.mark.parametrize(
    ("interleave", "uplink", "seconds"), [(False, LINE, 1.75), (True, LINE, 1.75), (True, LINE / 4, 4.0)]
)
def test_the_bound_of_two_racks(interleave: bool, uplink: float, seconds: float):
    """Of S bytes per line rate: hosts send 2(n-1)/n of them, and each rack must send all of them once."""
    lab = Lab(Shape(4, 2, interleave=interleave))
    text = topology(lab, {"host": LINE, "uplink": uplink})
    where = msgspec.structs.replace(
        example().surroundings, shape=lab.shape, topology=text, hosts=[host.name for host in lab.ranks]
    )
    work = Work("all_reduce", (6_000_000,))
    assert where.bound(work) == pytest.approx(seconds, rel=1e-3)
    figures = [Figure("commplan", "commplan", work, 8, [2 * seconds], [0.1])]
    assert rows(figures, where)[1][7] == "0.500"


def test_results_are_read_back(tmp_path: Path):
    path = tmp_path / "results.json"
    write(path, example())
    assert read(path) == example()
    assert "4 hosts, one switch" in heading(example().surroundings)
    assert "2 racks of 3, ranks go round" in heading(example(Shape(3, 2, interleave=True)).surroundings)


# The compared values


def test_entries_of_collectives():
    options = collectives_parser().parse_args(["--algorithms", "all", "--systems", "commplan,torch"])
    labels = [entry.label for entry in entries("all_reduce", 1024, options, Shape(racks=2))]
    assert labels[:4] == ["commplan", "torch", "empty call", "commplan via native"]
    assert "commplan via ring" in labels
    assert labels[-1] == "commplan hierarchical(host = ring, rack = ring)"
    assert "via hierarchical" not in ways("all_reduce", Shape())
    options = collectives_parser().parse_args(["--systems", "torch"])
    assert [entry.label for entry in entries("broadcast", 4, options, Shape())] == ["torch"]


def test_the_sets_of_tensors():
    assert (len(fused.SETS["forty"]), min(fused.SETS["forty"]) * 4, max(fused.SETS["forty"]) * 4) == (
        40,
        256,
        256 << 10,
    )
    assert 1.9e6 < 4 * sum(fused.SETS["forty"]) < 2.1e6
    assert (len(fused.SETS["resnet50"]), sum(fused.SETS["resnet50"])) == (161, 25_557_032)
    assert fused.SETS["small"] == (256,) * 200
    assert [entry.label for entry in fused.entries("small", ("commplan", "xla"))] == [
        "commplan", "xla each", "xla combined", "xla fused",
    ]  # fmt: skip


def test_ratios_of_many_tensors():
    work = {how: Work("all_reduce", (1, 1), how) for how in ("", "each", "fused")}
    figures = [
        Figure("commplan", "commplan", work[""], RANKS, [1.0], [0.1], note="ring"),
        Figure("openmpi fused", "openmpi", work["fused"], RANKS, [0.5], [0.1]),
        Figure("xla each", "xla", work["each"], RANKS, [8.0], [0.1]),
        Figure("xla fused", "xla", work["fused"], RANKS, [3.0], [0.1]),
        Figure("torch fused", "torch", work["fused"], RANKS, [2.0], [0.1]),
        Figure("torch each", "torch", work["each"], RANKS, missing="no"),
    ]
    table = fused.rows(figures)
    assert table[1][5:] == ["2.00", "8.00", "ring"]
    assert table[-1][1] == "no"


# Simulation


@pytest.mark.parametrize("kind", KINDS)
def test_works_are_plans(kind: str):
    text = topology(Lab(Shape()), {"host": LINE})
    compiled = schedule(Work(kind, (4096,), "via ring | rounds"), RANKS, topology=parse_topology(text))
    assert chosen(compiled) == "ring rounds"
    assert compiled.backend == "mpi"


def test_a_hierarchy_is_pinned_over_levels():
    text = topology(Lab(Shape(2, 2)), {"host": LINE, "uplink": LINE / 2})
    work = Work("all_reduce", (4096,), "hierarchical(host = ring, rack = ring)")
    compiled = schedule(work, RANKS, topology=parse_topology(text))
    assert chosen(compiled).startswith("hierarchical(host = ring, rack = ring)")


def test_prediction_of_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "results.json"
    write(path, example())
    pairs = prediction.compare(path, None)
    assert [pair.figure.label for pair in pairs] == ["commplan", "commplan via torus", "commplan"]
    for pair in pairs[:2]:
        assert 0.9 < pair.simulated / (1.5 * (4 << 20) / LINE) < 1.3
    assert prediction.summary(pairs)[1][:2] == ["all", "3"]
    assert len(prediction.worst(pairs, 2)) == 3
    assert prediction.main([str(path)]) == 0
    assert "median error" in capsys.readouterr().out
    write(path, Results("collectives", example().surroundings, []))
    assert prediction.main([str(path)]) == 1
    assert prediction.main([str(path), "--calibration", str(tmp_path / "none")]) == 1
    assert "CP075" in capsys.readouterr().err


def test_interleaved_results_are_predicted_where_ranks_lie(tmp_path: Path):
    path = tmp_path / "results.json"
    write(path, example(Shape(2, 2, interleave=True)))
    assert all(
        math.isfinite(pair.simulated) and pair.simulated > 0 for pair in prediction.compare(path, None)
    )


# Processes


def reason() -> str:
    if os.geteuid() != 0:
        return "needs root"
    return "" if shutil.which("ip") and shutil.which("tc") else "needs iproute2"


needs_lab = pytest.mark.skipif(bool(reason()), reason=reason())


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(Shape(hosts=2), f"g{os.getpid()}") as lab:
        yield lab


@needs_lab
def test_a_group_measures_and_checks(lab: Lab):
    work = Work("all_reduce", (50, 6))
    with Group(lab, "tests.bench.lying", mpi=False) as group:
        group.wait()
        block = group.measure(work, times=3, warm=1)
        assert not isinstance(block, str)
        assert (len(block.seconds), len(block.cpu), block.note) == (3, 3, "by heart")
        assert all(seconds > 0 for seconds in block.seconds)
        group.forget()
        assert group.measure(Work("all_reduce", (6,), "cannot"), 1) == "there is no way"
        assert not isinstance(group.measure(work, times=1), str)
        with pytest.raises(
            CommplanError, match=r"CP1125.*\n.*element 5 of tensor 1 on rank 1 is nan, not 52"
        ):
            group.measure(Work("all_reduce", (50, 6), "wrong"), 1)


@needs_lab
def test_results_of_the_repetition_before_are_no_results(lab: Lab):
    with Group(lab, "tests.bench.lying", mpi=False) as group:
        group.wait()
        with pytest.raises(CommplanError, match="CP1125"):
            group.measure(Work("all_reduce", (50,), "stale"), times=2)


@needs_lab
def test_a_process_that_ends_is_named_with_its_last_words(lab: Lab):
    with Group(lab, "tests.bench.lying", mpi=False) as group:
        group.wait()
        with pytest.raises(CommplanError, match=r"(?s)CP1124.*tests.bench.lying ended.*has had enough"):
            group.measure(Work("all_reduce", (50,), "die"), 1)


@needs_lab
def test_a_system_that_does_not_start_is_named(lab: Lab):
    match = r"(?s)CP1124.*nowhere (ended|did not start).*No module named"
    with Group(lab, "tests.bench.nowhere", mpi=False) as group, pytest.raises(CommplanError, match=match):
        group.wait()


@needs_lab
def test_a_bench_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("mpi4py")
    pytest.importorskip("jax")
    path = tmp_path / "two.json"
    words = ["--hosts", "2", "--systems", "commplan,openmpi", "--sizes", "1KiB", "--rounds", "2"]
    words += ["--collectives", "broadcast", "--algorithms", "via ring", "--name", f"e{os.getpid()}"]
    assert collectives.main([*words, "--out", str(path)]) == 0
    output = capsys.readouterr().out
    assert "2 hosts, one switch" in output
    figures = {figure.label: figure for figure in read(path).figures}
    assert set(figures) == {"commplan", "openmpi", "empty call", "commplan via ring"}
    assert figures["commplan via ring"].note.startswith("ring")
    assert all(figure.seconds and not figure.missing for figure in figures.values())
    assert figures["openmpi"].crossed > 1024  # from host to host


@needs_lab
def test_a_lab_that_stands_ends_a_bench(lab: Lab, capsys: pytest.CaptureFixture[str]):
    for bench in (collectives, fused):
        assert bench.main(["--systems", "openmpi", "--name", lab.name]) == 1
        assert "CP1121" in capsys.readouterr().err
