"""The plans ensemble_shared and ensemble_duplicated make the same batches, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from input_plans import Counting

import commplan
from commplan.runtime.input.iterator import PhaseBatches

PLANS = Path(__file__).resolve().parents[3] / "examples" / "plans"
MEMBERS, BATCH, RECORDS = 4, 64, 100  # the last batch of the epoch is padded


def decode(record: bytes) -> np.ndarray[Any, Any]:
    return np.random.default_rng(list(record)).integers(0, 256, (224, 224, 3), np.uint8)


def augment(pixels: np.ndarray[Any, Any], rng: np.random.Generator) -> np.ndarray[Any, Any]:
    return np.roll(pixels, int(rng.integers(224)), axis=int(rng.integers(2)))


def epoch(name: str) -> tuple[list[np.ndarray[Any, Any]], int]:
    """The batches of one epoch of the plan `name`, and how often a record was read."""
    schedule = commplan.load(PLANS / f"{name}.plan").compile().schedule
    source = Counting([bytes([index, 7]) for index in range(RECORDS)])
    functions = {"decode": decode, "augment": augment}
    output = schedule.phase("step").outputs[0].value
    with PhaseBatches(schedule, "step", {"images": source}, functions) as feed:
        return [batch.values[output] for batch in feed], len(source.read)


def test_shared_and_duplicated_ensembles_get_the_same_bits() -> None:
    shared, reads = epoch("ensemble_shared")
    duplicated, all_reads = epoch("ensemble_duplicated")
    assert [batch.shape for batch in shared] == [(MEMBERS, BATCH, 224, 224, 3)] * 2
    assert all(np.array_equal(first, second) for first, second in zip(shared, duplicated, strict=True))
    assert not np.array_equal(shared[0][0], shared[0][1]), "each member augments for itself"
    assert (reads, all_reads) == (2 * BATCH, MEMBERS * 2 * BATCH), "one of them really shares"
