"""`commplan verify`: its proofs, its output and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.commands import document

from commplan.cli import main
from commplan.collectives import registry
from commplan.collectives.algorithms import ring
from commplan.collectives.program import RoundSequence
from commplan.verify.programs import algorithm_proof

PLAN = """plan two_level

axis node = 4
axis gpu  = 8

input grads : tree partial node, gpu

each step {
    grads = reduce grads over node, gpu by sum via hierarchical(gpu = ring, node = recursive_doubling)
    output grads
}
"""

Capture = pytest.CaptureFixture[str]


@pytest.fixture(name="shapes")
def _shapes(tmp_path: Path) -> str:
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps({"grads": {"w": {"shape": [300, 30], "dtype": "f32"}}}))
    return str(path)


@pytest.fixture(name="plan")
def _plan(tmp_path: Path) -> str:
    path = tmp_path / "two_level.plan"
    path.write_text(PLAN)
    return str(path)


@pytest.fixture(name="broken")
def _broken(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The ring without its last round."""

    programs = ring.PROGRAMS

    def all_reduce(n: int) -> RoundSequence:
        whole = programs["all_reduce"](n)
        return RoundSequence(whole.chunks, tuple(whole.rounds)[:-1])

    registry.files()
    monkeypatch.setattr(ring, "PROGRAMS", {**programs, "all_reduce": all_reduce})
    algorithm_proof.prove_task.cache_clear()
    yield
    algorithm_proof.prove_task.cache_clear()


def test_one_algorithm(capsys: Capture) -> None:
    assert main(["verify", "--algorithm", "ring", "--collective", "all_reduce", "--ranks", "13"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert lines[0] == "ring for all_reduce over 13 ranks: proved"
    assert "  rounds 24 (no fewer than 4)" in lines
    assert "  the busiest rank sends 24/13 S (1.846) and receives 24/13 S (1.846)" in lines


def test_one_algorithm_as_data(capsys: Capture) -> None:
    flags = ["--root", "4", "--slices", "3", "--format", "json"]
    subject = ["--algorithm", "binomial_tree", "--collective", "broadcast", "--ranks", "6"]
    assert main(["verify", *subject, *flags]) == 0
    report = document(capsys)
    assert (report["proved"], report["root"], report["slices"], report["rounds"]) == (True, 4, 3, 5)
    assert report["diagnostics"] == report["counterexamples"] == []


def test_a_hierarchy(capsys: Capture) -> None:
    levels = "hierarchical(gpu = ring, node = halving_doubling, pod)"
    ranks = "node=4,gpu=8,pod=2"
    assert main(["verify", "--algorithm", levels, "--collective", "all_reduce", "--ranks", ranks]) == 0
    out = capsys.readouterr().out
    assert "ring for reduce_scatter over 8 ranks\n" in out
    assert "halving_doubling for all_gather over 4 ranks\n" in out
    assert "assumed, being the backend's own: all_reduce of 2" in out


def test_native_is_believed(capsys: Capture) -> None:
    assert main(["verify", "--algorithm", "native", "--collective", "all_reduce", "--ranks", "4"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "native for all_reduce over 4 ranks: assumed"


@pytest.mark.usefixtures("broken")
def test_a_counterexample(capsys: Capture) -> None:
    subject = ["--algorithm", "ring", "--collective", "all_reduce", "--ranks", "4"]
    assert main(["verify", *subject]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(
        "error[CP0740]: ring for all_reduce over 4 ranks: at the end rank 3 has as sums of chunk 0"
    )
    assert "= note: expected ranks 0-3" in err
    assert main(["verify", *subject, "--slices", "2", "--format", "json"]) == 1
    report = document(capsys)
    assert report["proved"] is False
    (wrong,) = report["counterexamples"]
    assert (wrong["failure"], wrong["expected"]) == ("wrong", "ranks 0-3")
    assert report["diagnostics"][0]["code"] == "CP0740"


@pytest.mark.usefixtures("broken")
def test_a_plan_whose_algorithm_is_broken_points_at_its_line(plan: str, shapes: str, capsys: Capture) -> None:
    text = Path(plan).read_text().replace("gpu = ring, node = recursive_doubling", "gpu, node = ring")
    Path(plan).write_text(text)
    assert main(["verify", plan, "--shapes", shapes, "--backend", "mpi"]) == 1
    err = capsys.readouterr().err
    assert "ring for all_reduce over 4 ranks: at the end rank 3 has" in err
    assert "two_level.plan:9:" in err
    assert "grads = reduce grads over node, gpu" in err


def test_a_plan(plan: str, shapes: str, capsys: Capture) -> None:
    assert main(["verify", plan, "--shapes", shapes]) == 0
    out = capsys.readouterr().out
    first, proved, unseen = out.splitlines()[:3]  # nothing is assumed: all levels are chunk programs
    assert first == "plan two_level, 32 ranks (node = 4, gpu = 8): proved"
    assert proved == "  proved: equivalent to its plan: 1 output and 0 states of 1 phase"
    assert unseen == "  not checked: the results of functions; the rounding of sums in another order"
    assert "created and called in one order by all ranks" in out
    assert "memory of a rank in phase step: at most" in out
    assert main(["verify", plan, "--shapes", shapes, "--format", "json"]) == 0
    report = document(capsys)
    assert report["proved"] is True
    assert report["claims"]["proved"].startswith("equivalent to its plan")
    assert report["claims"]["not_checked"][0] == "the results of functions"
    assert {item["line"] for item in report["collectives"]} == {9}
    assert all(item["sent_nbytes"] > 0 for item in report["collectives"] if item["proved"])
    assert report["memory"][0]["nbytes"] >= 2 * 36000
    assert report["communicators"]


def test_a_saved_schedule(plan: str, shapes: str, tmp_path: Path, capsys: Capture) -> None:
    saved = tmp_path / "two_level.schedule.json"
    assert main(["compile", plan, "--shapes", shapes, "-o", str(saved)]) == 0
    capsys.readouterr()
    assert main(["verify", str(saved)]) == 0
    assert "plan two_level, 32 ranks" in capsys.readouterr().out
    # Somebody edits it: the errors point at the plan's line, and mention the edit.
    text = saved.read_text()
    assert '"name": "ring"' in text or '"hierarchical"' in text
    saved.write_text(text.replace('"ring"', '"rung"'))
    assert main(["verify", str(saved)]) == 1
    err = capsys.readouterr().err
    assert "two_level.plan:9:" in err
    assert "`rung`" in err
    assert "grads = reduce grads over node, gpu" in err  # the excerpt
    assert "error[CP1004]" in err
    # The plan has changed as well: its lines are not shown.
    Path(plan).write_text(PLAN.replace("node = 4", "node = 2"))
    assert main(["verify", str(saved)]) == 1
    assert "grads = reduce grads over node, gpu" not in capsys.readouterr().err
    Path(plan).unlink()
    assert main(["verify", str(saved), "--format", "json"]) == 1
    report = document(capsys)
    assert report["proved"] is False
    assert {item["code"] for item in report["diagnostics"]} >= {"CP1004"}


def test_a_schedule_that_was_saved_as_text(plan: str, shapes: str, tmp_path: Path, capsys: Capture) -> None:
    saved = tmp_path / "two_level.schedule"
    assert main(["compile", plan, "--shapes", shapes, "-o", str(saved)]) == 0
    assert main(["verify", str(saved)]) == 0
    assert "plan two_level, 32 ranks" in capsys.readouterr().out
    text = saved.read_text()
    saved.write_bytes(text.replace("\n", "\r\n").encode())
    assert main(["verify", str(saved)]) == 0
    # Not the plan's schedule; and one that is sound, without a trace of an edit.
    for edited, code in (
        (text.replace("op=sum", "op=max"), "CP0766"),
        (text.rpartition("# digest")[0], "CP1004"),
    ):
        assert edited != text
        saved.write_text(edited)
        machine = str(Path(__file__).parents[2] / "examples" / "topologies" / "two_rack.toml")
        for words in (["verify"], ["simulate", "--topology", machine]):
            capsys.readouterr()
            assert main([*words, str(saved)]) == 1
            assert f"error[{code}]" in capsys.readouterr().err
    saved.write_text(text.replace("name=ring", "name=rung"))
    assert main(["verify", str(saved)]) == 1
    err = capsys.readouterr().err
    assert "`rung`" in err and "two_level.plan:9:" in err
    saved.write_text(text.replace("plan = ", "plan is "))
    assert main(["verify", str(saved)]) == 1
    assert "error[CP1008]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (["--algorithm", "rng", "--collective", "all_reduce", "--ranks", "4"], "CP0601"),
        (["--algorithm", "ring", "--collective", "all_reduc", "--ranks", "4"], "CP0736"),
        (["--algorithm", "bruck", "--collective", "broadcast", "--ranks", "4"], "CP0603"),
        (["--algorithm", "ring", "--collective", "broadcast", "--ranks", "4", "--root", "4"], "CP0737"),
        (["--algorithm", "ring", "--collective", "all_reduce", "--ranks", "4", "--root", "1"], "CP0737"),
        (["--algorithm", "ring", "--collective", "all_reduce", "--ranks", "70000"], "CP0748"),
        (["--algorithm", "ring", "--collective", "all_reduce", "--ranks", "a=2,b=2"], "CP0748"),
        (["--algorithm", "hierarchical(a, b)", "--collective", "all_reduce", "--ranks", "4"], "CP0748"),
        (["--algorithm", "hierarchical(a, b)", "--collective", "all_reduce", "--ranks", "a=4"], "CP0748"),
        (["--algorithm", "hierarchical(a)", "--collective", "all_reduce", "--ranks", "a=4", "--slices", "2"],
         "CP0748"),
        (["nowhere.plan"], "CP0001"),
        (["nowhere.schedule.json"], "CP0001"),
    ],
)  # fmt: skip
def test_what_cannot_be_proved_is_a_diagnostic(flags: list[str], code: str, capsys: Capture) -> None:
    assert main(["verify", *flags]) == 1
    out, err = capsys.readouterr()
    assert (out, err.startswith(f"error[{code}]")) == ("", True), err


def test_a_file_that_is_no_schedule(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "x.schedule.json"
    path.write_text("{")
    assert main(["verify", str(path)]) == 1
    assert "error[CP1001]" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--algorithm", "ring"],
        ["--algorithm", "ring", "--collective", "all_reduce"],
        ["x.plan", "--algorithm", "ring"],
        ["--algorithm", "ring", "--collective", "all_reduce", "--ranks", "0"],
        ["--algorithm", "ring", "--collective", "all_reduce", "--ranks", "gpu=x"],
        ["--algorithm", "ring", "--collective", "all_reduce", "--ranks", "4", "--root", "-1"],
    ],
)
def test_wrong_usage(flags: list[str], capsys: Capture) -> None:
    assert main(["verify", *flags]) == 2
    assert "error:" in capsys.readouterr().err
