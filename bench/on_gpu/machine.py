"""The devices, cores and versions of this machine."""

from __future__ import annotations

import os
import sys

import jax

import commplan
from bench.on_gpu.findings import Findings
from bench.on_gpu.scale import Scale


def measure(scale: Scale, findings: Findings) -> None:
    devices = jax.devices()
    versions = f"Python {sys.version.split()[0]}, jax {jax.__version__}, commplan {commplan.__version__}"
    kind = f"{devices[0].device_kind} ({devices[0].platform})"
    findings.add(f"{len(devices)} x {kind}, {os.cpu_count()} cores, {versions}", small=scale.small)
    if scale.small:
        findings.add("no GPU: everything runs small on CPU devices, to show that it runs; times mean nothing")
