"""A step profile from `commplan calibrate`, and its use by `explain` and `simulate`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from commplan.cli import main

ROOT = Path(__file__).parents[2]
STEPS = ROOT / "tests" / "audit" / "steps.py"
TOPOLOGY = str(ROOT / "examples" / "topologies" / "h100_64.toml")
Capture = pytest.CaptureFixture[str]


def run(capsys: Capture, *words: object) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture(name="plan")
def _plan(tmp_path: Path) -> Path:
    shutil.copy(STEPS, tmp_path / "steps.py")
    text = STEPS.read_text().split('PLAN = """\\\n')[1].split('"""')[0]
    leaves = {f"layer{i}": {"shape": [32, 32], "dtype": "f32"} for i in range(4)}
    (tmp_path / "shapes.json").write_text(json.dumps({"grads": leaves}))
    (tmp_path / "audited.plan").write_text(text)
    return tmp_path / "audited.plan"


def test_a_measured_step_is_the_computation_of_explain_and_simulate(capsys: Capture, plan: Path) -> None:
    profile = plan.with_name("a.step.toml")
    words = ("calibrate", plan, "--step", f"{STEPS}:planned", "--seconds", 1, "-o", profile)
    code, _, err = run(capsys, *words)
    assert (code, "until all gradients are made" in err) == (0, True)
    binding = ["--shapes", plan.with_name("shapes.json"), "--topology", TOPOLOGY, "--step-profile", profile]
    documents: list[dict[str, Any]] = []
    for verb in ("explain", "simulate"):
        code, out, _ = run(capsys, verb, plan, *binding, "--format", "json")
        assert code == 0
        documents.append(json.loads(out))
    (cost,), simulated = documents[0]["steps"], documents[1]["phases"][0]
    assert cost["source"].startswith("measured on cpu, ")
    assert cost["computation"] == simulated["computation"] > 0
    for figure, name in (("exposed", "exposed"), ("communication", "network"), ("seconds", "seconds")):
        assert cost[figure] == simulated[name]
    code, out, _ = run(capsys, "explain", plan, *binding)
    assert "cost of a step\n  computation " in out
    assert "change first: line 8, " in out
    other = plan.with_name("other.plan")
    other.write_text(plan.read_text().replace("grads", "deltas"))
    plan.with_name("shapes.json").write_text(
        plan.with_name("shapes.json").read_text().replace("grads", "deltas")
    )
    code, _, err = run(capsys, "simulate", other, *binding)
    assert (code, "error[CP0772]: the step has a gradient `grads`, leaf `layer3`" in err) == (1, True)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["explain", "a.plan", "--step", "m:f", "--topology", TOPOLOGY], "estimated for --target"),
        (["report", "a.plan", "-o", "x", "--step", "m:f", "--step-profile", "x"], "not allowed with"),
        (["calibrate", "--step", "m:f", "-o", "x"], "give FILE, the plan"),
    ],
)
def test_what_a_step_needs(capsys: Capture, words: list[str], expected: str) -> None:
    code, _, err = run(capsys, *words)
    assert (code, expected in err) == (2, True)


def test_a_step_without_gradients_is_refused(capsys: Capture, plan: Path) -> None:
    program = plan.with_name("plain.py")
    program.write_text("def step(mesh):\n    return (lambda x: x + 1), (1.0,)\n")
    code, _, err = run(capsys, "calibrate", plan, "--step", f"{program}:step", "-o", plan.with_name("x.toml"))
    assert (code, "error[CP1157]" in err) == (1, True)


@pytest.mark.parametrize("verb", ["explain", "simulate", "report"])
def test_a_step_is_predicted_on_a_machine(capsys: Capture, plan: Path, verb: str) -> None:
    profile = plan.with_name("a.step.toml")
    profile.write_text('version = 1\ndate = "2026-11-26"\ndevice = "cpu"\nseconds = 0.01\n')
    words = [verb, plan, "--shapes", plan.with_name("shapes.json"), "--step-profile", profile]
    words += ["-o", plan.with_name("r.html")] if verb == "report" else []
    code, _, err = run(capsys, *words)
    assert (code, "error[CP0752]: there is no topology to " in err) == (1, True)
