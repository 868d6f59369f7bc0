"""`commplan run`, and `compile --emit jaxpr|hlo`: plans on CPU devices, with real functions and data."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from support import images, interpreter, mpirun

from commplan.cli import main
from commplan.cli.verbs import run
from commplan.runtime.rehearse import rehearse

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "plans"

PLAN = """plan small

ensemble member = 2
axis     data   = 2

source images : bytes
fn decode (bytes)       -> u8[2, 2, 3], i32 on host
fn augment(u8[2, 2, 3]) -> u8[2, 2, 3] on host random

input params : tree per member, data
input grads  : tree per member partial data

at start {
    params = broadcast params over data from 0
    output params
}

each step {
    raw            = load images batch 4 split data visit exactly_once seed 17
    pixels, labels = map decode(raw)
    batch          = map augment(pixels) per member
    output batch, labels

    grads = reduce grads over data by mean
    output grads
}

phase evaluate {
    raw, valid     = load images batch 4 split data visit exactly_once seed 0 tail pad
    pixels, labels = map decode(raw)
    output pixels, labels, valid
}
"""

FUNCTIONS = f"""{images.FUNCTIONS}
class Nested:
    decode = staticmethod(decode)

number = 3
"""

CHATTY = """
import sys
print("imported")

def prints(record):
    print("decoding")
    return decode(record)

def leaves(x):
    sys.exit(0)
"""

LEAF = {"shape": [4, 3], "dtype": "f32"}
Capture = pytest.CaptureFixture[str]


@pytest.fixture(name="small")
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The arguments that rehearse the small plan, in a temporary folder."""
    (tmp_path / "small.plan").write_text(PLAN)
    (tmp_path / "small_functions.py").write_text(FUNCTIONS)
    (tmp_path / "shapes.json").write_text(
        json.dumps({"params": {"w": LEAF, "b": [LEAF]}, "grads": {"w": LEAF}})
    )
    images.written(tmp_path / "images")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.delitem(sys.modules, "small_functions", raising=False)
    return [
        "run", "small.plan", "--shapes", "shapes.json", "--source", "images=images",
        "--fn", "decode=small_functions:decode", "--fn", "augment=small_functions:augment",
    ]  # fmt: skip


def _document(arguments: list[str], capsys: Capture) -> Any:
    assert main([*arguments, "--format", "json"]) == 0, capsys.readouterr()
    return json.loads(capsys.readouterr().out)


def test_run_counts_what_every_line_costs(small: list[str], capsys: Capture) -> None:
    report = _document([*small, "--steps", "5"], capsys)
    phases = {phase["name"]: phase for phase in report["phases"]}
    assert {name: phase["calls"] for name, phase in phases.items()} == {"start": 1, "step": 5, "evaluate": 3}
    step = {line["stage"].split(" ")[0]: line for line in phases["step"]["lines"]}
    load, grads = phases["step"]["lines"][0], step["grads"]
    assert load["records"] >= 5 * 4 and load["cpu_s"] > 0 and load["nbytes"] >= 5 * 4 * 13
    assert grads["records"] is None and grads["sent"] == 5 * 48
    assert phases["step"]["first_s"] > 0 and phases["step"]["call_s"] > 0
    assert phases["evaluate"]["first_s"] is None and phases["evaluate"]["batches"] == 3
    assert phases["start"]["batches"] == 0


def test_run_prints_a_table(small: list[str], capsys: Capture) -> None:
    assert main([*small, "--steps", "2"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and "plan small on 4 CPU devices" in out
    assert (
        "each step: 2 calls, first " in out and "records" in out and "192 B" not in out.split("each step")[0]
    )


def test_what_functions_print_is_no_part_of_the_document(small: list[str], capsys: Capture) -> None:
    Path("small_functions.py").write_text(Path("small_functions.py").read_text() + CHATTY)
    arguments = [word.replace(":decode", ":prints") for word in small]
    assert main([*arguments, "--steps", "1", "--format", "json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["plan"] == "small"
    assert "imported" in err and "decoding" in err


@pytest.mark.parametrize("place", ["host", "device"])
def test_a_function_that_ends_the_process_is_refused(place: str, small: list[str], capsys: Capture) -> None:
    Path("small_functions.py").write_text(Path("small_functions.py").read_text() + CHATTY)
    Path("device.plan").write_text(
        "plan d\naxis data = 2\nfn leaves(f32[3]) -> f32[3] on device\ninput x : f32[3]\n"
        "each step {\n    y = map leaves(x)\n    output y\n}\n"
    )
    words = [word.replace(":decode", ":leaves") for word in small]
    if place == "device":
        words = ["run", "device.plan", "--fn", "leaves=small_functions:leaves"]
    assert main([*words, "--format", "json"]) == 1
    (diagnostic,) = json.loads(capsys.readouterr().out)["diagnostics"]
    assert diagnostic["code"] == "CP1112" and diagnostic["message"].endswith("SystemExit: 0")
    assert "in leaves" in diagnostic["notes"][0]["text"]


def test_a_module_that_ends_the_process_is_refused(small: list[str], capsys: Capture) -> None:
    Path("small_functions.py").write_text("raise SystemExit(0)\n")
    assert main(small) == 1
    assert "error[CP1109]: --fn decode=small_functions:decode: SystemExit: 0" in capsys.readouterr().err


def test_functions_may_stand_in_files_and_classes(small: list[str], capsys: Capture) -> None:
    arguments = [
        word.replace("decode=small_functions:decode", "decode=small_functions.py:Nested.decode")
        for word in small
    ]
    assert main([*arguments, "--steps", "1"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    "old, new, code, message",
    [
        ("images=images", "images=nothing", "CP1110", "neither a folder nor"),
        ("images=images", "pictures=images", "CP1108", "no source `pictures`"),
        ("decode=small_functions:decode", "decoed=small_functions:decode", "CP1108", "no function `decoed`"),
        ("small_functions:decode", "small_functions:nothing", "CP1109", "has no `nothing`"),
        ("small_functions:decode", "no_such_module:decode", "CP1109", "ModuleNotFoundError"),
        ("small_functions:decode", "no_such_file.py:decode", "CP1109", "FileNotFoundError"),
        ("small_functions:decode", "small_functions", "CP1109", "expected MODULE:FUNCTION"),
        ("small_functions:decode", "small_functions:number", "CP1109", "cannot be called"),
    ],
)
def test_what_is_given_wrongly(
    old: str, new: str, code: str, message: str, small: list[str], capsys: Capture
) -> None:
    assert main([word.replace(old, new) for word in small]) == 1
    err = capsys.readouterr().err
    assert code in err and message in err


def test_everything_missing_is_said_at_once(small: list[str], capsys: Capture) -> None:
    assert main(small[:4]) == 1
    err = capsys.readouterr().err
    assert [f"`{name}` is not given" in err for name in ("decode", "augment", "images")] == [True] * 3


def test_mistakes_of_functions_are_diagnostics(small: list[str], capsys: Capture) -> None:
    Path("small_functions.py").write_text(
        "def decode(record):\n    return 1\ndef augment(x, rng):\n    return x\n"
    )
    assert main([*small, "--steps", "1"]) == 1
    assert "CP09" in capsys.readouterr().err


NUMBERS = """plan numbers

axis data = 2

source rows   : f32[3]
input weights : f32[3]
state total   : f32[3]
fn zeros(f32[3])         -> f32[3] on device elementwise
fn plus (f32[3], f32[3]) -> f32[3] on device elementwise

at start {
    total = map zeros(weights)
}

each step {
    x = load rows batch 4 split data visit exactly_once seed 1
    output x
}

every 2 steps {
    total = map plus(total, weights)
    output total
}
"""


def test_rows_of_arrays_are_records(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("numbers.plan").write_text(NUMBERS)
    Path("numbers_functions.py").write_text(
        "def zeros(x):\n    return x * 0\ndef plus(a, b):\n    return a + b\n"
    )
    np.save("rows.npy", np.zeros((8, 3), np.float32))
    arguments = [
        "run", "numbers.plan", "--source", "rows=rows.npy", "--steps", "5",
        "--fn", "zeros=numbers_functions.py:zeros", "--fn", "plus=numbers_functions.py:plus",
    ]  # fmt: skip
    report = _document(arguments, capsys)
    assert {phase["name"]: phase["calls"] for phase in report["phases"]} == {
        "start": 1,
        "step": 5,
        "every_2": 2,
    }
    np.save("rows.npy", np.float32(1))
    assert main(arguments) == 1
    assert "is a single number" in capsys.readouterr().err
    Path("rows.npy").write_bytes(b"no array")
    assert main(arguments) == 1
    assert "CP1110" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["data_parallel", "two_level", "weighted_mean", "easgd_sync", "sharded_update"]
)
def test_the_examples_without_data_run(name: str, tmp_path: Path, capsys: Capture) -> None:
    shapes = tmp_path / "shapes.json"
    text = (EXAMPLES / f"{name}.plan").read_text()
    trees = {
        argument: {"w": LEAF, "b": {"shape": [], "dtype": "f32"}}
        for argument in ("params", "grads", "center", "adam")
    }
    shapes.write_text(
        json.dumps({argument: tree for argument, tree in trees.items() if f" {argument} " in text})
    )
    functions = tmp_path / "rehearsal_functions.py"
    functions.write_text(
        "import jax\n"
        "def init(p):\n    return jax.tree.map(lambda x: x * 0, p)\n"
        "def update(p, g, a):\n    return jax.tree.map(lambda x, y: x - y, p, g), a\n"
    )
    arguments = ["run", str(EXAMPLES / f"{name}.plan"), "--shapes", str(shapes), "--steps", "4"]
    if name == "sharded_update":
        arguments += ["--fn", f"adam_init={functions}:init", "--fn", f"adam_update={functions}:update"]
    if name == "two_level":  # 32 ranks, more than this process has devices
        assert main(arguments) == 1
        assert "CP1107" in capsys.readouterr().err
        return
    report = _document(arguments, capsys)
    called = {phase["name"]: phase["calls"] for phase in report["phases"]}
    assert called in ({"start": 1, "step": 4}, {"step": 4}, {"start": 1, "every_4": 1})


def test_more_ranks_than_one_machine_plays(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "big.plan"
    path.write_text(
        "plan big\naxis a = ?\ninput x : f32 per a\neach step {\n y = reduce x over a by sum\n output y\n}\n"
    )
    assert main(["run", str(path), "--axis", "a=4096"]) == 1
    err = capsys.readouterr().err
    assert "CP1107" in err and "--axis NAME=N" in err


class Accelerator:
    """A device of another platform than the CPU."""

    platform = "gpu"


def devices_of(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    """Pretend that JAX finds `gpus` GPUs, and prefers them to its CPU devices."""
    cpus, accelerators = jax.devices("cpu"), [Accelerator()] * gpus

    def devices(platform: str | None = None) -> list[Any]:
        if platform == "gpu" and not gpus:
            raise RuntimeError("Unknown backend: 'gpu' requested")
        return cpus if platform == "cpu" or not gpus else accelerators

    monkeypatch.setattr(rehearse.jax, "devices", devices)


@pytest.mark.parametrize(
    ("device", "gpus", "platform"),
    [(None, 0, "cpu"), (None, 3, "cpu"), (None, 4, "gpu"), ("gpu", 4, "gpu"), ("cpu", 4, "cpu")],
)
def test_ranks_get_the_devices_that_were_asked_for(
    device: str | None, gpus: int, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices_of(monkeypatch, gpus)
    assert {each.platform for each in rehearse._devices(4, device)} == {platform}


def test_a_gpu_for_each_rank_is_needed(small: list[str], capsys: Capture) -> None:
    assert main([*small, "--device", "gpu"]) == 1
    err = capsys.readouterr().err
    assert "CP1107" in err and "this process has 0 GPU devices" in err and "--device cpu" in err


def test_no_platform_is_pinned_by_default(tmp_path: Path) -> None:
    """A function that the plan uses sees the environment that JAX is imported in."""
    (tmp_path / "seen.py").write_text(
        "import os\nimport numpy as np\nplatform = os.environ.get('JAX_PLATFORMS')\n"
        "def shapes():\n    print('pinned', platform)\n    return {'x': np.zeros(3, np.float32)}\n"
    )
    (tmp_path / "sum.plan").write_text(
        "plan sums\naxis a = 2\ninput x : f32[3] partial a\n"
        "each step {\n y = reduce x over a by sum\n output y\n}\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment["PYTHONPATH"] = str(ROOT)
    words = ["run", "sum.plan", "--steps", "1", "--shapes", "seen.py:shapes"]
    for option, pinned in (([], "None"), (["--device", "cpu"], "cpu")):
        done = subprocess.run(
            [sys.executable, "-m", "commplan.cli", *words, *option],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert f"pinned {pinned}" in done.stderr and "2 CPU devices" in done.stdout


@pytest.mark.parametrize("emit, expected", [("jaxpr", "psum"), ("hlo", "all-reduce")])
def test_programs_are_printed(emit: str, expected: str, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "sum.plan"
    path.write_text(
        "plan sums\naxis a = 4\ninput x : f32[3] partial a\n"
        "each step {\n y = reduce x over a by sum\n output y\n}\n"
    )
    assert main(["compile", str(path), "--emit", emit]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("// phase step\n") and expected in out and "lowering 1 phases" in err


def test_a_terminal_gets_a_progress_bar(small: list[str]) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "commplan.cli", *small, "--steps", "3"]
    environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": "."}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, check=False, env=environment)
    os.close(theirs)
    text = os.read(ours, 100_000)
    os.close(ours)
    assert done.returncode == 0 and b"step" in text and b"plan small" in done.stdout


def learned(text: str) -> bool:
    """Whether the last loss that a program printed is less than the first one."""
    lines = [line for line in text.splitlines() if "loss" in line]
    first, last = (float(re.findall(r"\d+\.\d+", line)[0]) for line in (lines[0], lines[-1]))
    return last < first


@pytest.mark.parametrize("template", ["data_parallel", "elastic", "ensemble", "sharded"])
def test_templates_train(template: str, tmp_path: Path) -> None:
    assert main(["new", template, "--into", str(tmp_path)]) == 0
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    done = subprocess.run(
        [*interpreter.words(environment), str(tmp_path / f"{template}.py")],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert learned(done.stdout)


def test_the_template_with_servers_trains_as_new_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mpirun.needs_mpi()
    assert main(["new", "server", "--into", str(tmp_path)]) == 0
    last_line = capsys.readouterr().err.strip().splitlines()[-1]
    check, _, start = last_line.removeprefix("next: ").partition(" && ")
    assert main(check.split()[1:]) == 0
    python = " ".join(interpreter.words(mpirun.environment()))
    less = start.replace("-n 4 python", f"-n 3 {python}")  # a worker less takes less time
    done = mpirun.started(less.split())
    assert done.returncode == 0, done.stderr
    assert learned(done.stdout)
    served = [line for line in done.stdout.splitlines() if line.startswith("server ")]
    assert len(served) == 2 and all(" of 1 worker, " in line and "MiB in" in line for line in served)


def test_ranks_that_outlive_others_end_without_a_last_meeting() -> None:
    settings = {"OMPI_MCA_mpi_ft_enable": "1"}
    assert run.fault_tolerance(settings) == {"OMPI_MCA_async_mpi_finalize": "1"}
    assert run.fault_tolerance({**settings, "OMPI_MCA_async_mpi_finalize": "0"}) == {}, (
        "the user's word counts"
    )
    assert run.fault_tolerance({}) == {}
