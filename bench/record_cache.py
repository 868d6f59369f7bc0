"""The cost of a decoded record from the second epoch on, against a memcpy of its row.

    python -m bench.record_cache [--members 12] [--records 1024] [--rounds 5] [--cores 2]
        [--systems memcpy,memmap,alone,file,group,feed,tf_cache] [--peer-python PYTHON] [--folder FOLDER]
        [--out FILE.json]

Members are separate processes on one host. Batches of 32 hold JPEGs decoded to 224 x 224 u8. `alone`:
programs that share only a cache in memory; `file`: one in a file; `group` and `feed`: members that share
their batches as well. `memcpy` copies each row into a batch, `memmap` indexes a NumPy memmap of all rows,
`tf_cache` is `cache()` of tf.data, with a copy of all rows in each member.

Every system reads an epoch to fill its cache and one to get warm. Then they take turns, epoch by epoch; each
round begins with another one. CPU is user and system time of all processes, by record and member. Members
compare the numbers in the records with those of an epoch.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from bench.input.cached import BATCH, SYSTEMS
from bench.input.records import SHAPE, Packed, decode, pack
from bench.input.team import Block, StalledError, Team

MOST = 1.3  # of the CPU of a memcpy


class Figure(msgspec.Struct, frozen=True):
    """One system. cpu_s: per record and member, one for each round. first_s: of the first epoch. memory:
    bytes of all its processes, shared pages counted once. wrong: records that a member lacked or had twice.
    failed: why there are no figures."""

    system: str
    cpu_s: list[float] = []
    first_s: float = 0.0
    memory: int = 0
    wrong: int = 0
    failed: str = ""

    @property
    def cpu(self) -> float:
        return statistics.median(self.cpu_s)


def main(argv: list[str] | None = None) -> int:
    options = options_of(argv)
    with tempfile.TemporaryDirectory(prefix="commplan-bench-", dir=options.folder) as folder:
        figures = measure(options, Path(folder))
    print(table(figures))
    if options.out:
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=1) + b"\n")
    return int(any(figure.wrong for figure in figures))


def measure(options: argparse.Namespace, folder: Path) -> list[Figure]:
    records, rows = folder / "records.bin", folder / "rows.npy"
    pack(records, options.records)
    table = np.lib.format.open_memmap(rows, "w+", np.uint8, (options.records, *SHAPE))
    packed = Packed(records)
    for number in range(options.records):
        table[number] = decode(packed[number])
    table.flush()
    failed: dict[str, str] = {}
    first: dict[str, float] = {}
    blocks: dict[str, list[Block]] = {system: [] for system in options.systems}
    memory: dict[str, int] = {}
    with contextlib.ExitStack() as stack:
        teams: dict[str, Team] = {}
        for system in options.systems:
            try:
                teams[system] = team = started(system, options, folder, records, rows)
                stack.callback(team.close)
                first[system] = team.block().cpu_per_record
                team.block()
                memory[system] = team.memory()[0]
            except StalledError as error:
                failed[system] = str(error)
                teams.pop(system, None)
        order = list(teams)
        for round_ in range(options.rounds):
            begin = round_ % len(order)
            for system in (*order[begin:], *order[:begin]):
                blocks[system].append(teams[system].block())
    return [
        Figure(
            system,
            [block.cpu_per_record for block in blocks[system]],
            first.get(system, 0.0),
            memory.get(system, 0),
            sum(answer["missing"] + answer["again"] for block in blocks[system] for answer in block.answers),
            failed.get(system, ""),
        )
        for system in options.systems
    ]


def started(system: str, options: argparse.Namespace, folder: Path, records: Path, rows: Path) -> Team:
    """The members of a system, which have yet to read their first batch."""
    python = options.peer_python if system.startswith("tf_") else sys.executable
    common = ["--records", records, "--rows", rows, "--members", options.members]
    common += ["--run-id", f"bench-{os.getpid()}-{uuid.uuid4().hex[:8]}"]
    command = [python, "-m", "bench.input.cached", system]
    members = [[*map(str, (*command, *common, "--place", place))] for place in range(options.members)]
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
    return Team(
        [], members, cores=range(options.cores), folder=folder / system, timeout=options.timeout,
        environment=quiet,
    )  # fmt: skip


def table(figures: Sequence[Figure]) -> str:
    """All systems; ratios to the memcpy of a row, round by round."""
    base = next((figure for figure in figures if figure.system == "memcpy" and not figure.failed), None)
    lines = [f"{'':<10}{'CPU us':>10}{'x memcpy':>10}{'first us':>10}{'memory':>12}  records"]
    for figure in figures:
        if figure.failed:
            lines.append(f"{figure.system:<10}{figure.failed}")
            continue
        copies = base.cpu_s if base is not None else figure.cpu_s
        ratio = statistics.median(own / copy for own, copy in zip(figure.cpu_s, copies, strict=True))
        records = f"{figure.wrong} wrong" if figure.wrong else "each once"
        lines.append(
            f"{figure.system:<10}{figure.cpu * 1e6:>10.1f}{ratio:>10.2f}{figure.first_s * 1e6:>10.1f}"
            f"{figure.memory / 1e6:>9.0f} MB  {records}"
        )
        if figure.system in ("alone", "file", "group", "feed") and ratio > MOST:
            lines.append(f"  more than {MOST:g} times a memcpy")
    return "\n".join(lines)


def options_of(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--members", type=int, default=12)
    parser.add_argument("--records", type=int, default=1024, help=f"a multiple of {BATCH}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--systems", type=lambda text: text.split(","), default=list(SYSTEMS))
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--peer-python", default=sys.executable, help="an interpreter that has TensorFlow")
    parser.add_argument("--folder", help="for records and rows; a file system of memory is a fair one")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for a system to answer")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    options = parser.parse_args(argv)
    if min(options.members, options.records, options.rounds) < 1 or options.records % BATCH:
        parser.error(f"counts are 1 or more, and --records a multiple of {BATCH}")
    if unknown := set(options.systems) - set(SYSTEMS):
        parser.error(f"there is no system {', '.join(unknown)}: {', '.join(SYSTEMS)}")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
