"""The emulated cluster from the command line.

python -m bench.netlab up --hosts 4 [--racks 2] [--rate 200mbit] [--uplink 200mbit] [--interleave]
python -m bench.netlab status                       # existing labs, and their traffic so far
python -m bench.netlab line-rate                    # of one TCP stream in each direction
python -m bench.netlab run -n 4 -- python x.py      # under Open MPI, one rank on each host
python -m bench.netlab launch -- python x.py        # without MPI: RANK, WORLD_SIZE, MASTER_ADDR, JAX_...
python -m bench.netlab exec 2 -- ip addr            # on the host of rank 2
python -m bench.netlab down
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence

from bench.harness.arguments import program_parser
from bench.netlab import state
from bench.netlab.lab import Lab, Shape, down
from bench.netlab.rate import line_rate
from bench.netlab.traffic import counters
from commplan.diagnostics import CommplanError


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    cut = words.index("--") if "--" in words else len(words)
    options = _parser().parse_args(words[:cut])
    try:
        return options.verb(options, words[cut + 1 :])
    except CommplanError as error:
        print(error, file=sys.stderr)
        return 1


def _up(options: argparse.Namespace, _: list[str]) -> int:
    shape = Shape(options.hosts, options.racks, options.rate, options.uplink, options.interleave)
    lab = Lab(shape, options.name)
    lab.up()
    _describe(lab)
    return 0


def _down(options: argparse.Namespace, _: list[str]) -> int:
    was_there = down(options.name)
    print(f"lab {options.name}: {'cleared away' if was_there else 'nothing was there'}")
    return 0


def _status(_: argparse.Namespace, __: list[str]) -> int:
    for name in state.names():
        saved = state.load(name)
        if saved and saved.left_behind:
            print(f"lab {name}: left behind by a process that is gone; `up` and `down` clear it away")
            continue
        lab = Lab.standing(name)
        _describe(lab)
        now = counters(lab)
        for host, sent, received in zip(lab.hosts, now.sent, now.received, strict=True):
            print(f"  {host.name}: {sent} bytes sent, {received} received")
        for number, crossed in enumerate(now.uplinks, 1):
            print(f"  uplink {number}: {crossed} bytes in both directions")
    if not state.names():
        print("no lab stands")
    return 0


def _line_rate(options: argparse.Namespace, _: list[str]) -> int:
    lab = Lab.standing(options.name)
    pairs = {"neighbors": (0, 1)}
    if lab.shape.racks > 1:
        racks = [host.rack for host in lab.ranks]
        pairs = {
            "same rack": (0, racks.index(racks[0], 1)),
            "across": (0, next(rank for rank, rack in enumerate(racks) if rack != racks[0])),
        }
    for label, (a, b) in pairs.items():
        forth, back = line_rate(lab, a, b, seconds=options.seconds)
        rates = f"{forth * 8 / 1e6:.1f} Mbit/s there, {back * 8 / 1e6:.1f} Mbit/s back"
        print(f"{label}, ranks {a} and {b}: {rates}")
    return 0


def _run(options: argparse.Namespace, command: list[str]) -> int:
    lab = Lab.standing(options.name)
    return subprocess.run(lab.mpirun(command, ranks=options.ranks), check=False).returncode


def _launch(options: argparse.Namespace, command: list[str]) -> int:
    lab = Lab.standing(options.name)
    processes = [lab.spawn(rank, command) for rank in range(len(lab.ranks))]
    codes = [process.wait() for process in processes]
    return next((code for code in codes if code), 0)


def _exec(options: argparse.Namespace, command: list[str]) -> int:
    lab = Lab.standing(options.name)
    if not 0 <= options.rank < len(lab.ranks):
        print(f"lab {lab.name} has ranks 0 to {len(lab.ranks) - 1}", file=sys.stderr)
        return 2
    words = lab.command(options.rank, command or ["bash"])
    return os.execvp(words[0], words)


def _describe(lab: Lab) -> None:
    shape = lab.shape
    racks = f", {shape.racks} racks with uplinks of {shape.uplink or shape.rate}" if shape.racks > 1 else ""
    order = " (ranks go round the racks)" if shape.interleave else ""
    print(
        f"lab {lab.name}: {shape.ranks} hosts at {shape.rate}{racks}{order}, TCP {lab.congestion_control()};"
        f" ranks on {' '.join(host.name for host in lab.ranks)}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = program_parser("netlab", __doc__)
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    named = argparse.ArgumentParser(add_help=False)
    named.add_argument("--name", default="lab", help="of the lab (lab)")

    up = verbs.add_parser("up", parents=[named], help="build a lab that stands until `down`")
    up.add_argument("--hosts", type=int, default=4, help="hosts in each rack (4)")
    up.add_argument("--racks", type=int, default=1, help="racks (1)")
    up.add_argument("--rate", default="200mbit", help="of a host's link, per direction (200mbit)")
    up.add_argument("--uplink", default="", help="of a rack's uplink, per direction (as a host's link)")
    up.add_argument("--interleave", action="store_true", help="ranks go round the racks")
    up.set_defaults(verb=_up)
    verbs.add_parser("down", parents=[named], help="clear it away; safe to repeat").set_defaults(verb=_down)
    verbs.add_parser("status", help="what stands, and the bytes that crossed").set_defaults(verb=_status)
    rate = verbs.add_parser("line-rate", parents=[named], help="what a plain TCP stream gets")
    rate.add_argument("--seconds", type=float, default=3.0, help="how long it runs (3)")
    rate.set_defaults(verb=_line_rate)
    run = verbs.add_parser("run", parents=[named], help="-- COMMAND under Open MPI, one rank on each host")
    run.add_argument("-n", dest="ranks", type=int, default=None, help="ranks (all hosts)")
    run.set_defaults(verb=_run)
    launch = verbs.add_parser("launch", parents=[named], help="-- COMMAND on every host, without MPI")
    launch.set_defaults(verb=_launch)
    execute = verbs.add_parser("exec", parents=[named], help="RANK -- COMMAND on the host of one rank")
    execute.add_argument("rank", type=int)
    execute.set_defaults(verb=_exec)
    return parser


if __name__ == "__main__":
    sys.exit(main())
