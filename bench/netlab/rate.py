"""The line rate: the throughput of one plain TCP stream, while another runs in the other direction."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bench.netlab.lab import Lab
from commplan.diagnostics import fail

PORT = 29_400


def line_rate(lab: Lab, a: int = 0, b: int = 1, *, seconds: float = 3.0) -> tuple[float, float]:
    """Bytes a second from the host of rank `a` to that of rank `b`, and back, both at once.

    What arrives in the last three quarters of `seconds` counts: the first quarter is the stream's start.
    """
    script = str(Path(__file__).with_name("stream.py"))
    runs: list[subprocess.Popen[str]] = []
    receivers: list[subprocess.Popen[str]] = []
    for receiver, sender in ((b, a), (a, b)):
        address = lab.ranks[receiver].address
        for role, rank in (("receive", receiver), ("send", sender)):
            words = lab.command(rank, [sys.executable, script, role, address, str(PORT), str(seconds)])
            process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            runs.append(process)
            if role == "receive":
                receivers.append(process)
    outputs = {process: process.communicate(timeout=seconds + 30) for process in runs}
    for process in runs:
        if process.returncode:
            fail(
                "CP1124",
                f"the stream that measures the line rate failed: {outputs[process][1].strip()[-500:]}",
            )
    forth, back = (float(outputs[process][0]) for process in receivers)
    return forth, back
