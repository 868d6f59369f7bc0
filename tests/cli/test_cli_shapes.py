"""`--shapes MODULE:FUNCTION`: shapes from the user's own initializer, without a file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from commplan.cli import main

Capture = pytest.CaptureFixture[str]

PLAN = """plan small
axis data = 2
input grads : tree partial data
each step {
    grads = reduce grads over data by mean
    output grads
}
"""
PROGRAM = """
from typing import NamedTuple
import jax

class Layer(NamedTuple):
    w: object
    b: object

def init(key):
    assert isinstance(key, jax.core.Tracer), "an initializer is traced, not run"
    return {"w": jax.random.normal(key, (4, 3)), "b": jax.numpy.zeros(3, "bfloat16")}

def shapes():
    return {"grads": init(jax.random.key(0))}

def evaluated():
    return {"grads": jax.eval_shape(init, jax.random.key(0))}

def described():
    return {"grads": {"w": {"shape": [4, 3], "dtype": "f32"}, "b": {"shape": [3], "dtype": "bf16"}}}

def twice():
    return {"grads": {"a/b": jax.numpy.zeros(3), "a": {"b": jax.numpy.zeros(4)}}}

def named():
    return {"grads": [Layer(**init(jax.random.key(0)))]}

def a_list():
    return [3]

def broken():
    raise ValueError("no weights today")

def takes_one(key):
    return {"grads": key}

def unknown():
    return {"weights": jax.numpy.zeros(3)}
"""
FILE = {"grads": {"w": {"shape": [4, 3], "dtype": "f32"}, "b": {"shape": [3], "dtype": "bf16"}}}


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    (tmp_path / "small.plan").write_text(PLAN)
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "shapes.json").write_text(json.dumps(FILE))
    return tmp_path


def verb(folder: Path, name: str, shapes: str, *words: str) -> int:
    return main([name, str(folder / "small.plan"), "--shapes", shapes, *words])


@pytest.mark.parametrize("function", ["shapes", "evaluated", "described"])
def test_a_function_gives_what_a_file_gives(capsys: Capture, folder: Path, function: str) -> None:
    assert verb(folder, "explain", f"{folder}/train.py:{function}") == 0
    traced = capsys.readouterr().out
    assert verb(folder, "explain", str(folder / "shapes.json")) == 0
    assert capsys.readouterr().out == traced
    assert "48 B" in traced


def test_the_order_of_leaves_is_that_of_the_pytree(capsys: Capture, folder: Path) -> None:
    words = ("compile", f"{folder}/train.py:named", "--emit", "schedule")
    assert verb(folder, *words) == 0
    out = capsys.readouterr().out
    assert out.index("0/w") < out.index("0/b")


@pytest.mark.parametrize(
    ("function", "code", "message"),
    [
        ("a_list", "CP1103", "returned a list: expected a dictionary of trees"),
        ("broken", "CP1103", "cannot be traced: ValueError: no weights today"),
        ("takes_one", "CP1103", "missing 1 required positional argument: 'key'"),
        ("twice", "CP0720", "two leaves have the path `a/b`"),
        ("absent", "CP1109", "has no `absent`"),
        ("unknown", "CP0702", "shapes for `weights`, which the plan does not have"),
    ],
)
def test_functions_that_give_no_shapes(
    capsys: Capture, folder: Path, function: str, code: str, message: str
) -> None:
    assert verb(folder, "check", f"{folder}/train.py:{function}") == 1
    err = capsys.readouterr().err
    assert f"error[{code}]" in err and message in err
    assert function != "broken" or '/train.py", in broken' in err


def test_json_text_is_not_the_name_of_a_module(capsys: Capture, folder: Path) -> None:
    shapes = {"grads": {f"w{number}": {"shape": [4, 3], "dtype": "f32"} for number in range(100)}}
    assert verb(folder, "check", json.dumps(shapes)) == 1
    assert "error[CP1103]: --shapes is JSON text" in capsys.readouterr().err


def test_the_program_may_load_jax_before_the_devices_are_counted(folder: Path) -> None:
    words = ["compile", "small.plan", "--shapes", "train:shapes", "--emit", "hlo"]
    command = [sys.executable, "-m", "commplan", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "all_reduce" in done.stdout
