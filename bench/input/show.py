"""The findings, for people and for programs."""

from __future__ import annotations

import statistics

import msgspec

from bench.harness.figures import table
from bench.harness.spread import spread
from bench.input.cells import Cell, Figure
from bench.input.turns import megabytes

NAMES = {
    "duplicate": "commplan, duplicate",
    "all_shared": "commplan, all_shared",
    "single_broadcast": "commplan, single_broadcast",
    "multi_broadcast": "commplan, multi_broadcast",
    "one_process": "commplan, one process",
    "plain": "plain Python, duplicated",
    "grain": "Grain, duplicated",
}
COLUMNS = ("", "CPU ms", "+-", "x limit", "records/s", "KB made", "memory", "own", "ids")
SHARED = ("all_shared", "single_broadcast", "multi_broadcast")


class Results(msgspec.Struct, frozen=True):
    """A run's JSON file."""

    surroundings: dict[str, str]
    records: int
    batch: int
    cells: list[Cell]


def cell(measured: Cell) -> str:
    """One cell as a table."""
    consumer = {"ids": "consumers look at ids only", "step": "consumers normalize and step, jitted"}[
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
    return f"{head}\n{table([list(COLUMNS), *(_row(measured, figure) for figure in measured.figures)])}"


def _row(measured: Cell, figure: Figure) -> list[str]:
    if not figure.cpu_s:
        return [NAMES[figure.system], figure.failed, *[""] * 7]
    odd = figure.missing or figure.again
    ids = f"{figure.missing} missing, {figure.again} again" if odd else "all, once"
    return [
        NAMES[figure.system],
        f"{figure.cpu * 1e3:.3f}",
        f"{spread(figure.cpu_s):.0%}",
        f"{figure.cpu / measured.limit:.2f}",
        f"{figure.wall:.0f}",
        "" if figure.made is None else f"{figure.made / 1e3:.0f}",
        megabytes(figure.memory),
        megabytes(figure.private),
        f"{ids}; {figure.failed}" if figure.failed else ids,
    ]


def verdict(results: Results) -> str:
    """The shared designs against duplicated work, at the largest number of members."""
    lines = [""]
    largest = max(cell.members for cell in results.cells)
    for measured in results.cells:
        duplicated = measured.of("plain") or measured.of("duplicate")
        if measured.members != largest or measured.members == 1 or duplicated is None:
            continue
        for shared in filter(None, map(measured.of, SHARED)):
            lines.append(_against(measured, shared, duplicated))
        wrong = [NAMES[f.system] for f in measured.figures if f.missing or f.again]
        if wrong:
            lines.append(f"  records missing or given twice: {', '.join(wrong)}")
    return "\n".join(lines)


def _against(measured: Cell, shared: Figure, duplicated: Figure) -> str:
    """A design against the limit and the duplicated work."""
    over = shared.cpu / measured.limit
    apart = f" ({shared.cpu / measured.apart - 1:+.1%} from that of processes)" if measured.apart else ""
    cores = f"{measured.cores} core{'s' if measured.cores > 1 else ''}"
    return (
        f"N = {measured.members}, {cores}, {measured.consumer}: {shared.system} takes"
        f" {duplicated.cpu / shared.cpu:.1f}x less CPU than {NAMES[duplicated.system]} and is"
        f" {over - 1:+.1%} from the limit{apart}, {shared.wall / duplicated.wall:.1f}x as fast;"
        f" {megabytes(shared.memory)} in addition to the processes themselves"
    )
