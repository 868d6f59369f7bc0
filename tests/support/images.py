"""Small images for the command line's tests: functions that read them, and a folder full."""

from __future__ import annotations

from pathlib import Path

FUNCTIONS = """
import numpy as np

def decode(record):
    return np.frombuffer(record, np.uint8, 12).reshape(2, 2, 3), np.int32(record[12])

def augment(pixels, rng):
    return pixels[::-1] if rng.random() < 0.5 else pixels
"""


def written(folder: Path) -> None:
    """Ten images of 2 by 2, each with its number behind the pixels."""
    folder.mkdir()
    for number in range(10):
        (folder / f"{number:02}.raw").write_bytes(bytes(range(number, number + 12)) + bytes([number]))
