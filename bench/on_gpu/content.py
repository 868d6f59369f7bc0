"""Every byte of a plan's batches on the device, compared with the records: with batches ahead, staging slots
that are used again, and batches that the program keeps."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

import commplan
from bench.on_gpu.feeding import PLAN, registered_bytes
from bench.on_gpu.findings import Findings
from bench.on_gpu.rows import NumberedRows, device_sums, wrong_rows
from bench.on_gpu.scale import Scale

KEPT, EPOCHS = 6, 2


def measure(scale: Scale, findings: Findings) -> None:
    """Rows that differ from their record, at once and later; records that were missing or came twice.

    Raises AssertionError if there are any.
    """
    row, batch = scale.pick(4096, 224 * 224 * 3), scale.pick(16, 256)
    records = NumberedRows(batch * scale.pick(10, 100), row)
    expected = records.sums()
    wrong: dict[str, dict[str, int]] = {}
    for ahead in (0, 1, 2):
        begun = time.perf_counter()
        counts = _fed(records, expected, row, batch, scale.pick(2, 8), ahead)
        wrong[str(ahead)] = counts
        findings.add(
            f"device_prefetch = {ahead}: {counts['rows']} rows in {time.perf_counter() - begun:.1f} s,"
            f" {counts['wrong']} wrong, {counts['later']} wrong of those kept,"
            f" {counts['missing']} missing or twice; {counts['registered'] / 1e6:.0f} MB registered",
            content=wrong,
        )
    if any(counts["wrong"] + counts["later"] + counts["missing"] for counts in wrong.values()):
        raise AssertionError("bytes on the device are not those of the records")


def _fed(
    records: NumberedRows, expected: dict[int, int], row: int, batch: int, cores: int, ahead: int
) -> dict[str, int]:
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",), axis_types=(AxisType.Auto,))
    hint = f", device_prefetch = {ahead}" if ahead else ""
    program = commplan.loads(PLAN.format(row=row, batch=batch, cores=cores, ahead=hint)).compile(mesh)
    run = program.bind(mesh, sources={"records": records})
    rng = np.random.default_rng(ahead)
    kept: list[tuple[Any, Any]] = []  # batches with their checksums on arrival
    arrived: list[tuple[Any, Any]] = []
    missing = 0
    with run.batches() as batches:
        for _ in range(EPOCHS):
            epoch = [_seen(item["pixels"], kept, rng) for item in batches]
            visits = Counter(number for numbers, _ in epoch for number in np.asarray(numbers).tolist())
            missing += sum(visits[number] != 1 for number in expected)
            arrived += epoch
        registered = registered_bytes(run, ahead)
    later = sum(int((np.asarray(device_sums(pixels)[1]) != np.asarray(sums)).sum()) for pixels, sums in kept)
    rows = sum(len(numbers) for numbers, _ in arrived)
    return {"rows": rows, "wrong": wrong_rows(expected, arrived), "later": later, "missing": missing,
            "registered": registered}  # fmt: skip


def _seen(pixels: Any, kept: list[tuple[Any, Any]], rng: np.random.Generator) -> tuple[Any, Any]:
    """The checksums of a batch; one in five is kept for a later check, at most `KEPT` at a time."""
    numbers, sums = device_sums(pixels)
    if rng.random() < 0.2:
        kept.append((pixels, sums))
    if len(kept) > KEPT:
        kept.pop(int(rng.integers(len(kept))))
    return numbers, sums
