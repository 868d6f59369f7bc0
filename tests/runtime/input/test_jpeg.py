"""Real JPEG files, decoded by the plan's host function in several threads."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from input_plans import schedule

from commplan.diagnostics import CommplanError
from commplan.runtime.input import PhaseBatches, folder

image = pytest.importorskip("PIL.Image")

DECLARATIONS = """
source images : bytes
fn decode (bytes)         -> u8[24, 32, 3], i32 on host
fn augment(u8[24, 32, 3]) -> u8[20, 20, 3] on host random
"""
BODY = """raw, n = load images batch 8 visit exactly_once seed 17 {hints}
pixels, labels = map decode(raw)
batch = map augment(pixels) per member
output batch, pixels, labels, n"""


def picture(number: int) -> bytes:
    """A smooth picture whose label is its mean colour's third part, so that JPEG does not hurt it."""
    ramp = np.linspace(0, 40, 32)[None, :, None] + np.linspace(0, 20, 24)[:, None, None]
    pixels = (ramp + 5 * number + np.array([0, 10, 20])).astype(np.uint8)
    file = io.BytesIO()
    image.fromarray(pixels).save(file, "JPEG", quality=95, comment=str(number).encode())
    return file.getvalue()


def decode(record: bytes) -> tuple[np.ndarray[Any, Any], int]:
    with image.open(io.BytesIO(record)) as opened:
        label = int(opened.info["comment"])
        return np.asarray(opened.convert("RGB")), label


def augment(pixels: np.ndarray[Any, Any], rng: np.random.Generator) -> np.ndarray[Any, Any]:
    row, column = rng.integers(5), rng.integers(13)
    crop = pixels[row : row + 20, column : column + 20]
    return crop[:, ::-1] if rng.integers(2) else crop


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for number in range(20):
        (tmp_path / f"{number:03}.jpg").write_bytes(picture(number))
    return tmp_path


def run(files: Path, hints: str = "") -> list[dict[str, np.ndarray[Any, Any]]]:
    program = schedule(BODY.format(hints=hints), "ensemble member = 3", declarations=DECLARATIONS)
    functions = {"decode": decode, "augment": augment}
    with PhaseBatches(program, "step", {"images": folder(files)}, functions) as batches:
        names = {b.value: b.name for b in program.phase("step").outputs}
        return [{names[ref]: array for ref, array in batch.values.items()} for batch in batches]


def test_pixels_are_those_that_pillow_makes(files: Path) -> None:
    expected = {label: pixels for pixels, label in (decode(picture(number)) for number in range(20))}
    results = run(files, "{ cores = 4 }")
    for item in results:
        for pixels, label in zip(item["pixels"], item["labels"].tolist(), strict=True):
            assert np.array_equal(pixels, expected[label])
        for member in item["batch"]:
            for crop, pixels in zip(member, item["pixels"], strict=True):
                rows = np.lib.stride_tricks.sliding_window_view(pixels, (20, 20, 3)).reshape(-1, 20, 20, 3)
                assert ((rows == crop).all((1, 2, 3)) | (rows[:, :, ::-1] == crop).all((1, 2, 3))).any()
    labels = [label for item in results for label in item["labels"][: int(item["n"])].tolist()]
    assert sorted(labels) == list(range(20))


def test_a_truncated_file_is_named_or_skipped(files: Path) -> None:
    whole = (files / "013.jpg").read_bytes()
    (files / "013.jpg").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CommplanError) as error:
        run(files)
    assert error.value.diagnostics[0].code == "CP0906"
    assert "on record 13 raised OSError" in error.value.diagnostics[0].message
    results = run(files, "{ on_error = skip }")
    labels = [label for item in results for label in item["labels"][: int(item["n"])].tolist()]
    assert sorted(labels) == [number for number in range(20) if number != 13]
