"""A slice of the campaign of damaged files, and that the campaign finds what is wrong."""

from __future__ import annotations

import os
import signal
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from support.campaign import parameters

from bench import files
from bench.files_formats import FORMATS, Format
from commplan.diagnostics import fail
from commplan.runtime.input.feeds import layout


@pytest.mark.parametrize("count", parameters([len(FORMATS)], [125 * len(FORMATS)]))
def test_damaged_files_are_accepted_or_refused(count: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert files.main(["--count", str(count), "--seed", "3"]) == 0, capsys.readouterr().out


def outside(path: Path) -> int:
    (path.parent.parent / "canary").write_text("written")
    return 0


def large(path: Path) -> int:
    return len(bytearray(2 * files.MEMORY)) * 0


def endless(path: Path) -> int:
    os.kill(os.getpid(), signal.SIGXCPU)
    return 0


@pytest.mark.parametrize(
    ("read", "kind", "text"),
    [
        (lambda _: 0, files.ACCEPTED, ""),
        (lambda _: fail("CP0001", "no"), files.REFUSED, "CP0001"),
        (lambda _: 1 // 0, files.WRONG, "ZeroDivisionError"),
        (outside, files.WRONG, "written outside"),
        (large, files.WRONG, "MemoryError"),
        (endless, files.WRONG, f"ended with -{int(signal.SIGXCPU)}"),
    ],
)
def test_the_campaign_tells_them_apart(
    tmp_path: Path, read: Callable[[Path], int], kind: str, text: str
) -> None:
    outcome = files.run_case(Format("a", lambda: (b"text",), read), "seed", tmp_path)
    assert outcome.kind == kind and text in outcome.text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["cut", "facts", "compiled"])
def test_a_damaged_feed_is_left_alone(tmp_path: Path, damage: str) -> None:
    data = bytearray(FORMATS["feed"].samples()[0])
    if damage == "cut":
        del data[layout.FACTS_AT :]
    else:
        struct.pack_into("<Q", data, 8 * layout.HEADER[damage], 2**60)
    (tmp_path / "feed").write_bytes(data)
    assert FORMATS["feed"].read(tmp_path / "feed") == (damage != "compiled")
