"""Plans, sources and functions that the data tests share, also between processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from commplan.compiler import compile_plan
from commplan.dsl.check import check
from commplan.dsl.parser import parse
from commplan.ir.schedule import Leaf, Schedule

SIDE = 6
DECLARATIONS = """
source images : bytes
fn decode (bytes)     -> u8[6, 6], i32 on host
fn flip   (u8[6, 6])  -> u8[6, 6] on host random
fn half   (u8[6, 6])  -> f32[6, 6] on host
fn scale  (u8[6, 6])  -> f32[6, 6] on device elementwise
fn jitter (f32[6, 6]) -> f32[6, 6] on device random
"""


def schedule(
    body: str,
    axes: str = "",
    *,
    phase: str = "each step",
    declarations: str = DECLARATIONS,
    pipeline: str = "",
    shapes: Mapping[str, tuple[Leaf, ...]] | None = None,
) -> Schedule:
    """The compiled plan with one phase of `body`; it must be right."""
    text = f"plan tested\n{axes}\n{declarations}\n{phase} {{\n{body}\n}}\n"
    tree, problems = parse(text, "tested.plan")
    assert not problems, problems
    plan, problems = check(tree)
    assert plan is not None and not problems, problems
    return compile_plan(plan, shapes or {}, passes=pipeline)


def ensemble(
    design: str, members: int, *, batch: int = 8, axes: str = "", split: str = "", hints: str = ""
) -> Schedule:
    """Shared pixels and labels, and separate augmentation for each member. `design` None omits `share`."""
    share = f"pixels = share pixels over member via {design}" if design else ""
    body = f"""
        raw, n = load images batch {batch} {split} visit exactly_once seed 17 {hints}
        pixels, labels = map decode(raw)
        {share}
        batch = map flip(pixels) per member
        output batch, labels, pixels, n
    """
    return schedule(body, f"ensemble member = {members}\n{axes}")


def images(count: int) -> list[bytes]:
    """Records of different content and length."""
    return [bytes([index % 251]) * (index % 7 + 1) for index in range(count)]


def decode(record: bytes) -> tuple[np.ndarray[Any, Any], int]:
    return np.full((SIDE, SIDE), record[0], np.uint8) + np.arange(SIDE, dtype=np.uint8), record[0]


def flip(pixels: np.ndarray[Any, Any], rng: np.random.Generator) -> np.ndarray[Any, Any]:
    return np.roll(pixels, rng.integers(SIDE), axis=1) ^ rng.integers(0, 256, pixels.shape, dtype=np.uint8)


def half(pixels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return pixels.astype(np.float32) / 2


FUNCTIONS: Mapping[str, Callable[..., Any]] = {"decode": decode, "flip": flip, "half": half}


class Counting:
    """A source that counts how often each record was read."""

    def __init__(self, records: Sequence[bytes], delay: float = 0.0) -> None:
        self.records, self.delay = records, delay
        self.read: list[int] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> bytes:
        with self._lock:
            self.read.append(index)
        time.sleep(self.delay)
        return self.records[index]
