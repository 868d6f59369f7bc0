"""Sharing changes the costs, not the values: `ensemble_shared.plan` and `ensemble_duplicated.plan`."""

from __future__ import annotations

import json
import os
import subprocess
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import interpreter, same_bits_process
from support.embedding import mesh_of
from support.same_bits_process import FUNCTIONS, MEMBERS, PLANS, RECORDS, compiled, records

import commplan
from commplan.runtime.input import PhaseBatches


def trained(name: str, passes: str | None, epochs: int = 2) -> tuple[list[int], Any]:
    """A checksum of every batch, and the weights after a few steps of all members."""
    mesh = mesh_of(member=MEMBERS)
    run = (
        commplan.load(PLANS / f"{name}.plan")
        .compile(mesh, passes=passes)
        .bind(mesh, sources={"images": records()}, functions=FUNCTIONS)
    )

    @jax.jit
    def step(weights: Any, batch: Any) -> Any:
        def loss(params: Any, pixels: Any) -> Any:
            normal = pixels.astype(jnp.float32) / 127.5 - 1
            pooled = normal.reshape(len(pixels), 14, 16, 14, 16, 3).mean((2, 4)).reshape(len(pixels), -1)
            return jnp.mean((pooled @ params - 1.0) ** 2)

        return weights - 0.05 * jax.vmap(jax.grad(loss))(weights, batch)

    weights = jnp.zeros((MEMBERS, 14 * 14 * 3, 4))
    sums: list[int] = []
    with run.batches() as batches:
        for _ in range(epochs):
            for item in batches:
                sums.append(zlib.crc32(np.asarray(item["batch"])))
                weights = step(weights, item["batch"])
    return sums, np.asarray(weights)


def test_training_is_the_same_to_the_last_bit():
    sums, weights = trained("ensemble_duplicated", None)
    assert len(set(sums)) == 6 and np.abs(weights).max() > 0
    assert (
        len({zlib.crc32(member_weights) for member_weights in weights}) == MEMBERS
    )  # each member augments for itself
    for passes in (None, "share{design=all_shared}", "share{design=duplicate}"):
        expected, trained_too = trained("ensemble_shared", passes)
        assert expected == sums
        np.testing.assert_array_equal(trained_too, weights)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Checksums of each member's batches without sharing: batch by batch, member by member."""
    schedule = compiled("ensemble_duplicated", "")
    with PhaseBatches(schedule, "step", {"images": records()}, FUNCTIONS) as batches:
        return [
            [zlib.crc32(np.ascontiguousarray(array[m])) for array in batch.values.values()]
            for batch in batches
            for m in range(MEMBERS)
        ]


@pytest.mark.parametrize(
    "design", ["all_shared", "single_broadcast(readers=2)", "multi_broadcast(readers=3)"]
)
def test_members_in_processes_of_their_own_get_the_same_bits(design: str, expected: list[list[int]]):
    run_id = f"bits-{os.getpid()}-{zlib.crc32(design.encode())}"
    command = [*interpreter.words(jax=False), same_bits_process.__file__, design, run_id]
    started = [
        subprocess.Popen([*command, str(place)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for place in range(MEMBERS)
    ]
    reports: list[Any] = []
    for process in started:
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        reports.append(json.loads(out))
    assert [
        sums for step in zip(*(process["sums"] for process in reports), strict=True) for sums in step
    ] == expected
    assert all(0 <= process["slots"][1] <= process["slots"][0] >= 2 for process in reports)
    decoded = [process["decoded"] for process in reports]
    assert sum(decoded) == RECORDS + 32  # each record once, and the padding
    assert (
        sum(count > 0 for count in decoded) == {"all": 4, "single": 2, "multi": 3}[design.partition("_")[0]]
    )
