"""`bench.gpu` on a machine without a GPU: every part runs, small, and says so."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from bench import gpu

FOUND = {
    "smoke": {"numpy"},
    "tax": {"ms", "tax", "exposed", "apart"},
    "packing": {"memory", "nbytes", "buckets", "extra_s"},
    "feeding": {"bus", "rates", "step_s", "nbytes"},
    "ensemble": {"cells", "cores"},
    "calibration": {"calibration"},
}


@pytest.mark.timeout(900)
def test_every_part_runs_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if any(importlib.util.find_spec(name) is None for name in ("PIL", "sklearn", "skimage")):
        pytest.skip("the ensemble's records are made of photographs that scikit-learn and scikit-image have")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    out = tmp_path / "gpu.json"
    code = gpu.main(["--rounds", "1", "--seconds", "800", "--out", str(out)])
    said = capsys.readouterr().out
    assert code == 0, said
    assert "no GPU: all runs small on CPU devices" in said
    found = json.loads(out.read_text())
    assert found["machine"]["small"]
    for part, names in FOUND.items():
        assert set(found[part]) >= names, part
    assert found["tax"]["apart"] < 0.01 and set(found["tax"]["exposed"]) == {"XLA alone", "plan"}
    assert found["packing"]["buckets"] >= 1 and found["packing"]["nbytes"] > 1e6
    assert all(cell["rate"] for name, cell in found["ensemble"]["cells"].items() if "socket" not in name)


def test_a_part_that_fails_is_said_and_leaves_the_others_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: dict[str, Any] = {"lines": ["fine"]}
    answers = {"machine": done, "smoke": {"failed": "status 1: it broke"}, "tax": done}
    monkeypatch.setattr(gpu, "_apart", lambda part, *_: answers[part])
    assert gpu.main(["--parts", "smoke,tax"]) == 1
    said = capsys.readouterr().out
    assert "not measured: status 1: it broke" in said and "2 parts measured, without smoke" in said
    assert gpu.main(["--parts", "tax", "--seconds", "1"]) == 1
    assert "not measured: no time was left" in capsys.readouterr().out


def test_wheels_stand_in_for_what_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None if name == "lark" else sys)
    with contextlib.ExitStack() as stack, pytest.raises(SystemExit, match=r"no lark-\*\.whl in"):
        gpu._paths(tmp_path, stack)
    with zipfile.ZipFile(tmp_path / "lark-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("lark/__init__.py", "version = 1")
    with contextlib.ExitStack() as stack:
        site = Path(gpu._paths(tmp_path, stack)[-1])
        assert (site / "lark" / "__init__.py").read_text() == "version = 1"
    assert not site.exists()
    assert os.pathsep not in str(site)


def test_a_part_that_is_stopped_keeps_what_it_had_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: Any, timeout: float, **__: Any) -> Any:
        text = 'noise\nresult: {"lines": ["first"]}\nresult: {"lines": ["first", "second"]}\n' * reports
        raise subprocess.TimeoutExpired("python", timeout, output=text.encode())

    monkeypatch.setattr(gpu.subprocess, "run", stopped)
    reports = 1
    found = gpu._apart("ensemble", 30.0, 1, {})
    assert found["lines"] == ["first", "second", "stopped after 30 s: the rest is not measured"]
    reports = 0
    assert gpu._apart("ensemble", 30.0, 1, {}) == {"failed": "it did not end in 30 s"}
