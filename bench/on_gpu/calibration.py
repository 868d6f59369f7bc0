"""Links and collectives between the devices of this process, as `commplan calibrate` measures them."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax

from bench.on_gpu.findings import Findings
from bench.on_gpu.scale import Scale
from commplan.cli import main as command
from commplan.cost.calibration import parse_calibration

_MARGIN_S = 20.0  # of the part's time limit, for imports and compilation


def measure(scale: Scale, findings: Findings) -> None:
    if jax.device_count() == 1:
        findings.add("one device: there is nothing to measure between")
        return
    with tempfile.TemporaryDirectory(prefix="commplan-bench-") as folder:
        path = Path(folder) / "calibration.json"
        budget = max(1, int(min(scale.seconds - _MARGIN_S, scale.pick(1, 90))))
        largest = scale.pick(2**12, 2**26)
        words = ["calibrate", "--backend", "jax", "--seconds", str(budget), "--largest", str(largest)]
        with contextlib.redirect_stdout(sys.stderr):
            code = command([*words, "-o", str(path)])
        if code:
            raise SystemExit(f"commplan calibrate ended with status {code}")
        text = path.read_text()
    calibration = parse_calibration(text)
    lines = [
        f"{x.name}: latency {x.latency * 1e6:.1f} us, {x.bandwidth / 1e9:.2f} GB/s"
        for x in calibration.levels
    ]
    best: dict[str, Any] = {}
    for curve in calibration.curve_list:
        rate = curve.sizes[-1] / curve.seconds[-1]
        if rate > best.get(curve.kind, (0.0, ""))[0]:
            best[curve.kind] = (rate, f"{curve.algorithm} on {curve.sizes[-1] / 1e6:.3g} MB")
    lines += [f"{kind}: at best {rate / 1e9:.2f} GB/s, {setting}" for kind, (rate, setting) in best.items()]
    findings.add(*lines, calibration=text)
