"""Without a topology the levels of a mesh are derived from its devices, and said."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import commplan
from commplan.explain.report import explain_plan
from commplan.lowering.jax.device_topology import name_devices, topology_of_mesh
from commplan.topology import Level, Topology

PLAN = """plan {name}
axis data = ?
input grads : f32[1024] partial data
each step {{
    grads = reduce grads over data by mean
    output grads
}}
"""
H100 = "NVIDIA H100 80GB HBM3"


def mesh_of(device: Callable[[int], dict[str, Any]], process: int = 0, **axes: int) -> Any:
    """A mesh of devices with these fields, as a process sees it."""
    grid = np.empty(math.prod(axes.values()), object)
    client = SimpleNamespace(process_index=lambda: process)
    for index in range(grid.size):
        grid[index] = SimpleNamespace(client=client, **device(index))
    return SimpleNamespace(shape=axes, axis_names=tuple(axes), devices=grid.reshape(tuple(axes.values())))


def gpus(per_host: int, kind: str = H100) -> Callable[[int], dict[str, Any]]:
    """One process for each GPU, a domain of NVLink for each host."""
    return lambda index: {
        "platform": "gpu", "device_kind": kind, "process_index": index, "slice_index": index // per_host,
    }  # fmt: skip


def cpus(per_process: int) -> Callable[[int], dict[str, Any]]:
    return lambda index: {
        "platform": "cpu", "device_kind": "cpu", "process_index": index // per_process
    }  # fmt: skip


def derived(mesh: Any, *axes: str) -> Topology:
    derived_topology = topology_of_mesh(mesh, axes)
    assert derived_topology is not None
    return derived_topology.topology


def test_gpus_lie_on_nodes_by_their_domain_of_nvlink() -> None:
    topology = derived(mesh_of(gpus(8), data=32), "data")
    assert topology.name == "h100_4x8"
    assert topology.levels == (Level("gpu", 8, 3e-6, 450e9), Level("node", 4, 6e-6, 400e9))
    assert [level.name for level in derived(mesh_of(gpus(8), data=8), "data").levels] == ["gpu"]
    assert [level.name for level in derived(mesh_of(gpus(1), data=8), "data").levels] == ["node"]


def test_more_gpus_than_a_domain_holds_are_grouped_by_process() -> None:
    """The domain is the same for all if it is not specified."""
    mesh = mesh_of(lambda index: {**gpus(8)(index), "slice_index": 0, "process_index": index // 8}, data=16)
    assert derived(mesh, "data").name == "h100_2x8"
    mesh = mesh_of(lambda index: {**gpus(8)(index), "slice_index": 0}, data=4)
    assert derived(mesh, "data").name == "h100_1x4", "processes of one machine"


def test_devices_that_need_not_be_there_are_those_of_their_target() -> None:
    mesh = mesh_of(gpus(8, ""), data=16)
    assert topology_of_mesh(mesh, ("data",)) is None
    name_devices(list(mesh.devices.flat), "h200")
    assert derived(mesh, "data").name == "h200_2x8"


def test_processes_with_cpus_are_hosts() -> None:
    topology = derived(mesh_of(cpus(2), data=4), "data")
    assert [(level.name, level.count) for level in topology.levels] == [("device", 2), ("host", 2)]
    assert [(level.name, level.count) for level in derived(mesh_of(cpus(1), data=4), "data").levels] == [
        ("host", 4)
    ]


@pytest.mark.parametrize(
    "mesh",
    [
        {"data": 4},
        mesh_of(cpus(4), data=4),
        mesh_of(gpus(4, "GPU of tomorrow"), data=8),
        mesh_of(gpus(4), data=6),
        mesh_of(gpus(1), data=1),
        mesh_of(lambda i: {**gpus(4)(i), "device_kind": (H100, "NVIDIA A100")[i // 4]}, data=8),
    ],
    ids=["sizes", "one process", "unknown kind", "unequal hosts", "one device", "two kinds"],
)
def test_meshes_of_which_nothing_is_assumed(mesh: Any) -> None:
    assert topology_of_mesh(mesh, ("data",)) is None
    assert commplan.loads(PLAN.format(name="plain")).compile(mesh).schedule.topology is None


def test_other_axes_of_the_mesh_are_left_out() -> None:
    """Tensor parallelism inside the node: neighbors along `data` are on other nodes."""
    topology = derived(mesh_of(gpus(8), data=4, model=8), "data")
    assert topology.levels == (Level("node", 4, 6e-6, 50e9),)


def test_ranks_are_where_their_devices_are() -> None:
    """A mesh that goes round the nodes."""
    mesh = mesh_of(lambda index: {**gpus(4)(index), "slice_index": index % 2}, data=8)
    derived_topology = topology_of_mesh(mesh, ("data",))
    assert derived_topology is not None
    assert derived_topology.places == (0, 4, 1, 5, 2, 6, 3, 7)
    program = commplan.loads(PLAN.format(name="round")).compile(mesh)
    assert [(spread.level, spread.count) for spread in program.schedule.axes[0].levels] == [
        ("node", 2), ("gpu", 4),
    ]  # fmt: skip


def test_what_is_assumed_is_logged_once_by_the_first_process(caplog: pytest.LogCaptureFixture) -> None:
    plan = commplan.loads(PLAN.format(name="logged"))
    with caplog.at_level(logging.WARNING, "commplan.topology"):
        plan.compile(mesh_of(gpus(8), process=3, data=32))
        assert not caplog.records
        program = plan.compile(mesh_of(gpus(8), data=32))
        plan.compile(mesh_of(gpus(8), data=32))
    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith("commplan: plan `logged`: no topology; assumed from the mesh: 4 x 8 H100")
    assert 'or with `topology "FILE"` in the plan' in text
    explained = explain_plan(plan.graph, program.schedule).text()
    assert f"  topology: h100_4x8\n    assumed: {text.partition('`: ')[2]}" in explained


def test_a_topology_that_is_given_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    machine = Topology("own", (Level("gpu", 32, 1e-6, 1e9),))
    with caplog.at_level(logging.WARNING, "commplan.topology"):
        program = commplan.loads(PLAN.format(name="given")).compile(
            mesh_of(gpus(8), data=32), topology=machine
        )
    assert program.schedule.topology is not None
    assert program.schedule.topology.name == "own"
    assert not caplog.records
