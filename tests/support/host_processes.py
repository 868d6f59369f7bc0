"""Processes of jax.distributed on hosts that share: python host_processes.py PORT INDEX COUNT HOSTS WHAT OUT.

HOSTS gives the name of each process's host, such as `a,a,b,b`.
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src import xla_bridge
from jax._src.lib import _jax, xla_client  # pyright: ignore[reportPrivateImportUsage]
from jax.sharding import AxisType
from support.dma import Registrar

import commplan
from commplan.diagnostics import CommplanError
from commplan.runtime.input.device.batches import shared_group
from commplan.runtime.machines.mesh_input import MeshInput
from commplan.runtime.machines.pinned import Pinning

PLAN = """plan hosts
ensemble member = {members}
source images : u8[6]
fn decode(u8[6]) -> u8[2, 3], i32 on host
fn noisy (u8[2, 3]) -> u8[2, 3] on host random
fn scale (u8[2, 3]) -> f32[2, 3] on device
each step {{
    raw, n         = load images batch 8 visit exactly_once seed 3 tail short {ahead}
    x, labels      = map decode(raw)
    x              = share x over member via {design}
    labels         = share labels over member via {design}
    batch          = map noisy(x) per member
    scaled         = map scale(x)
    output batch, labels, x, scaled, n
}}
"""
RECORDS = np.arange(21 * 6, dtype=np.uint8).reshape(21, 6)
KEPT: list[Any] = []
DESIGNS = ("duplicate", "all_shared", "single_broadcast(readers = 2)", "multi_broadcast(readers = 3)")


def noisy(x: Any, rng: Any) -> Any:
    return x + rng.integers(0, 9, x.shape, np.uint8)


def bound(design: str, members: int, mesh: Any, bad: int | None = None) -> tuple[Any, list[int]]:
    """A run whose decode fails on the record that begins with `bad`; and the list of decoded records."""
    decoded: list[int] = []

    def decode(record: Any) -> Any:
        if record[0] == bad:
            raise ValueError("truncated")
        decoded.append(int(record[0]))
        return np.asarray(record).reshape(2, 3), np.int32(record[0])

    ahead = "{ device_prefetch = 2 }" if design.startswith("multi") else ""
    text = PLAN.format(design=design, members=members, ahead=ahead)
    program = commplan.loads(text).compile(mesh)
    functions = {"decode": decode, "noisy": noisy, "scale": lambda x: x.astype(np.float32) / 255}
    return program.bind(mesh, sources={"images": RECORDS}, functions=functions), decoded


def seen(run: Any, epochs: int, **options: Any) -> list[dict[str, tuple[tuple[int, ...], int]]]:
    """Shape and checksum of every value of every batch on this process's first device."""
    items: list[dict[str, tuple[tuple[int, ...], int]]] = []
    with run.batches(**options) as batches:
        for _ in range(epochs):
            for item in batches:
                parts = {name: np.asarray(x.addressable_shards[0].data) for name, x in item.items()}
                items.append({name: (x.shape, zlib.crc32(x.tobytes())) for name, x in parts.items()})
    return items


def everything(index: int, count: int, hosts: list[str], mesh: Any) -> dict[str, Any]:
    report: dict[str, Any] = {}
    for design in DESIGNS if count > 2 else DESIGNS[:2]:
        run, decoded = bound(design, count, mesh)
        phase = run.program.schedule.phase("step")
        among = shared_group(run.context, phase, run.context.machine.input.local(), host=hosts[index])
        options = {} if among is None else {"group": among}
        items = seen(run, 2, **options)
        carrier = None if among is None else among.carrier
        report[design] = {
            "items": items,
            "decoded": decoded,
            "launched": getattr(carrier, "launched", 0),
            "hosts": None if among is None else among.hosts,
        }
    return report


def failing(index: int, count: int, hosts: list[str], mesh: Any) -> dict[str, Any]:
    """A record that only one process decodes is bad."""
    run, _ = bound("all_shared", count, mesh, bad=int(RECORDS[13, 0]))
    phase = run.program.schedule.phase("step")
    among = shared_group(run.context, phase, run.context.machine.input.local(), host=hosts[index])
    try:
        items = seen(run, 1, group=among)
    except CommplanError as error:
        diagnostic = error.diagnostics[0]
        return {
            "code": diagnostic.code,
            "notes": [note.text for note in diagnostic.notes],
            "message": diagnostic.message,
        }
    return {"items": len(items)}


def without_cpu(port: str, index: int, count: int) -> None:
    """Use the platform of JAX_PLATFORMS: CPU devices under another name, so that JAX has no CPU, as with
    JAX_PLATFORMS=cuda. The processes use a separate service: its keys would confuse two CPUs."""
    address = f"localhost:{port}"
    if index == 0:
        KEPT.append(_jax.get_distributed_runtime_service(address, count))
    client = _jax.get_distributed_runtime_client(address, index)
    client.connect()
    KEPT.append(client)

    def devices() -> Any:
        gloo = _jax.make_gloo_tcp_collectives(distributed_client=client)
        return xla_client.make_cpu_client(
            distributed_client=client, node_id=index, num_nodes=count, collectives=gloo, num_devices=1
        )

    pinning = Pinning(Registrar())  # as a GPU has it
    MeshInput.pinning = lambda self: pinning
    name = os.environ["JAX_PLATFORMS"]
    xla_bridge.register_backend_factory(name, devices, priority=500, fail_quietly=False)
    try:
        jax.devices("cpu")
    except RuntimeError:
        return
    raise AssertionError("there is a CPU all the same")


def main(port: str, index: str, count: str, hosts: str, case: str, out: str) -> None:
    jax.distributed.initialize(f"localhost:{port}", int(count), int(index))
    if os.environ["JAX_PLATFORMS"] != "cpu":
        without_cpu(os.environ["SECOND_PORT"], int(index), int(count))
    mesh = jax.make_mesh((int(count),), ("member",), (AxisType.Auto,))
    does = {"everything": everything, "failing": failing}[case]
    report = does(int(index), int(count), hosts.split(","), mesh)
    (Path(out) / f"{index}.json").write_text(json.dumps(report))
    for meeting in reversed(KEPT):  # the client before the service
        meeting.shutdown()
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
