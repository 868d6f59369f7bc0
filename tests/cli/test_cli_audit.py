"""`commplan audit` as people type it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from commplan.cli import main

ROOT = Path(__file__).parents[2]
STEPS = ROOT / "tests" / "audit" / "steps.py"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(name="plan")
def _plan(tmp_path: Path) -> list[str]:
    """A plan and its shapes, as arguments."""
    spec = importlib.util.spec_from_file_location("steps", STEPS)
    assert spec is not None and spec.loader is not None
    steps: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(steps)
    file, shapes = tmp_path / "audited.plan", tmp_path / "shapes.json"
    file.write_text(steps.PLAN)
    leaves = {name: {"shape": list(s.shape), "dtype": "f32"} for name, s in steps.shapes().items()}
    shapes.write_text(json.dumps({"grads": leaves}))
    return ["audit", str(file), "--shapes", str(shapes)]


def run(capsys: Capture, *words: str) -> tuple[int, str, str]:
    code = main(list(words))
    out, err = capsys.readouterr()
    return code, out, err


def test_a_step_as_planned(capsys: Capture, plan: list[str]) -> None:
    code, out, err = run(capsys, *plan, "--step", f"{STEPS}:planned")
    assert code == 0
    assert f"{STEPS}:planned on 8 CPU devices: plan audited: 2 collectives as planned" in out
    assert "2 x all_reduce(sum) f32[2048] over data  as planned" in out
    assert "\nmemory of a device: 49 KiB: 17 KiB of arguments, 16 KiB of results, 16 KiB temporary\n" in out
    assert "--target h100" in err


def test_what_the_step_asks_for_itself_is_named(capsys: Capture, plan: list[str]) -> None:
    code, out, _ = run(capsys, *plan, "--step", f"{STEPS}:own_sum")
    assert code == 1
    assert "own: all_reduce(max) f32[] over 1 x 8 ranks" in out
    assert "issued by the step's own code: `pmax` at" in out
    assert run(capsys, *plan, "--step", f"{STEPS}:own_sum", "--allow-extra")[0] == 0


def test_a_sum_by_autodiff_is_no_extra(capsys: Capture, plan: list[str]) -> None:
    code, out, _ = run(capsys, *plan, "--step", f"{STEPS}:by_autodiff", "--allow-extra", "--format", "json")
    document = json.loads(out)
    (step,) = document["steps"]
    (difference,) = step["differences"]
    assert (code, document["ok"], document["devices"]) == (1, False, "8 CPU devices")
    assert (difference["cause"], difference["lines"], difference["beside"]) == ("autodiff", [], False)
    assert difference["origins"][0]["op_name"].startswith("jit(train)/shard_map/transpose(jvp(")
    assert step["phases"] == ["step"] and step["skipped"] == ["every_2"]
    assert (step["memory"]["arguments"], step["memory"]["donated"]) == (17 << 10, 0)


def test_without_a_step_each_phase_is_compiled_alone(capsys: Capture, plan: list[str]) -> None:
    code, out, _ = run(capsys, *plan)
    assert code == 0
    assert "phase step on 8 CPU devices: plan audited: 2 collectives as planned" in out
    assert "phase every_2 on 8 CPU devices: plan audited: 1 collective as planned" in out
    code, out, _ = run(capsys, *plan, "--phase", "every_2")
    assert code == 0 and "phase step" not in out


def test_a_saved_schedule_will_do(capsys: Capture, plan: list[str], tmp_path: Path) -> None:
    saved = str(tmp_path / "audited.schedule.json")
    assert run(capsys, "compile", *plan[1:], "-o", saved)[0] == 0
    assert run(capsys, "audit", saved, "--step", f"{STEPS}:planned")[0] == 0


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--step", "steps"], "CP1109", "--step steps: expected MODULE:FUNCTION"),
        (["--step", f"{STEPS}:absent"], "CP1109", "steps.py has no `absent`"),
        (["--step", f"{STEPS}:nothing"], "CP1153", "expected a step and a tuple of its arguments"),
        (["--step", f"{STEPS}:broken"], "CP1154", "cannot be compiled: RuntimeError: no data here"),
        (["--step", f"{STEPS}:silent"], "CP1154", "cannot be compiled: _Silent"),
        (["--phase", "train"], "CP1151", "plan `audited` has no phase `train`"),
        (["--target", "b9000:1x8"], "CP1150", "`b9000:1x8` is not a target"),
        (["--target", ""], "CP1150", "`` is not a target"),
        (["--target", "h100:1x4"], "CP1152", "target h100:1x4 has 4 devices, the plan has 8 ranks"),
        (["--backend", "mpi"], "CP0841", "whose collectives XLA does not compile"),
    ],
)
def test_what_cannot_be_audited(
    capsys: Capture, plan: list[str], words: list[str], code: str, message: str
) -> None:
    status, out, err = run(capsys, *plan, *words)
    assert (status, out) == (1, "")
    assert f"error[{code}]" in err and message in err


def test_a_plan_that_computes_nothing_is_said_to(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "idle.plan").write_text("plan idle\naxis data = 2\n")
    code, out, err = run(capsys, "audit", str(tmp_path / "idle.plan"))
    assert (code, out) == (0, "")
    assert err == "plan `idle` has no phase that computes anything: nothing was compiled\n"


def test_without_the_compiler_for_gpus(
    capsys: Capture, plan: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if "cuda" in name else find(name))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    status, _, err = run(capsys, *plan, "--target", "h100:1x8")
    assert status == 1
    assert "CP0850" in err and "pip install --no-deps jax-cuda12-plugin" in err


def test_a_process_of_its_own_makes_its_devices(plan: list[str]) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES")}
    done = subprocess.run(
        [sys.executable, "-m", "commplan.cli", *plan, "--step", f"{STEPS}:own_sum"],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "plan audited: 2 collectives as planned, 1 difference" in done.stdout


def test_the_plan_is_predicted_as_explain_predicts_it(capsys: Capture, plan: list[str]) -> None:
    topology = ["--topology", str(ROOT / "examples" / "topologies" / "h100_64.toml")]
    code, out, _ = run(capsys, *plan, "--phase", "step", *topology)
    assert code == 0
    planned = out.partition("as planned on h100_64; ")[2]
    _, explained, _ = run(capsys, "explain", *plan[1:], *topology)
    lines = [line.strip() for line in explained.partition("\neach step\n")[2].splitlines()[:2]]
    assert lines[0].startswith("exposed ")
    assert [line.strip() for line in planned.splitlines()[2:4]] == lines
