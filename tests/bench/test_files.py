"""A slice of the campaign of damaged files, and a check that the campaign finds faulty readers."""

from __future__ import annotations

import json
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from support.campaign import parameters

from bench.files import __main__ as files
from bench.files.formats import FORMATS
from commplan.runtime.input.ring import words

ROOT = Path(__file__).parents[2]


def said(*command: object) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=ROOT, text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("count", parameters([len(FORMATS)], [125 * len(FORMATS)]))
def test_damaged_files_are_accepted_or_refused(count: int) -> None:
    said("-m", "bench.files", "--count", count, "--seed", 3)


def test_the_campaign_tells_readers_apart(tmp_path: Path) -> None:
    outcomes = json.loads(said("-P", Path(__file__).with_name("file_readers.py"), tmp_path))
    assert {name: kind for name, (kind, _) in outcomes.items()} == {
        "accepts": files.ACCEPTED,
        "refuses": files.REFUSED,
        **dict.fromkeys(("raises", "writes outside", "takes memory", "takes time"), files.WRONG),
    }
    texts = {name: text for name, (_, text) in outcomes.items()}
    assert "CP0001" in texts["refuses"] and "ZeroDivisionError" in texts["raises"]
    assert "written outside" in texts["writes outside"] and "MemoryError" in texts["takes memory"]
    assert f"ended with -{int(signal.SIGXCPU)}" in texts["takes time"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["cut", "facts", "plan"])
def test_a_damaged_feed_is_left_alone(tmp_path: Path, damage: str) -> None:
    data = bytearray(FORMATS["feed"].samples()[0])
    if damage == "cut":
        del data[words.PAGE :]
    else:
        struct.pack_into("<Q", data, 8 * words.HEADER[damage], 2**60)
    (tmp_path / "feed").write_bytes(data)
    assert FORMATS["feed"].read(tmp_path / "feed") == (damage != "plan")
