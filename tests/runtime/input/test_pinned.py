"""Memory registered with devices: all memory that they copy from, while it is mapped."""

from __future__ import annotations

import gc
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from support.dma import Registrar
from support.embedding import bind, mesh_of

from commplan.lowering.jax import _compat
from commplan.runtime.input.shm import slots as _slots
from commplan.runtime.input.shm.arena import Arena
from commplan.runtime.input.shm.slots import Slots
from commplan.runtime.machines.mesh_input import MeshInput
from commplan.runtime.machines.pinned import Pinning, pinning_of

NBYTES, START, COUNT = 4 * 4096, 4096, 3
PLAN = """plan p
axis data = 2
source images : u8[64]
fn half(u8[64]) -> u8[64], i32 on host
each step {
    raw       = load images batch 8 visit exactly_once seed 3 { device_prefetch = 2 }
    x, labels = map half(raw)
    output x, labels
}
"""
RECORDS = np.random.default_rng(0).integers(0, 256, (40, 64), np.uint8)


def half(record: Any) -> Any:
    return np.asarray(record) // 2, np.int32(record[0])


def test_slots_are_registered_where_they_are_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    client, exchanged = Registrar(), list[int]()
    exchange = _slots.privatize_pages

    def watched(address: int, nbytes: int) -> None:
        assert address not in client.ranges, "a device would read the pages that lay there"
        exchanged.append(address)
        exchange(address, nbytes)

    monkeypatch.setattr(_slots, "privatize_pages", watched)
    descriptor = os.open(tmp_path / "memory", os.O_RDWR | os.O_CREAT)
    os.ftruncate(descriptor, START + COUNT * NBYTES)
    slots = Slots(descriptor, START, NBYTES, COUNT, pinning=Pinning(client))
    assert sorted(client.ranges.values()) == [NBYTES] * COUNT
    array = np.frombuffer(slots.lend(0, {}), np.uint8)
    assert client.holds(array)
    slots.recall(0)
    assert len(exchanged) == 1 and not client.holds(array) and len(client.ranges) == COUNT
    assert client.holds(np.frombuffer(slots.memory(3), np.uint8))
    slots.close()
    os.close(descriptor)
    del array
    gc.collect()
    assert client.ranges == {}


def test_memory_of_a_process_is_registered_once_and_until_its_last_array_is_gone():
    client = Registrar()
    arena = Arena(Pinning(client))
    for _ in range(5):
        first, second = (arena.fresh((3, 5000), np.dtype(np.uint8)) for _ in range(2))
        assert client.holds(first) and client.holds(second)
        del first, second
    assert client.count == 2
    array = arena.fresh((8,), np.dtype(np.float32))
    array[:] = 3
    arena.close()
    del arena
    gc.collect()
    assert client.holds(array) and (array == 3).all()
    del array
    gc.collect()
    assert client.ranges == {}


@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_devices_copy_from_registered_memory_alone(workers: str, monkeypatch: pytest.MonkeyPatch):
    client, events = Registrar(), list[str]()
    pinning = Pinning(client)
    array, settle = MeshInput.array, Pinning.settle

    def put(self: MeshInput, host: Any, *arguments: Any) -> Any:
        events.append("copy")
        assert client.holds(host)
        return array(self, host, *arguments)

    def settled(self: Pinning, arrays: Any) -> None:
        events.append("settle")
        settle(self, arrays)

    run = bind(PLAN, mesh_of(data=2), sources={"images": RECORDS}, functions={"half": half})
    with run.batches() as plain:
        first = plain.state()
        expected = [{name: np.asarray(x) for name, x in item.items()} for item in plain]
    monkeypatch.setattr(MeshInput, "pinning", lambda self: pinning)
    monkeypatch.setattr(MeshInput, "array", put)
    monkeypatch.setattr(Pinning, "settle", settled)
    with run.batches(workers=workers, state=first) as batches:
        for item, right in zip(batches, expected, strict=True):
            # Two arrays of each batch, so far of this one at least, which has been waited for.
            assert events.count("settle") <= events.count("copy") // 2 and events[-1] == "settle"
            assert all(np.array_equal(item[name], right[name]) for name in right)
        assert events.count("copy") == 2 * len(expected) and events.count("settle") == len(expected)
        del item
    assert client.count <= 2 * 8 + 3  # memory is used again
    del batches
    gc.collect()
    assert client.ranges == {}


def test_what_cannot_be_registered_is_copied_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse(address: int, nbytes: int) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no more locked memory\n at line 3")

    client: Any = SimpleNamespace(dma_map=refuse, dma_unmap=refuse)
    pinning = Pinning(client)
    run = bind(PLAN, mesh_of(data=2), sources={"images": RECORDS}, functions={"half": half})
    monkeypatch.setattr(MeshInput, "pinning", lambda self: pinning)
    with caplog.at_level(logging.WARNING, "commplan.input"), run.batches() as batches:
        assert sum(item["x"].shape[0] for item in batches) == len(RECORDS)
    (message,) = caplog.messages
    assert message.endswith("RESOURCE_EXHAUSTED: no more locked memory") and pinning.nbytes == 0


def test_who_can_register_memory():
    assert pinning_of(jax.devices()) is None  # a CPU uses the memory of the host
    client = Registrar()
    pinning = pinning_of([SimpleNamespace(platform="gpu", client=client)])
    assert pinning is not None and pinning is pinning_of([SimpleNamespace(platform="gpu", client=client)])
    assert pinning_of([SimpleNamespace(platform="gpu", client=object())]) is None  # JAX 0.10.0
    assert pinning_of([]) is None
    if jax.__version_info__ >= (0, 10, 2):
        assert hasattr(jax.devices()[0].client, "dma_map")
    _compat.collect_garbage()
