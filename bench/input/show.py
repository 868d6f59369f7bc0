"""What was found, for people and for programs."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.input.cells import Cell, Figure

NAMES = {
    "duplicate": "commplan, duplicate",
    "all_shared": "commplan, all_shared",
    "single_broadcast": "commplan, single_broadcast",
    "multi_broadcast": "commplan, multi_broadcast",
    "one_process": "commplan, one process",
    "plain": "plain Python, duplicated",
    "grain": "Grain, duplicated",
    "tf_service": "tf.data service, shared",
    "tensorsocket": "TensorSocket, shared",
}
COLUMNS = (
    ("CPU ms", 9), ("+-", 6), ("x limit", 9), ("records/s", 11), ("KB made", 9), ("memory", 9), ("own", 9),
)  # fmt: skip
SHARED = ("all_shared", "single_broadcast", "multi_broadcast")
LEAST_RATIO, MOST_OVER, MOST_MEMORY = 10.0, 1.05, 300_000_000


class Results(msgspec.Struct, frozen=True):
    """A run's JSON file."""

    surroundings: dict[str, str]
    records: int
    batch: int
    cells: list[Cell]


def cell(found: Cell) -> str:
    """One cell as a table."""
    what = {"ids": "consumers look at ids only", "step": "consumers normalise and step, jitted"}[
        found.consumer
    ]
    decode, consume = statistics.median(found.decode_s), statistics.median(found.consume_s)
    cores = f"{found.cores} core{'s' if found.cores > 1 else ''}"
    head = (
        f"\n{found.members} members on {cores}, {what}: decoding {decode * 1e3:.3f} ms, consuming "
        f"{consume * 1e3:.4f} ms, limit {found.limit * 1e3:.4f} ms CPU per record and member"
    )
    if found.apart is not None:
        each = statistics.median(found.apart_s)
        head += f"\nin {found.members} processes at once: decoding {each * 1e3:.3f} ms, "
        head += f"limit {found.apart * 1e3:.4f} ms"
    titles = f"{'':<30}" + "".join(f"{title:>{width}}" for title, width in COLUMNS) + "  ids"
    return "\n".join([head, titles, *(f"  {_line(found, one)}" for one in found.figures)])


def _line(found: Cell, one: Figure) -> str:
    name = f"{NAMES[one.system]:<28}"
    if not one.cpu_s:
        return f"{name}{one.failed}"
    ids = "all, once" if not one.missing and not one.again else f"{one.missing} missing, {one.again} again"
    made = "" if one.made is None else f"{one.made / 1e3:.0f}"
    return (
        f"{name}{one.cpu * 1e3:>9.3f}{_spread(one.cpu_s):>6.0%}{one.cpu / found.limit:>9.2f}{one.wall:>11.0f}"
        f"{made:>9}{_mb(one.memory):>9}{_mb(one.private):>9}  {ids}{'; ' + one.failed if one.failed else ''}"
    )


def _mb(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 1e6:.0f} MB"


def _spread(values: Sequence[float]) -> float:
    """Half the distance between the quartiles, as a share of the median."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2 / statistics.median(values)


def verdict(found: Results) -> str:
    """What was promised, and what came of it, at the largest number of members."""
    lines = [""]
    largest = max(cell.members for cell in found.cells)
    for one in found.cells:
        duplicated = one.of("plain") or one.of("duplicate")
        if one.members != largest or one.members == 1 or duplicated is None:
            continue
        for shared in filter(None, map(one.of, SHARED)):
            lines += _against(one, shared, duplicated)
        wrong = [NAMES[f.system] for f in one.figures if f.missing or f.again]
        if wrong:
            lines.append(f"  records missing or given twice: {', '.join(wrong)}")
    return "\n".join(lines)


def _against(one: Cell, shared: Figure, duplicated: Figure) -> list[str]:
    """A design beside the limit and what is duplicated; then where it misses a promise."""
    over = shared.cpu / one.limit
    apart = f" ({shared.cpu / one.apart - 1:+.1%} from that of processes)" if one.apart else ""
    ratio, wall = duplicated.cpu / shared.cpu, shared.wall / duplicated.wall
    where = f"N = {one.members}, {one.cores} core{'s' if one.cores > 1 else ''}, {one.consumer}"
    said = (
        f"{where}: {shared.system} takes {ratio:.1f}x less CPU than {NAMES[duplicated.system]} and is "
        f"{over - 1:+.1%} from the limit{apart}, {wall:.1f}x as fast; "
        f"{_mb(shared.memory)} beside the processes themselves"
    )
    lines = [said]
    if over > MOST_OVER:
        lines.append(f"  more than {MOST_OVER - 1:.0%} above the limit")
    if one.consumer == "ids" and ratio < LEAST_RATIO:
        lines.append(f"  less than {LEAST_RATIO:g}x (the limit would be {duplicated.cpu / one.limit:.1f}x)")
    if one.consumer == "ids" and one.cores == 1 and wall < LEAST_RATIO:
        lines.append(f"  less than {LEAST_RATIO:g}x as fast")
    if shared.memory is not None and shared.memory > MOST_MEMORY:
        lines.append(f"  more than {MOST_MEMORY / 1e9:.1f} GB")
    return lines


def write(found: Results, path: Path) -> None:
    """The JSON file, and a plot beside it where matplotlib is installed."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    if importlib.util.find_spec("matplotlib") is None:
        return
    plots: Any = importlib.import_module("matplotlib.pyplot")
    kinds = list(dict.fromkeys((one.consumer, one.cores) for one in found.cells))
    figure, panels = plots.subplots(1, len(kinds), figsize=(5 * len(kinds), 4), squeeze=False)
    for panel, (consumer, cores) in zip(panels[0], kinds, strict=True):
        chosen = [one for one in found.cells if (one.consumer, one.cores) == (consumer, cores)]
        for system, name in NAMES.items():
            points = [(one.members, f.cpu * 1e3) for one in chosen if (f := one.of(system))]
            if points:
                panel.plot(*zip(*points, strict=True), "o-", label=name, markersize=3, linewidth=1)
        limits = [(one.members, one.limit * 1e3) for one in chosen]
        panel.plot(*zip(*limits, strict=True), "k--", label="limit", linewidth=1)
        panel.set(
            xscale="log",
            yscale="log",
            xlabel="members",
            title=f"{consumer}, {cores} core{'s' if cores > 1 else ''}",
        )
    panels[0][0].set_ylabel("CPU ms per record and member")
    panels[0][-1].legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path.with_suffix(".png"), dpi=150)
    plots.close(figure)
