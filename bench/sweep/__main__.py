"""Twelve programs, started by hand at random moments over a minute, share one input; three are killed, two of
them come back.

    python -m bench.sweep [--minute 60] [--members 12] [--torch 4] [--killed 3] [--returning 2] [--seed 1]
        [--systems commplan,tensorsocket,tf_service] [--torch-python PYTHON] [--peer-python PYTHON]
        [--out FILE.json]

The 512 pictures are those of `bench.ensemble_input`, decoded with Pillow. Programs are loops of NumPy and JAX
by turns, and of PyTorch (`--torch-python`, an environment without JAX will do: `make torch` makes one), which
wait `--step` seconds for each step, as for an accelerator. Each counts its records by number, epoch by epoch;
the two that come back go on with the state that they had saved. The exit code is 1 where an epoch of theirs
is not whole, something of it is left behind, or its CPU is more than 1.1 times the limit: one decode of each
record of each epoch, shared by the members that are there, one more where a member comes back to records that
are gone, and what a member does with batches that lie in memory.

TensorSocket and tf.data service play the same timetable (`--peer-python`, which has `tensorsocket`,
`tensorflow-cpu` and Pillow). They have no state to come back with.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import tempfile
from pathlib import Path

import msgspec

from bench.input import cells
from bench.input.records import Packed, pack
from bench.sweep.account import MOST_OVER, Result, result, table
from bench.sweep.program import BATCH, ENTRY
from bench.sweep.stage import SERVED, Stage, own_work
from bench.sweep.timetable import Asked, Member, timetable

PICTURES = 512
SYSTEMS = ("commplan", *SERVED)


def main(argv: list[str] | None = None) -> int:
    options = _options(argv)
    asked = Asked(options.members, options.torch, options.killed, options.returning, options.minute,
                  options.seed)  # fmt: skip
    pythons = {"torch": options.torch_python, "peer": options.peer_python}

    def python_of(kind: str) -> str:
        return pythons.get(kind, sys.executable)

    for member in timetable(asked):
        print(_line(member), flush=True)
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="commplan-sweep-") as place:
        folder, records = Path(place), Path(place) / "records.bin"
        pack(records, options.records, PICTURES)
        count = len(Packed(records))
        kinds = {member.kind for member in timetable(asked)}
        own_s = own_work(kinds, python_of, folder / "own", BATCH, options.own_batches)
        decoding = cells.Asked(1, tuple(sorted(os.sched_getaffinity(0))), "ids", 1, ())
        team = cells.team("decoding", decoding, records, folder / "decoding", sys.executable, 60.0)
        try:
            decode_s = [team.block().cpu_per_record for _ in range(2)]
            for system in options.systems:
                fields = {"step_s": options.step}
                if system in SERVED:
                    fields["port"] = _ports(4)
                stage = Stage(system, asked, records, folder / system, python_of, ENTRY.itemsize,
                              options.timeout, fields)  # fmt: skip
                played = stage.play()
                decode_s += [team.block().cpu_per_record for _ in range(2)]
                results.append(result(played, count, statistics.median(decode_s), own_s))
        finally:
            team.close()
    own = ", ".join(f"{kind} {seconds * 1e3:.4f}" for kind, seconds in own_s.items())
    print(f"\none decode {statistics.median(decode_s) * 1e3:.3f} ms CPU ({min(decode_s) * 1e3:.3f} to"
          f" {max(decode_s) * 1e3:.3f}); a member's own work, a record: {own} ms")  # fmt: skip
    print(table(results))
    if options.out:
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    return _judge(results)


def _line(member: Member) -> str:
    text = f"program {member.number:>2} ({member.kind}) at {member.starts:5.1f} s"
    if member.dies is not None:
        text += f", killed at {member.dies:.1f} s"
    return text + (f", back at {member.returns:.1f} s" if member.returns is not None else "")


def _judge(results: list[Result]) -> int:
    """1 where commplan's sweep is not what it should be."""
    ours = next((each for each in results if each.system == "commplan"), None)
    if ours is None:
        return 0
    print(
        f"commplan: {ours.decodes} decodes are the least, and {ours.again} for members that came back"
        f" (without those {ours.each_s / ours.strict_s:.2f} times the limit); {ours.sockets} sockets"
    )
    for visits in ours.visits:
        if visits.broken or visits.skipped or not visits.whole:
            print(f"  member {visits.member} was not given each record of each epoch once: {visits}")
    if ours.ratio > MOST_OVER:
        print(f"  more than {MOST_OVER} times the limit")
    return int(not ours.is_exact or ours.ratio > MOST_OVER or bool(ours.left))


def _ports(count: int) -> int:
    """The first of so many ports in a row that nobody has."""
    for _ in range(100):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            first = int(free.getsockname()[1])
        try:
            for port in range(first, first + count):
                with socket.socket() as each:
                    each.bind(("localhost", port))
        except OSError:
            continue
        return first
    raise SystemExit("there are no free ports")


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--members", type=int, default=12)
    parser.add_argument("--torch", type=int, default=4, help="of them with PyTorch")
    parser.add_argument("--killed", type=int, default=3)
    parser.add_argument("--returning", type=int, default=2, help="of those that are killed")
    parser.add_argument("--minute", type=float, default=60.0, help="seconds over which they are started")
    parser.add_argument("--step", type=float, default=0.1, help="seconds of a step, which a member waits for")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--records", type=int, default=4096, help=f"a multiple of {BATCH}")
    parser.add_argument("--systems", type=lambda text: text.split(","), default=list(SYSTEMS))
    parser.add_argument("--torch-python", default=sys.executable, help="an interpreter that has PyTorch")
    parser.add_argument("--peer-python", default=sys.executable, help="an interpreter that has the peers")
    parser.add_argument("--own-batches", type=int, default=2000, help="to measure a member's own work on")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for what should happen at once")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    options = parser.parse_args(argv)
    if options.records % BATCH or options.records < BATCH:
        parser.error(f"--records must be a multiple of {BATCH}")
    if not options.returning <= options.killed <= options.members or options.torch > options.members:
        parser.error("not more can be killed than there are, nor come back than are killed")
    if unknown := set(options.systems) - set(SYSTEMS):
        parser.error(f"there is no system {', '.join(unknown)}: {', '.join(SYSTEMS)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
