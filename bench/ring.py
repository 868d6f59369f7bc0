"""The cost of shared input, against a hand-written ring in shared memory for the same job.

    python -m bench.ring [--members 12] [--makers 1] [--records 1024] [--rounds 7] [--systems ring,feed,group]
        [--cores 2] [--out FILE.json]

Members are separate processes on one host: of a feed (`commplan.join`), of a group as under a launcher, or of
the ring (`bench.input.hand_ring`). Batches of 32 come from two loads, JPEGs (500 x 375, decoded with Pillow
to 224 x 224 u8) and their numbers, and a random function changes the pictures. All systems are started, read
an epoch to get warm and then take turns, epoch by epoch; each round begins with another one. Members store
the numbers and some cells of every picture of every batch, and after each round the checksums are compared
with the plan's.

CPU is user and system time of all processes of a system, by record and member. Memory is measured before, for
each system alone: all pages of its processes, with shared pages counted once (PSS).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import uuid
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import msgspec

import commplan
from bench.input.hand_ring import nbytes
from bench.input.records import Packed, pack
from bench.input.ring import BATCH, PLAN, expected
from bench.input.team import Block, Team

SYSTEMS = ("ring", "feed", "group")
MOST_CPU, MOST_MEMORY = 1.05, 1.2  # of the ring


class Figure(msgspec.Struct, frozen=True):
    """One system. cpu_s, wall_s: per record and member, one for each round. memory, private: bytes of all
    its processes, shared pages counted once, and not at all. wrong: members and epochs with other
    contents."""

    system: str
    cpu_s: list[float]
    wall_s: list[float]
    memory: int
    private: int
    wrong: int


def main(argv: list[str] | None = None) -> int:
    options = options_of(argv)
    with tempfile.TemporaryDirectory(prefix="commplan-bench-") as folder:
        figures = measure(options, Path(folder))
    print(table(figures))
    if options.out:
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=1) + b"\n")
    return int(any(figure.wrong for figure in figures))


def measure(options: argparse.Namespace, folder: Path) -> list[Figure]:
    records = folder / "records.bin"
    pack(records, options.records)
    systems: Sequence[str] = options.systems
    memory: dict[str, tuple[int, int]] = {}
    for system in systems:
        with contextlib.ExitStack() as stack:
            team = stack.enter_context(started(system, options, folder, records))
            for _ in range(2):
                team.block()
            memory[system] = team.memory()
    blocks: dict[str, list[Block]] = {system: [] for system in systems}
    wrong = dict.fromkeys(systems, 0)
    with contextlib.ExitStack() as stack:
        teams = {s: stack.enter_context(started(s, options, folder, records)) for s in systems}
        for epoch in range(options.rounds + 1):  # the first to get warm
            first = epoch % len(systems)
            for system in (*systems[first:], *systems[:first]):
                blocks[system].append(teams[system].block())
            checksum = expected(Packed(records), epoch)
            for system in systems:
                answers = blocks[system][-1].answers
                wrong[system] += sum(
                    answer["checksum"] != checksum or answer["records"] != options.records
                    for answer in answers
                )
    return [
        Figure(
            system,
            [block.cpu_per_record for block in blocks[system][1:]],
            [block.wall_s / options.records for block in blocks[system][1:]],
            *memory[system],
            wrong[system],
        )
        for system in systems
    ]


@contextlib.contextmanager
def started(system: str, options: argparse.Namespace, folder: Path, records: Path) -> Generator[Team]:
    """The processes of a system, which have yet to read their first batch."""
    run_id = f"bench-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    where = folder / run_id
    where.mkdir()
    plan = where / "ring.plan"
    design = "single_broadcast(readers = 1)" if options.makers == 1 else "all_shared"
    plan.write_text(PLAN.format(members=options.members, makers=options.makers, design=design))
    if system == "group":
        commplan.load(plan).compile(passes="").save(plan.with_suffix(".schedule.json"))
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="commplan-bench-") as memory:
        memory.truncate(nbytes(options.members))
        common = ["--plan", plan, "--records", records, "--members", options.members]
        common += ["--memory", memory.name, "--run-id", run_id]
        command = [sys.executable, "-m", "bench.input.ring"]
        servers = [_words(*command, "maker", *common)] if system == "ring" else []
        members = [_words(*command, system, *common, "--place", place) for place in range(options.members)]
        team = Team(servers, members, cores=range(options.cores), folder=where, timeout=options.timeout)
        try:
            yield team
        finally:
            team.close()


def _words(*words: Any) -> list[str]:
    return [str(word) for word in words]


def table(figures: Sequence[Figure]) -> str:
    """All systems; ratios to the ring, round by round: their median, and their quartiles."""
    base = next((figure for figure in figures if figure.system == "ring"), figures[0])
    titles = (("", 1), ("CPU ms", 16), ("x ring", 8), ("quartiles", 15), ("wall ms", 10), ("memory", 10),
              ("x ring", 8), ("own", 10))  # fmt: skip
    lines = ["".join(f"{title:>{width}}" for title, width in titles) + "  contents"]
    for figure in figures:
        ratios = [own / theirs for own, theirs in zip(figure.cpu_s, base.cpu_s, strict=True)]
        low, middle, high = _quartiles(ratios)
        contents = f"{figure.wrong} epochs of members wrong" if figure.wrong else "as the plan says"
        lines.append(
            f"{figure.system:<8}{statistics.median(figure.cpu_s) * 1e3:>9.4f}{middle:>8.3f}"
            f"{f'{low:.3f}..{high:.3f}':>15}{statistics.median(figure.wall_s) * 1e3:>10.3f}"
            f"{figure.memory / 1e6:>7.0f} MB{figure.memory / base.memory:>8.2f}"
            f"{figure.private / 1e6:>7.0f} MB  {contents}"
        )
        if middle > MOST_CPU:
            lines.append(f"  more than {MOST_CPU - 1:.0%} above the ring's CPU")
        if figure.memory > MOST_MEMORY * base.memory:
            lines.append(f"  more than {MOST_MEMORY - 1:.0%} above the ring's memory")
    return "\n".join(lines)


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def options_of(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--members", type=int, default=12)
    parser.add_argument("--makers", type=int, default=1, help="processes of commplan's that make batches")
    parser.add_argument("--records", type=int, default=1024, help=f"a multiple of {BATCH}")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--systems", type=lambda text: text.split(","), default=list(SYSTEMS))
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for a system to answer")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    options = parser.parse_args(argv)
    if min(options.members, options.makers, options.records, options.rounds) < 1 or options.records % BATCH:
        parser.error(f"counts are 1 or more, and --records a multiple of {BATCH}: every batch has one shape")
    if unknown := set(options.systems) - set(SYSTEMS):
        parser.error(f"there is no system {', '.join(unknown)}: {', '.join(SYSTEMS)}")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
