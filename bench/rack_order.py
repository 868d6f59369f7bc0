"""An all-reduce on two racks whose ranks are dealt out in turn: what the order of hosts is worth.

    sudo python -m bench.rack_order [--nbytes 4MiB] [--uplink 100mbit] [--rounds 6]

commplan is compiled with the lab's topology in four forms: hosts listed in the order of ranks, hosts not
listed, hosts listed rack by rack, and the file that `commplan calibrate --discover` writes there. Open MPI is
measured beside them in turns; every result is compared.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from msgspec.structs import replace

from bench.collectives import size
from bench.harness.figures import table, time_text
from bench.harness.group import Group
from bench.harness.stage import ENVIRONMENT, UNDER_MPI, run_ranks, topology
from bench.harness.work import Work
from bench.netlab import Lab, Shape, line_rate
from commplan.diagnostics import CommplanError
from commplan.topology import parse_topology, topology_text


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    shape = Shape(options.hosts, 2, options.rate, options.uplink, interleave=True)
    try:
        with ExitStack() as stack:
            lab = stack.enter_context(Lab(shape, options.name))
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="commplan-bench-")))
            rows = measure(lab, folder, Work("all_reduce", (options.nbytes // 4,)), options.rounds)
    except CommplanError as error:
        print(error, file=sys.stderr)
        return 1
    print(table([["", "time", "chosen"], *rows]))
    return 0


def measure(lab: Lab, folder: Path, work: Work, rounds: int) -> list[list[str]]:
    """A row for each topology and for Open MPI."""
    files = topologies(lab, folder)
    labels = {f"commplan, hosts {order}": ("commplan", path) for order, path in files.items()}
    labels["Open MPI"] = ("openmpi", Path())
    times: dict[str, list[float]] = {label: [] for label in labels}
    notes: dict[str, str] = {}
    with ExitStack() as stack:
        groups: dict[str, Group] = {}
        for label, (system, path) in labels.items():
            env = {**ENVIRONMENT, "COMMPLAN_BENCH_TOPOLOGY": str(path)}
            group = Group(lab, f"bench.systems.{system}", mpi=UNDER_MPI[system], env=env)
            groups[label] = stack.enter_context(group)
        for group in groups.values():
            group.wait()
        for turn in range(rounds):
            for label, group in groups.items():
                block = group.measure(work, 1, 0 if turn else 1)
                assert not isinstance(block, str), block
                times[label] += block.seconds
                notes[label] = block.note
    return [[label, time_text(statistics.median(times[label])), notes[label]] for label in labels]


def topologies(lab: Lab, folder: Path) -> dict[str, Path]:
    """Files of the lab's topology by the order of its hosts."""
    racks = [host.rack for host in lab.ranks]
    rates = {
        "host": statistics.fmean(line_rate(lab, 0, racks.index(racks[0], 1))),
        "uplink": statistics.fmean(line_rate(lab, 0, racks.index(1))),
    }
    known = parse_topology(topology(lab, rates))
    by_rank = replace(known, hosts=tuple(host.name for host in lab.ranks))
    texts = {"in rank order": by_rank, "not listed": replace(known, hosts=()), "by rack": known}
    files = {order: folder / f"{number}.toml" for number, order in enumerate((*texts, "as discovered"))}
    for order, machine in texts.items():
        files[order].write_text(topology_text(machine), encoding="utf-8")
    discovered = files["as discovered"]
    run_ranks(
        lab,
        "`commplan calibrate --discover`",
        "-m",
        "commplan",
        "calibrate",
        "--discover",
        "-o",
        str(discovered),
    )
    print(discovered.read_text(encoding="utf-8"), flush=True)
    return files


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.rack_order", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--nbytes", type=size, default=4 << 20, help="of the buffer (4MiB)")
    parser.add_argument("--hosts", type=int, default=2, help="hosts in each rack (2)")
    parser.add_argument("--rate", default="200mbit", help="of a host's link (200mbit)")
    parser.add_argument("--uplink", default="100mbit", help="of a rack's uplink (100mbit)")
    parser.add_argument("--rounds", type=int, default=6, help="repetitions of each (6)")
    parser.add_argument("--name", default="order", help="of the lab (order)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
