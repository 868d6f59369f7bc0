"""Members of an ensemble as processes on one device: with shared input, and with one input each.

The cells of `bench.ensemble_input`, with JPEGs decoded on the host, and members that put their batches on the
device and run a jitted step there.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.input import cells
from bench.input.records import pack
from bench.on_gpu.findings import Findings, missing
from bench.on_gpu.scale import Scale

SYSTEMS = ("all_shared", "plain")
PICTURES = {"PIL": "Pillow", "sklearn": "scikit-learn", "skimage": "scikit-image"}


def measure(scale: Scale, findings: Findings) -> None:
    """Records a second for each member, and CPU seconds a record and member, of all processes together."""
    if absent := missing(*PICTURES):
        packages = ", ".join(PICTURES[name] for name in absent)
        findings.add(f"not measured: the records are photographs, which need {packages}")
        return
    of_members(scale, (1, 2) if scale.small else (8, 1, 2, 4), findings)


def of_members(scale: Scale, counts: tuple[int, ...], findings: Findings) -> None:
    """Measure with as many members as each of `counts` says; findings are added after each."""
    environment = {"TF_CPP_MIN_LOG_LEVEL": "2", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if scale.small:
        environment |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    cores = tuple(sorted(os.sched_getaffinity(0)))
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="commplan-bench-") as folder:
        records = Path(folder) / "records.bin"
        pack(records, scale.pick(128, 1024))
        for members in counts:
            asked = cells.Asked(members, cores, "step", scale.pick(1, 3), SYSTEMS, environment)
            cell = cells.measure(asked, records, Path(folder), sys.executable, 120.0)
            for figure in cell.figures:
                rows[f"{figure.system} {members}"] = {"rate": figure.rate, "cpu_s": figure.cpu_s}
                text = figure.failed or "no figure"
                if figure.cpu_s:
                    text = f"{figure.wall:8.0f} records/s a member, {figure.cpu * 1e3:7.3f} ms CPU a record"
                    text += f", {figure.missing} missing, {figure.again} twice"
                findings.add(f"{members} member(s), {figure.system:12} {text}", cells=rows, cores=len(cores))
