"""Bytes on single links: the busiest of each level is the one that the simulator knows of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.byhand import tree

from commplan import dsl
from commplan.compiler import compile_plan
from commplan.cost import Predictor, predict
from commplan.cost.schedule.link_loads import link_loads
from commplan.diagnostics import CommplanError
from commplan.ir.schedule import Schedule
from commplan.topology import Level, Topology, load_topology

ROOT = Path(__file__).parents[2]
TOPOLOGIES = ROOT / "examples" / "topologies"
RACKS = load_topology(TOPOLOGIES / "two_rack.toml")
FLAT = Topology("flat4", (Level("host", 4, 60e-6, 25e6),))


def compiled(text: str, topology: Topology, backend: str = "mpi") -> Schedule:
    plan, problems = dsl.load(text, "test.plan")
    assert plan is not None, problems
    shapes = {v.name: tree(w=(64, 64), b=(64,)) for v in plan.values if type(v.type).__name__ == "TreeType"}
    return compile_plan(plan, shapes, topology=topology, oversubscribe=True, backend=backend)


@pytest.mark.parametrize(
    ("machine", "backend"), [("two_rack", "jax"), ("two_rack", "mpi"), ("h100_64", "jax")]
)
@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples" / "plans").glob("*.plan")), ids=lambda path: path.stem
)
def test_the_busiest_link_is_the_simulators(path: Path, machine: str, backend: str) -> None:
    topology = load_topology(TOPOLOGIES / f"{machine}.toml")
    try:
        schedule = compiled(path.read_text(encoding="utf-8"), topology, backend)
    except CommplanError as error:
        pytest.skip(f"needs other shapes: {error.diagnostics[0].code}")
    predictor = Predictor(topology, schedule.axes, backend=schedule.backend)
    for phase, timed in zip(schedule.phases, predict(schedule, predictor).phases, strict=True):
        loads = link_loads(schedule, phase, predictor)
        assert loads is not None
        busiest = [max(up.max(), down.max()) for up, down in loads]
        # The simulator sums the busiest link of each collective, and these need not be the same one.
        simulated = [nbytes for _, nbytes in timed.nbytes]
        assert all(most <= nbytes * (1 + 1e-9) for most, nbytes in zip(busiest, simulated, strict=True))
        alone = sum(any(nbytes for _, nbytes in op.nbytes) for op in timed.ops) <= 1
        assert not alone or busiest == pytest.approx(simulated)


def test_a_chain_loads_each_link_as_it_passes() -> None:
    schedule = compiled(
        "plan p\naxis host = 4\ninput g : f32[1000] per host\n"
        "each step {\n g = broadcast g over host from 0 via chain\n output g\n}\n",
        FLAT,
    )
    predictor = Predictor(FLAT, schedule.axes, backend="mpi")
    loads = link_loads(schedule, schedule.phases[0], predictor)
    assert loads is not None
    ((up, down),) = loads
    assert up.tolist() == [4000, 4000, 4000, 0]
    assert down.tolist() == [0, 4000, 4000, 4000]


def test_what_is_sent_is_received() -> None:
    text = (ROOT / "examples" / "plans" / "parameter_server_dedicated.plan").read_text(encoding="utf-8")
    schedule = compiled(text, RACKS)
    predictor = Predictor(RACKS, schedule.axes, backend="mpi")
    for phase in schedule.phases:
        for up, down in link_loads(schedule, phase, predictor) or []:
            assert np.sum(up) == pytest.approx(np.sum(down))


def test_groups_that_are_too_large_are_not_counted() -> None:
    cluster = load_topology(TOPOLOGIES / "h100_65536.toml")
    schedule = compiled(
        "plan p\naxis data = 4096\ninput g : f32[1000] partial data\n"
        "each step {\n g = reduce g over data by mean\n output g\n}\n",
        cluster,
        "jax",
    )
    predictor = Predictor(cluster, schedule.axes)
    assert link_loads(schedule, schedule.phases[0], predictor) is None
