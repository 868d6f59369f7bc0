"""`commplan calibrate PLAN --source --fn`: its measurements, its output and its errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest

from commplan.cli import main
from commplan.cost.calibration import Calibration, MeasuredLevel, load_calibration, write_calibration
from commplan.input.measured_costs import ConsumerCost, FnCost, InputCosts
from commplan.runtime.calibrate import input as input_costs
from commplan.runtime.calibrate.lock import Calls

Capture = pytest.CaptureFixture[str]
PLAN = """plan pair
ensemble member = 3
axis data = 2
source images : bytes
source rows : f32[4]
fn decode(bytes) -> u8[5] on host
fn jitter(u8[5]) -> u8[5] on host random
fn scale(u8[5]) -> f32[5] on device elementwise
fn halve(f32[4]) -> f32[2], i32 on host
each step {
    raw = load images batch 8 split data visit exactly_once seed 1
    small = map decode(raw)
    mine = map jitter(small) per member
    wide = map scale(mine)
    output wide, small
}
phase evaluate {
    held, n = load rows batch 4 visit exactly_once seed 0 tail pad
    half, label = map halve(held)
    output half, label, n
}
"""
FUNCTIONS = """
import numpy as np

def decode(raw):
    return np.frombuffer(raw[:5], np.uint8)

def jitter(pixels, rng):
    return pixels[:: int(rng.choice([-1, 1]))]

def halve(row):
    return row[:2], 7

def consume(item):
    assert item["wide"].shape == (4, 5) and item["wide"].dtype == np.float32, item
    assert item["small"].shape == (4, 5) and item["small"].dtype == np.uint8, item
    return item["wide"].sum()

def broken(raw):
    raise OSError("no such picture")

def wrong(raw):
    return np.zeros(6, np.uint8)

number = 3
"""


class Workspace:
    """A plan, its functions and sources in a folder."""

    def __init__(self, root: Path) -> None:
        self.plan, self.out = str(root / "pair.plan"), str(root / "x.calibration.toml")
        self.functions = str(root / "functions.py")
        Path(self.plan).write_text(PLAN)
        Path(self.functions).write_text(FUNCTIONS)
        (root / "images").mkdir()
        for name in "abc":
            (root / "images" / name).write_bytes(name.encode() * 100)
        np.save(root / "rows.npy", np.zeros((6, 4), np.float32))
        self.images, self.rows = f"images={root / 'images'}", f"rows={root / 'rows.npy'}"

    def fn(self, name: str, function: str = "") -> list[str]:
        return ["--fn", f"{name}={self.functions}:{function or name}"]

    def call(self, *flags: str) -> int:
        return main(["calibrate", self.plan, "--seconds", "1", "-o", self.out, *flags])

    def step(self, *flags: str) -> int:
        return self.call("--source", self.images, *self.fn("decode"), *self.fn("jitter"), *flags)

    def found(self) -> InputCosts:
        calibration = load_calibration(self.out)
        assert calibration.input is not None
        return calibration.input


@pytest.fixture(name="workspace")
def _workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path)


def test_the_input_is_measured_and_compilations_read_it(workspace: Workspace, capsys: Capture) -> None:
    assert workspace.step("--step-seconds", "12ms") == 0
    err = capsys.readouterr().err
    assert "measuring images, decode, jitter, about 1 seconds" in err
    assert "function decode: " in err
    costs = workspace.found()
    assert load_calibration(workspace.out).links is None
    assert (costs.source[0].name, costs.source[0].nbytes) == ("images", 100)
    assert [(fn.name, fn.nbytes_in, fn.nbytes_out) for fn in costs.fn] == [
        ("decode", 100, 5),
        ("jitter", 5, 5),
    ]
    assert costs.source[0].records == costs.fn[0].records >= 16
    assert all(cost.cpu > 0 for cost in (*costs.source, *costs.fn))
    assert costs.copy > 0
    assert costs.consumer == (ConsumerCost("pair", "step", 0.012),)
    assert main(["explain", workspace.plan, "--calibration", workspace.out]) == 0
    assert "physical limit: " in capsys.readouterr().out
    assert main(["explain", workspace.plan, "--calibration", workspace.out, "--format", "json"]) == 0
    phase, _ = json.loads(capsys.readouterr().out)["phases"]
    (table,) = [c["sharing"] for line in phase["lines"] for c in line["choices"] if c["sharing"]]
    assert {row["design"] for row in table} >= {
        "duplicate",
        "all_shared",
        "single_broadcast",
        "multi_broadcast",
    }
    assert all(row["limit"] > 0 and row["cpu"] > 0 for row in table)
    assert sum(row["taken"] for row in table) == 1


def test_lock_shares_are_measured_once_for_the_functions_of_all_phases(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = """phase again {
    more = load rows batch 4 visit exactly_once seed 0
    small, number = map halve(more)
    output small, number
}
"""
    Path(workspace.plan).write_text(PLAN + again)
    measured: list[tuple[dict[str, int], float]] = []

    def lock_shares_of(calls_of: Mapping[str, Calls], seconds: float) -> dict[str, float]:
        measured.append(({name: len(calls) for name, calls in calls_of.items()}, seconds))
        return dict.fromkeys(calls_of, 0.25)

    monkeypatch.setattr(input_costs, "lock_shares_of", lock_shares_of)
    both = ("--source", workspace.rows, *workspace.fn("halve"))
    assert workspace.step(*both) == 0
    assert measured == [({"decode": 64, "jitter": 64, "halve": 128}, pytest.approx(0.3))]
    assert [(fn.name, fn.held) for fn in workspace.found().fn] == [
        ("decode", 0.25),
        ("jitter", 0.25),
        ("halve", 0.25),
    ]


def test_a_consumer_is_timed_with_a_batch_of_one_rank(workspace: Workspace) -> None:
    assert workspace.step("--consumer", f"{workspace.functions}:consume") == 0
    (consumer,) = workspace.found().consumer
    assert (consumer.plan, consumer.phase) == ("pair", "step")
    assert consumer.seconds > 0


def test_results_are_put_beside_what_is_there(workspace: Workspace) -> None:
    links = Calibration(
        "2026-01-01", "mpi", ("a", "b"), 1e-6, 1e-10, 5e-5, 1e-5, (MeasuredLevel("host", 6e-5, 2.4e7),)
    )
    Path(workspace.out).write_text(write_calibration(links))
    assert workspace.step() == 0
    assert workspace.call("--source", workspace.rows, *workspace.fn("halve")) == 0
    calibration = load_calibration(workspace.out)
    assert msgspec.structs.replace(calibration, input=None) == links
    assert [fn.name for fn in workspace.found().fn] == ["decode", "jitter", "halve"]
    halve = workspace.found().fn_named("halve")
    assert halve is not None
    assert (halve.nbytes_in, halve.nbytes_out) == (16, 12)


def test_links_measured_later_leave_the_input(workspace: Workspace, capsys: Capture) -> None:
    assert workspace.step("--format", "json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["calibration"]["input"]["fn"][0]["name"] == "decode"
    before = workspace.found()
    # In a separate process: JAX fixes the number of devices when it first runs.
    words = ("calibrate", "--devices", "2", "--seconds", "1", "--largest", "4B", "-o", workspace.out)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OMPI_")} | {
        "JAX_PLATFORMS": "cpu"
    }
    done = subprocess.run(
        [sys.executable, "-m", "commplan.cli", *words],
        capture_output=True, text=True, check=False, env=environment, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    calibration = load_calibration(workspace.out)
    assert calibration.links is calibration
    assert calibration.input == before


def test_only_one_rank_of_a_job_measures(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    assert workspace.step() == 0
    assert not Path(workspace.out).exists()


@pytest.mark.parametrize(
    ("fns", "more", "code", "message"),
    [
        (("decode=broken", "jitter"), (), "CP0906", " raised OSError: no such picture"),
        (
            ("decode=wrong", "jitter"),
            (),
            "CP0907",
            "host function `decode` returned another type than the plan says",
        ),
        (("decode",), (), "CP1108", "function `jitter` is not given"),
        (("decode", "jitter", "zoom=decode"), (), "CP1108", "the plan has no function `zoom`"),
        (("decode", "jitter", "scale=decode"), (), "CP1108", "`scale` is a function of the device"),
        (("decode=number", "jitter"), (), "CP1109", "which cannot be called"),
        (("decode", "jitter"), ("--consumer", "broken"), "CP0771", "the consumer raised OSError"),
    ],
)
def test_what_cannot_be_measured_is_named(
    workspace: Workspace,
    capsys: Capture,
    fns: tuple[str, ...],
    more: tuple[str, ...],
    code: str,
    message: str,
) -> None:
    flags = [flag for fn in fns for flag in workspace.fn(*fn.split("="))]
    flags += [flag if flag.startswith("--") else f"{workspace.functions}:{flag}" for flag in more]
    assert workspace.call("--source", workspace.images, *flags) == 1
    err = capsys.readouterr().err
    assert f"error[{code}]" in err
    assert message in err
    assert not Path(workspace.out).exists()


def test_a_record_that_is_no_record_is_named(workspace: Workspace, tmp_path: Path, capsys: Capture) -> None:
    np.save(tmp_path / "rows.npy", np.zeros((6, 3), np.float32))
    assert workspace.call("--source", workspace.rows, *workspace.fn("halve")) == 1
    err = capsys.readouterr().err
    assert "error[CP0905]" in err
    assert "expected: f32[4]" in err


@pytest.mark.parametrize("flags", [["--fn", "decode=x:y"], ["PLAN"], ["--source", "images=."]])
def test_plan_and_sources_belong_together(workspace: Workspace, capsys: Capture, flags: list[str]) -> None:
    flags = [workspace.plan if flag == "PLAN" else flag for flag in flags]
    assert main(["calibrate", "-o", workspace.out, *flags]) == 1
    assert "error[CP0770]" in capsys.readouterr().err


def test_a_file_that_cannot_be_read_is_not_written_over(workspace: Workspace, capsys: Capture) -> None:
    Path(workspace.out).write_text("version = 0\n")
    assert workspace.step() == 1
    assert "error[CP0751]" in capsys.readouterr().err
    assert Path(workspace.out).read_text() == "version = 0\n"


def test_an_input_part_with_unknown_or_wrong_entries_is_refused(
    workspace: Workspace, capsys: Capture
) -> None:
    for entry in ("cpus = 1\n", 'cores = "two"\n', "copy = nan\n", "cores = 2\ncopy = inf\n"):
        Path(workspace.out).write_text(f'version = 1\ndate = "d"\n[input]\ndate = "d"\n{entry}')
        assert main(["explain", workspace.plan, "--calibration", workspace.out]) == 1
        assert "error[CP0751]" in capsys.readouterr().err


def test_costs_survive_the_file(workspace: Workspace) -> None:
    costs = InputCosts("d", 2, 1e-9, wire=2e-9, fn=(FnCost("decode", 1e-3), FnCost("jitter", 1e-3, 0.5)))
    calibration = Calibration("d", "jax", (), 0.0, 0.0, 0.0, 0.0, input=costs)
    Path(workspace.out).write_text(write_calibration(calibration))
    assert load_calibration(workspace.out) == calibration
