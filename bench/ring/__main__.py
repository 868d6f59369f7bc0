"""The cost of shared input, against a hand-written ring in shared memory for the same job.

    python -m bench.ring [--members 12] [--makers 1] [--records 1024] [--rounds 7] [--systems ring,feed,group]
        [--cores 2] [--out FILE.json]

Members are separate processes on one host: of a feed (`commplan.join`), of a group as under a launcher, or of
the ring (`bench.ring.hand_ring`). Batches of 32 come from two loads, JPEGs (500 x 375, decoded with Pillow
to 224 x 224 u8) and their numbers, and a random function changes the pictures. All systems are started, read
an epoch to get warm and then take turns, epoch by epoch; each round begins with another one. Members store
the numbers and some cells of every picture of every batch, and after each round the checksums are compared
with the plan's.

CPU is user and system time of all processes of a system, by record and member. Memory is measured before, for
each system alone: all pages of its processes, with shared pages counted once (PSS).
`first` is the time until all members have the first batch of an epoch.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path

import commplan
from bench.harness.figures import table as columns
from bench.input.records import Packed, pack
from bench.input.team import Block, StalledError, Team
from bench.input.turns import Figure, bench_parser, checked, commands, finished, in_turns, megabytes, run_id
from bench.ring.hand_ring import nbytes
from bench.ring.member import BATCH, PLAN, expected

MODULE = "bench.ring.member"
SYSTEMS = ("ring", "feed", "group")


def main(argv: list[str] | None = None) -> int:
    options = options_of(argv)
    with tempfile.TemporaryDirectory(prefix="commplan-bench-") as folder:
        figures = measure(options, Path(folder))
    return finished(figures, table(figures), options.out)


def measure(options: argparse.Namespace, folder: Path) -> list[Figure]:
    records = folder / "records.bin"
    pack(records, options.records)
    memory: dict[str, tuple[int, int]] = {}
    for system in options.systems:
        with started(system, options, folder, records) as team:
            for _ in range(2):
                team.block()
            memory[system] = team.memory()
    blocks: dict[str, list[Block]] = {system: [] for system in options.systems}
    wrong = dict.fromkeys(options.systems, 0)
    with contextlib.ExitStack() as stack:
        teams = {s: stack.enter_context(started(s, options, folder, records)) for s in options.systems}
        for epoch, turn in enumerate(in_turns(teams, options.rounds + 1)):  # the first to get warm
            checksum = expected(Packed(records), epoch)
            for system, block in turn.items():
                if isinstance(block, StalledError):
                    raise block
                blocks[system].append(block)
                wrong[system] += sum(
                    answer["checksum"] != checksum or answer["records"] != options.records
                    for answer in block.answers
                )
    return [
        Figure(
            system,
            [block.cpu_per_record for block in blocks[system][1:]],
            [block.wall_s / options.records for block in blocks[system][1:]],
            latency_s=[max(answer["first_s"] for answer in block.answers) for block in blocks[system]],
            memory=memory[system][0], private=memory[system][1], wrong=wrong[system],
        )
        for system in options.systems
    ]  # fmt: skip


@contextlib.contextmanager
def started(system: str, options: argparse.Namespace, folder: Path, records: Path) -> Generator[Team]:
    """The processes of a system, which have yet to read their first batch."""
    name = run_id()
    where = folder / name
    where.mkdir()
    plan = where / "ring.plan"
    design = "single_broadcast(readers = 1)" if options.makers == 1 else "all_shared"
    plan.write_text(PLAN.format(members=options.members, makers=options.makers, design=design))
    if system == "group":
        commplan.load(plan).compile(passes="").save(plan.with_suffix(".schedule.json"))
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="commplan-bench-") as memory:
        memory.truncate(nbytes(options.members))
        common = ["--plan", plan, "--records", records, "--members", options.members]
        common += ["--memory", memory.name, "--run-id", name]
        servers = commands(MODULE, "maker", 1, *common) if system == "ring" else []
        members = commands(MODULE, system, options.members, *common)
        team = Team(servers, members, cores=range(options.cores), folder=where, timeout=options.timeout)
        try:
            yield team
        finally:
            team.close()


def table(figures: Sequence[Figure]) -> str:
    """All systems; ratios to the ring, round by round: their median, and their quartiles."""
    base = next((figure for figure in figures if figure.system == "ring"), figures[0])
    rows = [
        ["", "CPU ms", "x ring", "quartiles", "wall ms", "first ms", "memory", "x ring", "own", "contents"]
    ]
    for figure in figures:
        low, middle, high = figure.ratios(base)
        rows.append(
            [
                figure.system,
                f"{figure.cpu * 1e3:.4f}",
                f"{middle:.3f}",
                f"{low:.3f}..{high:.3f}",
                f"{statistics.median(figure.wall_s) * 1e3:.3f}",
                f"{statistics.median(figure.latency_s) * 1e3:.1f}",
                megabytes(figure.memory),
                f"{figure.memory / base.memory:.2f}",
                megabytes(figure.private),
                f"{figure.wrong} epochs of members wrong" if figure.wrong else "as the plan says",
            ]
        )
    return columns(rows)


def options_of(argv: list[str] | None) -> argparse.Namespace:
    parser = bench_parser("ring", __doc__, SYSTEMS, rounds=7)
    parser.add_argument("--makers", type=int, default=1, help="processes of commplan's that make batches")
    return checked(parser, argv, BATCH)


if __name__ == "__main__":
    raise SystemExit(main())
