"""Figures as tables and JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.harness.stage import Figure, Surroundings

WORDS = ("chosen", "way", "contents", "records", "ids")  # columns of words


class Results(msgspec.Struct, frozen=True):
    """A bench's JSON file."""

    bench: str
    surroundings: Surroundings
    figures: list[Figure]
    notes: dict[str, float] = {}


def size_text(nbytes: int) -> str:
    """4 B, 16 KiB, 64 MiB; other sizes in bytes."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def time_text(seconds: float) -> str:
    """Three digits and a unit."""
    unit, name = (1.0, "s") if seconds >= 1 else (1e-3, "ms") if seconds >= 1e-3 else (1e-6, "us")
    value = seconds / unit
    return f"{value:.{max(0, 2 - int(math.log10(max(value, 1))))}f} {name}"


def heading(where: Surroundings) -> str:
    shape = where.shape
    racks = f"{shape.racks} racks of {shape.hosts}" if shape.racks > 1 else f"{shape.hosts} hosts, one switch"
    order = ", ranks go round the racks" if shape.interleave else ""
    lines = ", ".join(f"{label} {rate * 8 / 1e6:.1f} Mbit/s" for label, rate in where.line_rates.items())
    return (
        f"{racks}{order}; links {shape.rate}; line rate measured: {lines}; TCP {where.congestion_control};"
        f" {where.cores} cores, load {where.load[0]:.1f}; {where.date}"
    )


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need to be; numbers are set to the right, the first and words to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    left = [not column or head in WORDS for column, head in enumerate(rows[0])]
    lines: list[str] = []
    for row in rows:
        cells = zip(row, widths, left, strict=True)
        lines.append("  ".join(cell.ljust(w) if text else cell.rjust(w) for cell, w, text in cells))
    return "\n".join(line.rstrip() for line in lines)


def write(path: Path, results: Any) -> None:
    """Write a struct, or a list of them, as JSON."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")


def read(path: Path) -> Results:
    return msgspec.json.decode(path.read_bytes(), type=Results)
