"""Members of an ensemble as processes on one device: input that is shared, against each for itself.

The cells of `bench.ensemble_input`, where JPEGs are decoded on the host, with members that put their batches
on the device and run a jitted step there.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.input import cells
from bench.input.records import pack
from bench.on_gpu.timing import Scale

SYSTEMS = ("all_shared", "plain", "tensorsocket")


Report = Callable[[dict[str, Any]], None]


def measure(scale: Scale, report: Report) -> dict[str, Any]:
    """Records a second for each member, and CPU seconds a record and member, of all processes together."""
    return of_members(scale, (1, 2) if scale.small else (8, 1, 2, 4), report)


def of_members(scale: Scale, counts: tuple[int, ...], report: Report) -> dict[str, Any]:
    """report: is given what has been found so far, after each number of members."""
    environment = {"TF_CPP_MIN_LOG_LEVEL": "2", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if scale.small:
        environment |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    cores = tuple(sorted(os.sched_getaffinity(0)))
    rows: dict[str, Any] = {}
    lines: list[str] = []
    with tempfile.TemporaryDirectory(prefix="commplan-bench-") as folder:
        records = Path(folder) / "records.bin"
        pack(records, scale.pick(128, 1024))
        for members in counts:
            asked = cells.Asked(
                members, cores, "step", scale.pick(1, 3), SYSTEMS, environment, ("tensorsocket",)
            )
            cell = cells.measure(asked, records, Path(folder), sys.executable, 120.0)
            for figure in cell.figures:
                rows[f"{figure.system} {members}"] = {"rate": figure.rate, "cpu_s": figure.cpu_s}
                text = figure.failed or "no figure"
                if figure.cpu_s:
                    text = f"{figure.wall:8.0f} records/s a member, {figure.cpu * 1e3:7.3f} ms CPU a record"
                    text += f", {figure.missing} missing, {figure.again} twice"
                lines.append(f"{members} member(s), {figure.system:12} {text}")
            report({"lines": lines, "cells": rows, "cores": len(cores)})
    return {"lines": lines, "cells": rows, "cores": len(cores)}
