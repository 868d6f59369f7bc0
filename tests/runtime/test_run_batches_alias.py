"""Batches reach CPU devices without a copy if possible, and arrays on devices are never overwritten."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from support import alias_processes, interpreter
from support.embedding import bind, mesh_of
from support.ports import free_port

from commplan.runtime.machines.mesh_input import MeshInput

PLAN = """plan p
ensemble member = {members}
axis data = {data}
source images : u8[{size}]
fn decode (u8[{size}]) -> u8[{size}], i32 on host
fn noisy  (u8[{size}]) -> u8[{size}] on host random
each step {{
    raw          = load images batch 8 split data visit exactly_once seed 3
    same, labels = map decode(raw)
    own          = map noisy(same) per member
    output same, own, labels
}}
"""


def first(members: int, data: int, size: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, dict[str, Any]]:
    """A batch on devices, and the host's arrays behind it, by shape."""
    hosts: list[np.ndarray[Any, Any]] = []
    array = MeshInput.array

    def watched(self: MeshInput, host: Any, *arguments: Any) -> Any:
        hosts.append(host)
        return array(self, host, *arguments)

    monkeypatch.setattr(MeshInput, "array", watched)
    run = bind(
        PLAN.format(members=members, data=data, size=size),
        mesh_of(member=members, data=data),
        sources={"images": np.arange(16 * size, dtype=np.int64).astype(np.uint8).reshape(16, size)},
        functions={
            "decode": lambda x: (x, np.int32(x[0])),
            "noisy": lambda x, rng: x ^ np.uint8(rng.integers(256)),
        },
    )
    with run.batches() as batches:
        item = next(iter(batches))
    names = {2: "same", 3: "own", 1: "labels"}
    return item, {names[host.ndim]: host for host in hosts}


def pointers(x: Any) -> dict[tuple[int, ...], set[int]]:
    """Where devices have their shards, by the first row (and member) that they hold."""
    addresses: dict[tuple[int, ...], set[int]] = {}
    for shard in x.addressable_shards:
        at = tuple(index.start or 0 for index in shard.index[: x.ndim - 1])
        addresses.setdefault(at, set()).add(shard.data.unsafe_buffer_pointer())
    return addresses


@pytest.mark.parametrize(
    ("members", "data", "size"), [(1, 1, 5), (4, 1, 5), (4, 2, 16), (2, 4, 32), (3, 1, 13)]
)
def test_every_device_sees_the_memory_of_the_host(
    members: int, data: int, size: int, monkeypatch: pytest.MonkeyPatch
):
    item, hosts = first(members, data, size, monkeypatch)
    each = 8 // data
    same, per_member = pointers(item["same"]), pointers(item["own"])
    assert sorted(same) == [(shard * each,) for shard in range(data)]
    for (row,), addresses in same.items():
        assert addresses == {hosts["same"][row:].ctypes.data}
    assert len(per_member) == members * data
    for (member, row), addresses in per_member.items():
        assert addresses == {hosts["own"][member, row:].ctypes.data}


def test_what_does_not_start_aligned_is_copied_once_for_all_devices(monkeypatch: pytest.MonkeyPatch):
    item, hosts = first(4, 2, 5, monkeypatch)
    same = pointers(item["same"])
    assert same[0,] == {hosts["same"].ctypes.data}
    assert len(same[4,]) == 1  # four members, one copy
    assert same[4,] != {hosts["same"][4:].ctypes.data}
    np.testing.assert_array_equal(item["same"], hosts["same"])
    np.testing.assert_array_equal(item["own"], hosts["own"])


def test_a_batch_that_is_donated_or_held_keeps_its_content(monkeypatch: pytest.MonkeyPatch):
    item, hosts = first(2, 1, 64, monkeypatch)
    before = hosts["same"].copy()
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    result = step(item["same"])
    np.testing.assert_array_equal(result, before + 1)
    np.testing.assert_array_equal(hosts["same"], before)


def test_slots_that_devices_see_are_not_overwritten_by_other_processes(tmp_path: Path):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    command = [*interpreter.words(environment), alias_processes.__file__, str(free_port())]
    started = [
        subprocess.Popen(
            [*command, str(i), "2", tmp_path], env=environment, stderr=subprocess.PIPE, text=True
        )
        for i in range(2)
    ]
    errors = [process.communicate(timeout=240)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(errors)
    for i in range(2):
        report = json.loads((tmp_path / f"{i}.json").read_text())
        assert report["batches"] == 3 * alias_processes.RECORDS // alias_processes.BATCH
        assert report["shared"] > report["batches"] // 2, report  # the memory that all processes map
        assert report["torn"] == []
