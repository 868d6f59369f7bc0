"""The audit's estimate on the links of a topology."""

from __future__ import annotations

from pathlib import Path

import pytest

import commplan
from commplan.cost import Predictor, predict
from commplan.explain.links import links_of
from commplan.lowering.gpu.estimate import Machine, seconds_by_level, seconds_of
from commplan.lowering.hlo.reader import Tensor
from commplan.lowering.hlo.step import CompiledCollective
from commplan.topology import load_topology

CLUSTER = load_topology(Path(__file__).parents[2] / "examples" / "topologies" / "h100_64.toml")
PLAN = """\
plan linked
axis node = 4
axis gpu = 8
input grads : tree partial node, gpu
each step {
    grads = reduce grads over node, gpu by mean via native
    output grads
}
"""
SHAPES = {"grads": {"w": {"shape": [1 << 24], "dtype": "f32"}}}
SCHEDULE = commplan.loads(PLAN).compile(shapes=SHAPES, topology=CLUSTER).schedule
PREDICTOR = Predictor(CLUSTER, SCHEDULE.axes)
MACHINE = Machine(1e12, 1e12, 1e9, links=links_of(SCHEDULE, CLUSTER))


def compiled(kind: str, groups: tuple[tuple[int, ...], ...], count: int = 1 << 24) -> CompiledCollective:
    tensor = Tensor("f32", (count,))
    return CompiledCollective(kind, None, (tensor,), (tensor,), groups, None, "main", 0, 1, (), kind, "")


def test_a_collective_as_planned_takes_what_it_is_predicted_to_take_alone() -> None:
    (op,) = (op for op in predict(SCHEDULE, PREDICTOR).phases[0].ops if op.algorithm)
    everyone = compiled("all_reduce", (tuple(range(32)),))
    assert seconds_of(everyone, MACHINE) == op.alone
    assert set(seconds_by_level(everyone, MACHINE)) == {"gpu", "node"}
    inside = compiled("all_reduce", tuple(tuple(range(8 * node, 8 * node + 8)) for node in range(4)))
    assert set(seconds_by_level(inside, MACHINE)) == {"gpu"}
    assert seconds_of(inside, MACHINE) < op.alone


def test_messages_take_what_the_busiest_link_carries() -> None:
    nbytes = 4 << 24
    neighbors = compiled("permute", tuple((rank, rank + 1) for rank in range(0, 8, 2)))
    assert seconds_by_level(neighbors, MACHINE) == {"gpu": pytest.approx(nbytes / 450e9)}
    across = compiled("permute", tuple((rank, rank + 8) for rank in range(8)))
    levels = {"gpu": pytest.approx(nbytes / 450e9), "node": pytest.approx(8 * nbytes / 400e9)}
    assert seconds_by_level(across, MACHINE) == levels
    assert seconds_of(across, MACHINE) == pytest.approx(8 * nbytes / 400e9 + 6e-6 + 8e-6)
    assert seconds_by_level(compiled("permute", ((0, 0),)), MACHINE) == {}


def test_the_source_of_the_links_is_printed() -> None:
    assert "links of topology `h100_64`, not measured: gpu 419 GiB/s, node 373 GiB/s" in str(MACHINE)
    assert MACHINE.data()["links"] == MACHINE.links.source if MACHINE.links else False
    assert "50 GB/s a rank between hosts, built in: --topology" in str(
        Machine(1e12, 1e12, 3e11, network=5e10, per_host=8)
    )
