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
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.harness.figures import table as columns
from bench.input.records import SHAPE, Packed, decode, pack
from bench.input.team import Block, StalledError, Team
from bench.input.turns import Figure, bench_parser, checked, commands, finished, in_turns, megabytes, run_id
from bench.record_cache.member import BATCH, SYSTEMS


def main(argv: list[str] | None = None) -> int:
    options = options_of(argv)
    with tempfile.TemporaryDirectory(prefix="commplan-bench-", dir=options.folder) as folder:
        figures = measure(options, Path(folder))
    return finished(figures, table(figures), options.out)


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
        for turn in in_turns(teams, options.rounds):
            for system, block in turn.items():
                if isinstance(block, StalledError):
                    failed[system] = str(block)
                else:
                    blocks[system].append(block)
    return [
        Figure(
            system,
            [block.cpu_per_record for block in blocks[system]],
            first_s=first.get(system, 0.0),
            memory=memory.get(system, 0),
            wrong=sum(
                answer["missing"] + answer["again"] for block in blocks[system] for answer in block.answers
            ),
            failed=failed.get(system, ""),
        )
        for system in options.systems
    ]


def started(system: str, options: argparse.Namespace, folder: Path, records: Path, rows: Path) -> Team:
    """The members of a system, which have yet to read their first batch."""
    python = options.peer_python if system.startswith("tf_") else ""
    common = ["--records", records, "--rows", rows, "--members", options.members, "--run-id", run_id()]
    members = commands("bench.record_cache.member", system, options.members, *common, python=python)
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
    return Team(
        [], members, cores=range(options.cores), folder=folder / system, timeout=options.timeout,
        environment=quiet,
    )  # fmt: skip


def table(figures: Sequence[Figure]) -> str:
    """All systems; ratios to the memcpy of a row, round by round."""
    base = next((figure for figure in figures if figure.system == "memcpy" and not figure.failed), None)
    rows = [["", "CPU us", "x memcpy", "first us", "memory", "records"]]
    for figure in figures:
        if figure.failed:
            rows.append([figure.system, figure.failed, *[""] * 4])
            continue
        rows.append(
            [
                figure.system,
                f"{figure.cpu * 1e6:.1f}",
                f"{figure.ratios(base or figure)[1]:.2f}",
                f"{figure.first_s * 1e6:.1f}",
                megabytes(figure.memory),
                f"{figure.wrong} wrong" if figure.wrong else "each once",
            ]
        )
    return columns(rows)


def options_of(argv: list[str] | None) -> argparse.Namespace:
    parser = bench_parser("record_cache", __doc__, tuple(SYSTEMS), rounds=5)
    parser.add_argument("--peer-python", default="", help="an interpreter that has TensorFlow")
    parser.add_argument("--folder", help="for records and rows; a file system of memory is a fair one")
    return checked(parser, argv, BATCH)


if __name__ == "__main__":
    raise SystemExit(main())
