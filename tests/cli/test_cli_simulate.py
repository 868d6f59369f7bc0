"""`commplan simulate` and `commplan calibrate` as people type them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from commplan.cli import main
from commplan.cli.jax_side import under_mpi
from commplan.cost.calibration import Calibration, MeasuredLevel, write_calibration
from commplan.ir.types import sized

ROOT = Path(__file__).parents[2]
TWO_LEVEL = str(ROOT / "examples" / "plans" / "two_level.plan")
TOPOLOGIES = ROOT / "examples" / "topologies"


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    out, err = capsys.readouterr()
    return code, out, err


def document(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    code, out, err = run(capsys, *words, "--format", "json")
    assert (code, err) == (0, "")
    return json.loads(out)


@pytest.fixture
def shapes(tmp_path: Path) -> Path:
    file = tmp_path / "shapes.json"
    file.write_text(json.dumps({"grads": {"w": {"shape": [1000, 1000], "dtype": "f32"}}}))
    return file


@pytest.fixture
def command(shapes: Path) -> list[object]:
    return ["simulate", TWO_LEVEL, "--shapes", shapes, "--topology", TOPOLOGIES / "h100_64.toml"]


def test_a_table_for_people(capsys: pytest.CaptureFixture[str], command: list[object]) -> None:
    code, out, err = run(capsys, *command)
    assert code == 0
    assert "axis node = 4 on node" in err
    assert "two_level on h100_64: 32 ranks, jax; costs of the topology file" in out
    assert "lower bound" in out
    assert "reduce_scatter via" in out
    assert "critical path" in out
    assert "grads = reduce grads over node, gpu by mean" in out


def test_a_document_for_programs(capsys: pytest.CaptureFixture[str], command: list[object]) -> None:
    report = document(capsys, *command)
    (phase,) = report["phases"]
    assert report["mapping"] == {"node": [["node", 4]], "gpu": [["gpu", 8]]}
    assert phase["distance"] >= 1
    assert phase["nbytes"]["gpu"] > 0
    assert {op["line"] for op in phase["ops"]} == {11}


def test_a_trace_is_written_to_a_file_or_to_stdout(
    capsys: pytest.CaptureFixture[str], command: list[object], tmp_path: Path
) -> None:
    file = tmp_path / "trace.json"
    code, _, err = run(capsys, *command, "--trace", file)
    assert code == 0
    assert "ui.perfetto.dev" in err
    code, out, _ = run(capsys, *command, "--trace", "-")
    assert code == 0
    assert json.loads(out) == json.loads(file.read_text())


def test_a_saved_schedule_is_simulated_where_its_axes_are_put(
    capsys: pytest.CaptureFixture[str], shapes: Path, tmp_path: Path
) -> None:
    saved = tmp_path / "two_level.schedule.json"
    assert run(capsys, "compile", TWO_LEVEL, "--shapes", shapes, "-o", saved)[0] == 0
    report = document(capsys, "simulate", saved, "--topology", TOPOLOGIES / "h100_64.toml")
    assert report["mapping"]["gpu"] == [["gpu", 8]]
    cluster = TOPOLOGIES / "h100_65536.toml"
    moved = document(capsys, "simulate", saved, "--topology", cluster, "--map", "node=pod")
    assert moved["mapping"]["node"] == [["pod", 4]]
    code, _, err = run(capsys, "simulate", saved, "--topology", cluster, "--ranks", 64)
    assert (code, "CP0754" in err) == (1, True)


def test_ranks_resize_the_first_axis(capsys: pytest.CaptureFixture[str], command: list[object]) -> None:
    report = document(capsys, *command, "--ranks", 64)
    assert report["ranks"] == 64
    assert report["mapping"] == {"node": [["node", 8]], "gpu": [["gpu", 8]]}
    code, _, err = run(capsys, *command, "--ranks", 20)
    assert code == 1
    assert "CP0754" in err
    assert "20 ranks cannot be laid out" in err


def test_ranks_need_the_sizes_of_the_other_axes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan = tmp_path / "open.plan"
    plan.write_text(
        "plan open\naxis a = ?\naxis b = ?\ninput x : f32[8] partial a, b\n"
        "each step {\n    x = reduce x over a, b by sum\n    output x\n}\n"
    )
    words = ("simulate", plan, "--topology", TOPOLOGIES / "h100_64.toml", "--ranks", 16)
    code, _, err = run(capsys, *words)
    assert (code, "CP0754" in err) == (1, True)
    assert document(capsys, *words, "--axis", "b=4")["ranks"] == 16
    empty = tmp_path / "empty.plan"
    empty.write_text("plan empty\ninput x : f32[8]\neach step {\n    output x\n}\n")
    code, _, err = run(capsys, "simulate", empty, *words[2:])
    assert (code, "has no axis that could hold 16 ranks" in err) == (1, True)


def test_costs_are_charged(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan = tmp_path / "map.plan"
    plan.write_text(
        "plan mapped\naxis data = 4\ninput x : f32[8] per data\nfn f(f32[8]) -> f32[8] on device\n"
        "each step {\n    y = map f(x)\n    output y\n}\n"
    )
    words = ("simulate", plan, "--topology", TOPOLOGIES / "flat4.toml")
    assert "costs unknown: function `f`" in run(capsys, *words)[1]
    report = document(capsys, *words, "--cost", "f=2.5ms")
    assert report["phases"][0]["seconds"] == pytest.approx(2.5e-3)
    for wrong in ("f=3", "f", "f=ms", "f=1.2.3ms"):
        assert run(capsys, *words, "--cost", wrong)[0] == 2
    code, _, err = run(capsys, *words, "--cost", "g=3ms")
    assert (code, "error[CP1108]: --cost g: the plan has no function or source `g`" in err) == (1, True)


def test_a_topology_is_needed(capsys: pytest.CaptureFixture[str], shapes: Path) -> None:
    code, _, err = run(capsys, "simulate", TWO_LEVEL, "--shapes", shapes)
    assert (code, "CP0752" in err) == (1, True)


def test_a_calibration_is_for_its_backend(
    capsys: pytest.CaptureFixture[str], command: list[object], tmp_path: Path
) -> None:
    file = tmp_path / "slow.calibration.toml"
    level = (MeasuredLevel("node", 1e-3, 1e6),)
    file.write_text(write_calibration(Calibration("2026-11-21", "jax", ("a",), 0.0, 0.0, 0.0, 0.0, level)))
    slow = document(capsys, *command, "--calibration", file)
    assert slow["calibrated"] == "2026-11-21"
    assert slow["phases"][0]["seconds"] > 0.5  # half a megabyte and more at a megabyte a second
    file.write_text(write_calibration(Calibration("2026-11-21", "mpi", ("a",), 0.0, 0.0, 0.0, 0.0, level)))
    code, _, err = run(capsys, *command, "--calibration", file)
    assert code == 1
    assert "error[CP07" in err


def test_sizes_are_short() -> None:
    assert [sized(n) for n in (12, 2048, 3 * 2**20, 5 * 2**30)] == ["12 B", "2 KiB", "3 MiB", "5 GiB"]


def test_ranks_of_mpi_are_known_by_their_environment() -> None:
    assert under_mpi({"OMPI_COMM_WORLD_SIZE": "4"})
    assert not under_mpi({"PATH": ""})


def test_calibrate_wants_sizes_and_an_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "calibrate")[0] == 2
    assert run(capsys, "calibrate", "-o", "x", "--largest", "3 bananas")[0] == 2


def test_scaled_links_are_beside_the_links_as_given(
    capsys: pytest.CaptureFixture[str], command: list[object]
) -> None:
    original, slow = document(capsys, *command, "--scale", "node=1/4")["machines"]
    assert original == {key: value for key, value in document(capsys, *command).items() if key in original}
    assert (original["topology"], slow["topology"]) == ("h100_64", "h100_64, node x 1/4")
    (before,), (after,) = original["phases"], slow["phases"]
    assert after["computation"] == before["computation"]
    assert after["alone"] > before["alone"]
    code, out, _ = run(capsys, *command, "--scale", "node=0.25")
    assert (code, "h100_64, node x 1/4" in out, "exposed" in out) == (0, True, True)


def test_several_machines_side_by_side(capsys: pytest.CaptureFixture[str], command: list[object]) -> None:
    pods = TOPOLOGIES / "h100_65536.toml"
    code, out, _ = run(capsys, *command, "--topology", pods)
    assert code == 0
    assert "two_level, 32 ranks, jax, compared with h100_64" in out
    assert "h100_65536: costs of the topology file, not measured" in out


def test_what_cannot_be_scaled_is_refused(capsys: pytest.CaptureFixture[str], command: list[object]) -> None:
    code, _, err = run(capsys, *command, "--scale", "gpus=2")
    assert (code, "did you mean `gpu`?" in err) == (1, True)
    for wrong in ("node", "node=0", "node=-1", "node=1/0", "node=1/", "=2", "node=x", "node=1/2/3"):
        code, _, err = run(capsys, *command, "--scale", wrong)
        assert (code, "expected LEVEL=FACTOR such as node=1/4" in err) == (2, True), wrong
    assert "CP0752" in run(capsys, "simulate", TWO_LEVEL, "--scale", "node=2")[2]
    assert run(capsys, *command, "--scale", "node=2", "--trace", "-")[0] == 2


def test_ranks_that_do_not_fit_make_the_machine_larger(
    capsys: pytest.CaptureFixture[str], command: list[object]
) -> None:
    report = document(capsys, *command, "--ranks", 256)
    assert (report["ranks"], report["topology"]) == (256, "h100_64, node = 32")


def test_a_schedule_of_another_topology_is_noted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, shapes: Path
) -> None:
    saved = tmp_path / "two_level.schedule.json"
    compiled_for, other = TOPOLOGIES / "h100_64.toml", TOPOLOGIES / "h100_65536.toml"
    assert (
        run(capsys, "compile", TWO_LEVEL, "--shapes", shapes, "--topology", compiled_for, "-o", saved)[0] == 0
    )
    note = "was compiled for topology `h100_64`; times are those of topology `h100_65536`"
    for verb in ("simulate", "explain"):
        assert "was compiled for" not in run(capsys, verb, saved, "--topology", compiled_for)[2]
        assert note in run(capsys, verb, saved, "--topology", other)[2]
