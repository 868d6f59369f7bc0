"""Figures as tables, JSON and plots."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.harness.stage import Figure, Surroundings

WORDS = ("chosen", "way")  # columns of words


class Results(msgspec.Struct, frozen=True):
    """A bench's JSON file."""

    bench: str
    surroundings: Surroundings
    figures: list[Figure]
    notes: dict[str, float] = {}


def size_text(nbytes: int) -> str:
    """4 B, 16 KiB, 64 MiB; what is not round keeps its bytes."""
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


def write(path: Path, results: Results) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")


def read(path: Path) -> Results:
    return msgspec.json.decode(path.read_bytes(), type=Results)


def plots() -> Any:
    """matplotlib's pyplot, which needs no screen here; None where it is not installed."""
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
    except ImportError:
        return None
    matplotlib.use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def plot(path: Path, results: Results) -> bool:
    """Bus bandwidth as a share of the line rate over size, a panel for each collective; False where
    matplotlib is not installed."""
    pyplot = plots()
    if pyplot is None:
        return False
    kinds = list(dict.fromkeys(figure.work.kind for figure in results.figures))
    drawn, panels = pyplot.subplots(
        2, len(kinds), figsize=(5 * len(kinds), 8), squeeze=False, layout="constrained"
    )
    line = results.surroundings.line
    for column, kind in enumerate(kinds):
        own = [figure for figure in results.figures if figure.work.kind == kind and figure.seconds]
        for label in dict.fromkeys(figure.label for figure in own):
            mine = [figure for figure in own if figure.label == label]
            sizes = [figure.work.nbytes for figure in mine]
            style = {"marker": "o", "markersize": 3, "linewidth": 2.2 if "commplan" in label else 1.0}
            panels[0][column].plot(sizes, [figure.time * 1e3 for figure in mine], label=label, **style)
            panels[1][column].plot(sizes, [figure.bus / line for figure in mine], label=label, **style)
        for row, (quantity, scale) in enumerate(
            (("milliseconds", "log"), ("share of the line rate", "linear"))
        ):
            panel = panels[row][column]
            panel.set(
                xscale="log", yscale=scale, xlabel="bytes", ylabel=quantity, title=kind.replace("_", "-")
            )
            panel.grid(alpha=0.3)
        panels[0][column].legend(fontsize=7)
    drawn.suptitle(heading(results.surroundings), fontsize=9)
    drawn.savefig(path, dpi=110)
    pyplot.close(drawn)
    return True
