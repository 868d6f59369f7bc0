"""`commplan calibrate PLAN --source --fn`: its measurements, its output and its errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from commplan.cli import main
from commplan.cost.calibration import Calibration, MeasuredLevel, load_calibration, write_calibration
from commplan.input.measured_costs import ConsumerCost, FnCost, InputCosts

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


class Here:
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


@pytest.fixture(name="here")
def _here(tmp_path: Path) -> Here:
    return Here(tmp_path)


def test_the_input_is_measured_and_compilations_read_it(here: Here, capsys: Capture) -> None:
    assert here.step("--step-seconds", "12ms") == 0
    err = capsys.readouterr().err
    assert "measuring images, decode, jitter, about 1 seconds" in err
    assert "function decode: " in err
    found = here.found()
    assert load_calibration(here.out).links is None
    assert (found.source[0].name, found.source[0].nbytes) == ("images", 100)
    assert [(fn.name, fn.nbytes_in, fn.nbytes_out) for fn in found.fn] == [
        ("decode", 100, 5),
        ("jitter", 5, 5),
    ]
    assert found.source[0].records == found.fn[0].records >= 16
    assert all(cost.cpu > 0 for cost in (*found.source, *found.fn))
    assert found.copy > 0
    assert found.consumer == (ConsumerCost("pair", "step", 0.012),)
    assert main(["explain", here.plan, "--calibration", here.out]) == 0
    assert "physical limit: " in capsys.readouterr().out
    assert main(["explain", here.plan, "--calibration", here.out, "--format", "json"]) == 0
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


def test_a_consumer_is_timed_with_a_batch_of_one_rank(here: Here) -> None:
    assert here.step("--consumer", f"{here.functions}:consume") == 0
    (consumer,) = here.found().consumer
    assert (consumer.plan, consumer.phase) == ("pair", "step")
    assert consumer.seconds > 0


def test_results_are_put_beside_what_is_there(here: Here) -> None:
    links = Calibration(
        "2026-01-01", "mpi", ("a", "b"), 1e-6, 1e-10, 5e-5, 1e-5, (MeasuredLevel("host", 6e-5, 2.4e7),)
    )
    Path(here.out).write_text(write_calibration(links))
    assert here.step() == 0
    assert here.call("--source", here.rows, *here.fn("halve")) == 0
    found = load_calibration(here.out)
    assert msgspec.structs.replace(found, input=None) == links
    assert [fn.name for fn in here.found().fn] == ["decode", "jitter", "halve"]
    halve = here.found().fn_named("halve")
    assert halve is not None
    assert (halve.nbytes_in, halve.nbytes_out) == (16, 12)


def test_links_measured_later_leave_the_input(here: Here, capsys: Capture) -> None:
    assert here.step("--format", "json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["calibration"]["input"]["fn"][0]["name"] == "decode"
    before = here.found()
    # In a separate process: JAX fixes the number of devices when it first runs.
    words = ("calibrate", "--devices", "2", "--seconds", "1", "--largest", "4B", "-o", here.out)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OMPI_")} | {
        "JAX_PLATFORMS": "cpu"
    }
    done = subprocess.run(
        [sys.executable, "-m", "commplan.cli", *words],
        capture_output=True, text=True, check=False, env=environment, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = load_calibration(here.out)
    assert found.links is found
    assert found.input == before


def test_only_one_rank_of_a_job_measures(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    assert here.step() == 0
    assert not Path(here.out).exists()


@pytest.mark.parametrize(
    ("fns", "more", "code", "said"),
    [
        (("decode=broken", "jitter"), (), "CP0906", "`decode` raised OSError: no such picture"),
        (("decode=wrong", "jitter"), (), "CP0907", "host function `decode` is of another type"),
        (("decode",), (), "CP1108", "function `jitter` is not given"),
        (("decode", "jitter", "zoom=decode"), (), "CP1108", "the plan has no function `zoom`"),
        (("decode", "jitter", "scale=decode"), (), "CP1108", "`scale` is a function of the device"),
        (("decode=number", "jitter"), (), "CP1109", "which cannot be called"),
        (("decode", "jitter"), ("--consumer", "broken"), "CP0771", "the consumer raised OSError"),
    ],
)
def test_what_cannot_be_measured_is_named(
    here: Here, capsys: Capture, fns: tuple[str, ...], more: tuple[str, ...], code: str, said: str
) -> None:
    flags = [flag for fn in fns for flag in here.fn(*fn.split("="))]
    flags += [flag if flag.startswith("--") else f"{here.functions}:{flag}" for flag in more]
    assert here.call("--source", here.images, *flags) == 1
    err = capsys.readouterr().err
    assert f"error[{code}]" in err
    assert said in err
    assert not Path(here.out).exists()


def test_a_record_that_is_no_record_is_named(here: Here, tmp_path: Path, capsys: Capture) -> None:
    np.save(tmp_path / "rows.npy", np.zeros((6, 3), np.float32))
    assert here.call("--source", here.rows, *here.fn("halve")) == 1
    err = capsys.readouterr().err
    assert "error[CP0905]" in err
    assert "expected: f32[4]" in err


@pytest.mark.parametrize("flags", [["--fn", "decode=x:y"], ["PLAN"], ["--source", "images=."]])
def test_plan_and_sources_belong_together(here: Here, capsys: Capture, flags: list[str]) -> None:
    flags = [here.plan if flag == "PLAN" else flag for flag in flags]
    assert main(["calibrate", "-o", here.out, *flags]) == 1
    assert "error[CP0770]" in capsys.readouterr().err


def test_a_file_that_cannot_be_read_is_not_written_over(here: Here, capsys: Capture) -> None:
    Path(here.out).write_text("version = 0\n")
    assert here.step() == 1
    assert "error[CP0751]" in capsys.readouterr().err
    assert Path(here.out).read_text() == "version = 0\n"


def test_an_input_part_with_unknown_or_wrong_entries_is_refused(here: Here, capsys: Capture) -> None:
    for entry in ("cpus = 1\n", 'cores = "two"\n', "copy = nan\n", "cores = 2\ncopy = inf\n"):
        Path(here.out).write_text(f'version = 1\ndate = "d"\n[input]\ndate = "d"\n{entry}')
        assert main(["explain", here.plan, "--calibration", here.out]) == 1
        assert "error[CP0751]" in capsys.readouterr().err


def test_costs_survive_the_file(here: Here) -> None:
    costs = InputCosts("d", 2, 1e-9, wire=2e-9, fn=(FnCost("decode", 1e-3), FnCost("jitter", 1e-3, 0.5)))
    made = Calibration("d", "jax", (), 0.0, 0.0, 0.0, 0.0, input=costs)
    Path(here.out).write_text(write_calibration(made))
    assert load_calibration(here.out) == made
