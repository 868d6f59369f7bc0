"""CPU, wall time and memory of an ensemble's input: shared, duplicated, by other systems, and the limit.

    python -m bench.ensemble_input [--members 1,2,4,8,12] [--cores 1,2] [--consumers ids,step] [--records 512]
        [--rounds 5] [--systems all_shared,plain] [--peer-python PYTHON] [--out FILE.json] [--quick]

Members are separate processes on one host, and read the same seeded JPEGs (500 x 375 at quality 90, decoded
with Pillow, cut and resized to 224 x 224 u8). All systems of one cell (members, cores, consumer) are started,
warmed by one epoch and then measured epoch by epoch in turns. CPU is user and system time of all processes of
a system, servers included, divided by the records of its members. Every member compares the numbers of its
records.

The limit is measured in the same turns: one decode divided by the number of members, and the consumer alone
on batches in memory. The table also shows the limit if as many processes as members decode at once, and
compete for cores and caches. `bench.input` has the processes.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import sys
import tempfile
from pathlib import Path

from bench.harness.arguments import names, program_parser
from bench.harness.figures import write
from bench.input import cells, show
from bench.input.consumers import KINDS
from bench.input.members import BATCH
from bench.input.records import pack


def main(argv: list[str] | None = None) -> None:
    options = _options(argv)
    print(
        f"{options.records} records, batches of {BATCH}, {options.rounds} rounds; writing the JPEGs",
        flush=True,
    )
    rows: list[cells.Cell] = []
    with tempfile.TemporaryDirectory(prefix="commplan-bench-") as folder:
        records = Path(folder) / "records.bin"
        pack(records, options.records)
        for consumer in options.consumers:
            for cores in options.cores:
                for members in options.members:
                    asked = cells.Asked(
                        members, tuple(range(cores)), consumer, options.rounds, options.systems
                    )
                    rows.append(
                        cells.measure(asked, records, Path(folder), options.peer_python, options.timeout)
                    )
                    print(show.cell(rows[-1]), flush=True)
    results = show.Results(_surroundings(), options.records, BATCH, rows)
    print(show.verdict(results))
    if options.out:
        write(options.out, results)


def _surroundings() -> dict[str, str]:
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "load": f"{os.getloadavg()[0]:.2f}",
        "python": platform.python_version(),
    }


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = program_parser("ensemble_input", __doc__)
    parser.add_argument("--members", type=_numbers, default=[1, 2, 4, 8, 12])
    parser.add_argument("--cores", type=_numbers, default=[1, 2])
    parser.add_argument("--consumers", type=names(KINDS), default=KINDS)
    parser.add_argument("--records", type=int, default=512, help=f"a multiple of {BATCH}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--systems", type=names(cells.SYSTEMS), default=cells.SYSTEMS)
    parser.add_argument("--peer-python", default=sys.executable, help="an interpreter that has Grain")
    parser.add_argument(
        "--timeout", type=float, default=120.0, help="seconds until a silent system is given up"
    )
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="every round")
    parser.add_argument("--quick", action="store_true", help="members 1 and 4, two rounds of 128 records")
    options = parser.parse_args(argv)
    if options.quick:
        options.members, options.rounds, options.records = [1, 4], 2, 128
    if options.records % BATCH:
        parser.error(f"--records must be a multiple of {BATCH}: every batch has one shape")
    available = len(os.sched_getaffinity(0))
    options.cores = [cores for cores in options.cores if cores <= available] or [available]
    return options


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


if __name__ == "__main__":
    main()
