"""Faults of ranks on three hosts of the emulated cluster (`bench.netlab`), with links of 200 Mbit/s.

The culprit's link goes down, or becomes ten times slower (`slow`), in a random step; or the rank is stopped,
killed (under a fault-tolerant MPI) or asleep, which is reported over the network. A rank behind a dead link
`does not answer`, and the messages name its host. Its own messages are not received, and do not count; its
process must end, too. A slow link still moves data within the bound, and the run must end without naming
anyone. Only root can build the cluster.
"""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.faults import mpi
from bench.faults.campaign import Fault, Outcome, Place, blamed, observed
from bench.harness.mpirun import ULFM, environment
from bench.netlab import Lab, Shape, shell
from bench.netlab.lab import BUCKET

KINDS = ("down", "slow", "stop", "kill", "sleep")
BOUND_S, RATE, SLOW = 2.0, "200mbit", "20mbit"
_labs = itertools.count()


def draw(drawn: random.Random, kind: str) -> Fault:
    elements = drawn.choice((100, 100_000, 1_000_000))
    via = drawn.choice(("", mpi.RING))
    return Fault(
        "cluster", kind, drawn.randrange(mpi.RANKS), drawn.randrange(4, mpi.STEPS - 2), elements, via
    )


def judged(fault: Fault) -> Outcome:
    """Run a job on a separate lab, and judge its output."""
    with (
        Lab(Shape(mpi.RANKS, 1, RATE), f"f{os.getpid() % 10_000}n{next(_labs)}") as lab,
        tempfile.TemporaryDirectory() as records,
        tempfile.TemporaryFile("w+") as output,
    ):
        options = ULFM if fault.kind == "kill" else ()
        words = lab.mpirun([sys.executable, "-m", mpi.__name__, *fault.words], options=options)
        env = dict(environment()) | {"COMMPLAN_RECORDS": records}
        job = subprocess.Popen(words, env=env, stdout=output, stderr=output, start_new_session=True)
        awaited = [n for n in range(mpi.RANKS) if fault.kind not in ("stop", "sleep") or n != fault.culprit]
        begun = [False]

        def over(_: str) -> bool:
            living = any(_ranks(lab, number) for number in awaited)
            begun[0] |= living
            return not living and (begun[0] or job.poll() is not None)

        seen = observed([job], output, over, lambda: _changed(lab, fault))
    return Outcome(fault, seen.seconds, seen.ended, seen.ended and right(fault, seen.text), seen.text)


def _changed(lab: Lab, fault: Fault) -> None:
    """Apply a fault to a link, at both of its ends."""
    host, port = lab.ranks[fault.culprit].name, f"h{fault.culprit + 1}"
    if fault.kind == "down":
        shell.run("ip", "-n", lab.switch, "link", "set", port, "down")
    if fault.kind == "slow":
        for namespace, end in ((host, "eth0"), (lab.switch, port)):
            words = ("qdisc", "replace", "dev", end, "root", "tbf", "rate", SLOW, *BUCKET)
            shell.run("tc", "-n", namespace, *words)


def _ranks(lab: Lab, number: int) -> list[int]:
    """The rank's processes on its host."""
    listed = shell.run("ip", "netns", "pids", lab.ranks[number].name, check=False).split()
    return [int(pid) for pid in listed if mpi.__name__ in _command(pid) and "orted" not in _command(pid)]


def _command(pid: str) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return b" ".join(words[:3]).decode(errors="replace")


def right(fault: Fault, text: str) -> bool:
    """Whether the culprit and the waiting line are named, and nothing else; for `slow`, no process."""
    if fault.kind == "slow":
        return "CP0834" not in text and text.count("has made all steps") == mpi.RANKS
    return blamed(text) == {fault.culprit} and f"line {mpi.LINES['step']} of" in text


PLACE = Place(KINDS, BOUND_S, draw, judged)
