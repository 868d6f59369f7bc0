"""The findings, for people and for programs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

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


def cell(measured: Cell) -> str:
    """One cell as a table."""
    consumer = {"ids": "consumers look at ids only", "step": "consumers normalise and step, jitted"}[
        measured.consumer
    ]
    decode, consume = statistics.median(measured.decode_s), statistics.median(measured.consume_s)
    cores = f"{measured.cores} core{'s' if measured.cores > 1 else ''}"
    head = (
        f"\n{measured.members} members on {cores}, {consumer}: decoding {decode * 1e3:.3f} ms, consuming "
        f"{consume * 1e3:.4f} ms, limit {measured.limit * 1e3:.4f} ms CPU per record and member"
    )
    if measured.apart is not None:
        each = statistics.median(measured.apart_s)
        head += f"\nin {measured.members} processes at once: decoding {each * 1e3:.3f} ms, "
        head += f"limit {measured.apart * 1e3:.4f} ms"
    titles = f"{'':<30}" + "".join(f"{title:>{width}}" for title, width in COLUMNS) + "  ids"
    return "\n".join([head, titles, *(f"  {_line(measured, figure)}" for figure in measured.figures)])


def _line(measured: Cell, figure: Figure) -> str:
    name = f"{NAMES[figure.system]:<28}"
    if not figure.cpu_s:
        return f"{name}{figure.failed}"
    odd = figure.missing or figure.again
    ids = f"{figure.missing} missing, {figure.again} again" if odd else "all, once"
    kilobytes = "" if figure.made is None else f"{figure.made / 1e3:.0f}"
    return (
        f"{name}{figure.cpu * 1e3:>9.3f}{_spread(figure.cpu_s):>6.0%}{figure.cpu / measured.limit:>9.2f}"
        f"{figure.wall:>11.0f}{kilobytes:>9}{_mb(figure.memory):>9}{_mb(figure.private):>9}  {ids}"
        f"{'; ' + figure.failed if figure.failed else ''}"
    )


def _mb(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 1e6:.0f} MB"


def _spread(values: Sequence[float]) -> float:
    """Half the distance between the quartiles, as a share of the median."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2 / statistics.median(values)


def verdict(results: Results) -> str:
    """The promises and the results, at the largest number of members."""
    lines = [""]
    largest = max(cell.members for cell in results.cells)
    for measured in results.cells:
        duplicated = measured.of("plain") or measured.of("duplicate")
        if measured.members != largest or measured.members == 1 or duplicated is None:
            continue
        for shared in filter(None, map(measured.of, SHARED)):
            lines += _against(measured, shared, duplicated)
        wrong = [NAMES[f.system] for f in measured.figures if f.missing or f.again]
        if wrong:
            lines.append(f"  records missing or given twice: {', '.join(wrong)}")
    return "\n".join(lines)


def _against(measured: Cell, shared: Figure, duplicated: Figure) -> list[str]:
    """A design against the limit and the duplicated work; then the promises that it misses."""
    over = shared.cpu / measured.limit
    apart = f" ({shared.cpu / measured.apart - 1:+.1%} from that of processes)" if measured.apart else ""
    ratio, wall = duplicated.cpu / shared.cpu, shared.wall / duplicated.wall
    cores = f"{measured.cores} core{'s' if measured.cores > 1 else ''}"
    where = f"N = {measured.members}, {cores}, {measured.consumer}"
    sentences = (
        f"{where}: {shared.system} takes {ratio:.1f}x less CPU than {NAMES[duplicated.system]} and is "
        f"{over - 1:+.1%} from the limit{apart}, {wall:.1f}x as fast; "
        f"{_mb(shared.memory)} beside the processes themselves"
    )
    lines = [sentences]
    if over > MOST_OVER:
        lines.append(f"  more than {MOST_OVER - 1:.0%} above the limit")
    if measured.consumer == "ids" and ratio < LEAST_RATIO:
        lines.append(
            f"  less than {LEAST_RATIO:g}x (the limit would be {duplicated.cpu / measured.limit:.1f}x)"
        )
    if measured.consumer == "ids" and measured.cores == 1 and wall < LEAST_RATIO:
        lines.append(f"  less than {LEAST_RATIO:g}x as fast")
    if shared.memory is not None and shared.memory > MOST_MEMORY:
        lines.append(f"  more than {MOST_MEMORY / 1e9:.1f} GB")
    return lines


def write(results: Results, path: Path) -> None:
    """The JSON file."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
