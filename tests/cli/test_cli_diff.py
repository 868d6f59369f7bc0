"""`commplan diff` as people type it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from commplan.cli import main

ROOT = Path(__file__).parents[2]
TOPOLOGY = str(ROOT / "examples" / "topologies" / "h100_64.toml")
PLAN = """\
plan small
axis data = 8
input grads : tree partial data
each step {
    grads = reduce grads over data by mean { bucket = 16 MiB }
    output grads
}
"""
Capture = pytest.CaptureFixture[str]


@pytest.fixture(name="shapes")
def _shapes(tmp_path: Path) -> list[str]:
    file = tmp_path / "shapes.json"
    leaves = {f"w{i}": {"shape": [2048, 2048], "dtype": "f32"} for i in range(4)}
    file.write_text(json.dumps({"grads": leaves}))
    return ["--shapes", str(file)]


@pytest.fixture(name="plans")
def _plans(tmp_path: Path) -> dict[str, str]:
    """Files by name: the plan, the same with a comment, with other buckets, with a slower algorithm."""
    texts = {
        "small": PLAN,
        "noted": f"# the same\n{PLAN}",
        "wide": PLAN.replace("16 MiB", "32 MiB"),
        "chain": PLAN.replace("by mean", "by mean via ring"),
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.plan").write_text(text)
    return {name: str(tmp_path / f"{name}.plan") for name in texts}


def run(capsys: Capture, *words: str) -> tuple[int, str, str]:
    code = main(["diff", *words])
    out, err = capsys.readouterr()
    return code, out, err


def document(capsys: Capture, *words: str) -> tuple[int, dict[str, Any]]:
    code, out, _ = run(capsys, *words, "--format", "json")
    return code, json.loads(out)


def changed(data: dict[str, Any]) -> dict[tuple[str, str], tuple[Any, Any]]:
    rows = (row for row in data["changes"] if row["changed"])
    return {(row["measure"], row["subject"]): (row["before"], row["after"]) for row in rows}


def test_what_only_reads_otherwise_is_the_same(
    capsys: Capture, plans: dict[str, str], shapes: list[str]
) -> None:
    code, data = document(capsys, plans["small"], plans["small"], *shapes)
    assert (code, data["same"], changed(data)) == (0, True, {})
    code, out, _ = run(capsys, plans["small"], plans["small"], *shapes)
    assert code == 0 and "the same schedule" in out
    code, data = document(capsys, plans["small"], plans["noted"], *shapes)
    assert (code, changed(data)) == (0, {})


def test_other_buckets(capsys: Capture, plans: dict[str, str], shapes: list[str]) -> None:
    code, data = document(capsys, plans["small"], plans["wide"], *shapes)
    assert (code, data["same"], data["failed"]) == (0, False, [])
    assert changed(data) == {
        ("buckets", "number"): (4, 2),
        ("buckets", "largest"): (1 << 24, 1 << 25),
        ("collectives", "all_reduce f32 over data"): (4, 2),
        ("ops", "pack"): (4, 2),
    }
    _, out, _ = run(capsys, plans["small"], plans["wide"], *shapes)
    rows = [" ".join(line.split()) for line in out.splitlines()]
    assert "buckets largest 16 MiB 32 MiB +100.0%" in rows


def test_a_slower_algorithm_fails(capsys: Capture, plans: dict[str, str], shapes: list[str]) -> None:
    words = [plans["small"], plans["chain"], *shapes, "--topology", TOPOLOGY]
    assert run(capsys, *words)[0] == 0
    code, out, _ = run(capsys, *words, "--fail-on", "slower:5%", "--fail-on", "memory:1%")
    assert code == 1
    assert "worse than --fail-on allows:\n  phase step: exposed +" in out
    code, data = document(capsys, *words, "--fail-on", "slower:5%")
    (worse,) = data["failed"]
    assert (code, worse["measure"], worse["before"] < worse["after"]) == (1, "exposed", True)
    assert changed(data)["algorithm", "all_reduce f32 over data"] == ("native", "ring")
    assert changed(data)["rounds", ""] == (None, 56)
    assert run(capsys, *words, "--fail-on", "slower:500%", "--fail-on", "bytes:0%")[0] == 0
    faster = [plans["chain"], plans["small"], *words[2:]]
    assert run(capsys, *faster, "--fail-on", "slower:0%", "--fail-on", "rounds:0%")[0] == 0


def test_what_goes_over_other_axes_is_compared_in_all(capsys: Capture, tmp_path: Path) -> None:
    plans = ROOT / "examples" / "plans"
    shapes = tmp_path / "grads.json"
    shapes.write_text(json.dumps({"grads": {"w": {"shape": [1024, 1024], "dtype": "f32"}}}))
    flat = tmp_path / "flat.plan"
    text = (plans / "two_level.plan").read_text()
    flat.write_text(text.replace("via hierarchical(gpu, node)", "via native"))
    words = [str(flat), str(plans / "two_level.plan"), "--shapes", str(shapes)]
    code, data = document(capsys, *words, "--fail-on", "bytes:10%")
    assert code == 0
    assert ("bytes", "over node") in changed(data) and ("bytes", "over gpu") in changed(data)


def test_states_on_servers(capsys: Capture) -> None:
    plans, shapes = ROOT / "examples" / "plans", ROOT / "examples" / "shapes" / "elastic.json"
    words = [plans / "easgd_sync.plan", plans / "easgd_async.plan", "--shapes", shapes, "--backend", "mpi"]
    code, data = document(capsys, *map(str, words))
    assert code == 0
    assert changed(data)["bytes", "to servers"][0] is None
    assert changed(data)["axis", "worker"] == (8, 4)


def test_saved_schedules(capsys: Capture, plans: dict[str, str], shapes: list[str], tmp_path: Path) -> None:
    saved = str(tmp_path / "wide.schedule.json")
    assert main(["compile", plans["wide"], *shapes, "-o", saved]) == 0
    capsys.readouterr()
    code, data = document(capsys, saved, plans["wide"], *shapes)
    assert (code, data["same"]) == (0, True)
    code, data = document(capsys, plans["small"], saved, *shapes, "--topology", TOPOLOGY)
    assert code == 0 and changed(data)["buckets", "number"] == (4, 2)
    assert data["schedules"][1]["file"] == saved
    assert ("exposed", "") in {(row["measure"], row["subject"]) for row in data["changes"]}


def test_what_cannot_be_compared(capsys: Capture, plans: dict[str, str], shapes: list[str]) -> None:
    code, _, err = run(capsys, plans["small"], plans["wide"], *shapes, "--fail-on", "slower:5%")
    assert code == 1 and "error[CP1155]" in err and "--topology FILE" in err
    code, _, err = run(capsys, plans["small"], "absent.plan", *shapes)
    assert code == 1 and "error[CP0001]" in err
    for wrong in ("slower", "slower:5", "slower:x%", "speed:5%", "bytes:-1%"):
        code, _, err = run(capsys, plans["small"], plans["wide"], "--fail-on", wrong)
        assert code == 2 and f"found {wrong!r}" in err


def test_a_process_of_its_own(plans: dict[str, str], shapes: list[str]) -> None:
    script = (
        "import sys; from commplan.cli import main; code = main(sys.argv[1:]);"
        "assert 'jax' not in sys.modules; sys.exit(code)"
    )
    words = [
        "diff",
        plans["small"],
        plans["chain"],
        *shapes,
        "--topology",
        TOPOLOGY,
        "--fail-on",
        "slower:1%",
    ]
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
    assert "worse than --fail-on allows" in done.stdout


def test_one_plan_on_two_machines(capsys: Capture, plans: dict[str, str], shapes: list[str]) -> None:
    other = str(ROOT / "examples" / "topologies" / "two_rack.toml")
    machines = ["--topology", TOPOLOGY, "--topology", other]
    code, report = document(capsys, plans["small"], *shapes, *machines)
    assert (code, [each["topology"] for each in report["schedules"]]) == (0, [TOPOLOGY, other])
    (alone,) = (each for each in report["changes"] if each["measure"] == "alone")
    assert alone["after"] > alone["before"]
    code, out, _ = run(capsys, plans["small"], *shapes, *machines)
    assert (code, "small.plan on h100_64 -> " in out) == (0, True)
    assert run(capsys, plans["small"], *shapes, "--topology", TOPOLOGY)[0] == 2


def test_times_of_different_computations_are_noted(
    plans: dict[str, str], shapes: list[str], tmp_path: Path, capsys: Capture
) -> None:
    larger = tmp_path / "larger.plan"
    larger.write_text(PLAN.replace("data = 8", "data = 64"))
    _, _, note = run(capsys, plans["small"], str(larger), *shapes, "--topology", TOPOLOGY)
    assert "exposed times depend on the computations, which differ: phase step next to " in note
    _, _, note = run(capsys, plans["small"], plans["wide"], *shapes, "--topology", TOPOLOGY)
    assert "different computations" not in note
