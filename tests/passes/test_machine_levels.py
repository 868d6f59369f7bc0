"""Plans of every kind compile for machines of several levels, whatever the root, the owners and the size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.agreement import compile_case
from support.campaign import parameters
from support.exchanges import plan_text
from support.random_case import make_case

import commplan
from commplan.ir.schedule import Collective, Schedule
from commplan.topology import load_topology
from commplan.verify import verify

pytestmark = pytest.mark.usefixtures("short_search")
RACKS = load_topology(Path(__file__).parents[2] / "examples" / "topologies" / "two_rack.toml")
AXES = [{"rack": 2, "worker": 4}, {"worker": 8}]
SIZES = [10, 1 << 14, 1 << 20]  # elements


def compiled(text: str, backend: Any, **shapes: Any) -> Schedule:
    """Compiled for two racks, and proved as a whole."""
    schedule = commplan.loads(text).compile(shapes=shapes, topology=RACKS, backend=backend).schedule
    assert not verify(schedule)
    return schedule


def leaf(size: int) -> Any:
    return {"a": {"shape": [size], "dtype": "f32"}, "b": {"shape": [3], "dtype": "f32"}}


def moved(schedule: Schedule) -> list[Collective]:
    return [op for op in schedule.phase("step").ops if isinstance(op, Collective)]


@pytest.mark.parametrize("backend", ["mpi", "jax"])
@pytest.mark.parametrize("axes", AXES, ids=lambda axes: "x".join(map(str, axes.values())))
@pytest.mark.parametrize("root", parameters([0, 5], [3, 7]))
def test_a_broadcast_has_any_root(root: int, axes: dict[str, int], backend: str) -> None:
    names = ", ".join(axes)
    text = "plan tested\n" + "\n".join(f"axis {name} = {size}" for name, size in axes.items())
    text += (
        f"\ninput old : tree per {names}\neach step {{\n    new = broadcast old over {names} from {root}\n"
    )
    text += "    output new\n}\n"
    for size in SIZES:
        assert moved(compiled(text, backend, old=leaf(size)))


@pytest.mark.parametrize("backend", ["mpi", "jax"])
@pytest.mark.parametrize(
    "how",
    parameters(
        ["owners = 3", "within = rack", "owners = 2, within = rack"], ["", "owners = 1", "owners = 8"]
    ),
)
def test_an_exchange_has_any_owners(how: str, backend: str) -> None:
    text = plan_text(AXES[0], f"via parameter_server({how})" if how else "")
    for size in SIZES:
        assert moved(compiled(text, backend, params=leaf(size), grads=leaf(size)))


def test_a_sum_for_one_rank_goes_by_levels_whose_algorithms_are_named() -> None:
    shapes = leaf(1 << 22)
    text = plan_text(AXES[0], "via parameter_server(owners = 1)")
    reduced = [op for op in moved(compiled(text, "mpi", params=shapes, grads=shapes)) if op.kind == "reduce"]
    assert any(op.algorithm.levels for op in reduced)
    assert all(arg.key for op in reduced if op.algorithm.levels for arg in op.algorithm.args)


@pytest.mark.parametrize("seed", [479, 3094])
def test_axes_of_one_rank_are_no_levels(seed: int) -> None:
    """A collective over two axes, one of them of one rank, is not sent over the levels of the other."""
    assert verify(compile_case(make_case(seed), "mpi").schedule) == ()
