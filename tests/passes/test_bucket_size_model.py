"""How large buckets are where times are known."""

from __future__ import annotations

import math
from typing import Any

import pytest
from support.byhand import reduce_plan, tree

from commplan.compiler import compile_plan
from commplan.cost.collective.cost import CollectiveTime
from commplan.ir import plan as graph
from commplan.ir.ops.base import Work
from commplan.ir.remark import Choice
from commplan.ir.schedule import Collective, Schedule
from commplan.passes.bucket.size_model import DEFAULT, candidate_sizes
from commplan.passes.pipeline.base import Context
from commplan.passes.pipeline.manager import Pipeline
from commplan.topology import Level, Topology

FLAT = Topology("flat", (Level("host", 4, 6e-5, 25e6),))
KIB, MIB = 1024, 1024**2
BACKWARD = graph.Hints(overlap="backward")


class Line:
    """T(b) = alpha + beta b, whatever the algorithm."""

    measured = False

    def in_words(self, source: str) -> str:
        return source

    def __init__(self, alpha: float, beta: float) -> None:
        self.alpha, self.beta = alpha, beta

    def query(self, work: Work) -> CollectiveTime:
        return CollectiveTime(self.alpha + self.beta * work.nbytes, (), "", 0.0, "told")


def bucketed(
    costs: Any, leaves: dict[str, tuple[int, ...]], hints: graph.Hints, backend: Any, passes: str = "bucket"
) -> tuple[Schedule, list[int]]:
    plan = reduce_plan("sum", hints=hints, data=4)
    bare = compile_plan(plan, {}, {"grads": tree(**leaves)}, topology=FLAT, backend=backend, pipeline="")
    schedule = Pipeline.parse(passes).run(bare, Context(topology=FLAT, costs=costs))
    return schedule, [op.nbytes for op in schedule.phases[0].ops if isinstance(op, Collective)]


def many(count: int, nbytes: int) -> dict[str, tuple[int, ...]]:
    return {f"w{index:03}": (nbytes // 4,) for index in range(count)}


def told(schedule: Schedule) -> Choice:
    return next(choice for choice in schedule.choices if choice.by == "bucket")


@pytest.mark.parametrize("alpha", [1e-6, 1e-4, 1e-2])
def test_as_many_buckets_as_latency_pays_for(alpha: float) -> None:
    """Near the square root of the time of all bytes over the latency, the least of n alpha + beta S / n."""
    beta, leaves = 4e-8, many(1024, 64 * KIB)  # 64 MiB
    schedule, sizes = bucketed(Line(alpha, beta), leaves, BACKWARD, "mpi")
    best = math.sqrt(beta * 64 * MIB / alpha)
    assert min(best, 1024) / 4 <= len(sizes) <= best * 4
    choice = told(schedule)
    assert "leaves the least time behind the backward pass" in choice.why
    assert all((other.seconds or 0) >= (choice.seconds or 0) * 0.99 for other in choice.alternatives)


def test_what_cannot_be_hidden_travels_in_one() -> None:
    """200 tensors of 1 KiB, and 2 MB in forty: one exchange each."""
    for leaves in (many(200, KIB), many(40, 48 * KIB)):
        schedule, sizes = bucketed(Line(1e-3, 4e-8), leaves, graph.NO_HINTS, "mpi")
        assert len(sizes) == 1
        assert "the default limit is 25 MiB" in told(schedule).why


def test_what_cannot_be_hidden_is_larger_than_the_default_only_where_that_saves() -> None:
    leaves = many(64, 4 * MIB)
    schedule, one = bucketed(Line(1.0, 4e-8), leaves, graph.NO_HINTS, "mpi")
    assert len(one) == 1
    assert "takes the least time" in told(schedule).why
    _, several = bucketed(Line(0.0, 4e-8), leaves, graph.NO_HINTS, "mpi")
    assert max(several) == 64 * MIB


def test_jax_hides_reductions_without_being_asked() -> None:
    _, sizes = bucketed(Line(1e-5, 4e-9), many(64, MIB), graph.NO_HINTS, "jax")
    assert len(sizes) > 1


def test_what_is_written_stays() -> None:
    costs, leaves = Line(1e-5, 4e-9), many(16, MIB)
    hints = graph.Hints(bucket=2 * MIB)
    assert len(bucketed(costs, leaves, hints, "jax")[1]) == 8
    schedule, sizes = bucketed(costs, leaves, graph.NO_HINTS, "jax", "bucket{max=4MiB}")
    assert len(sizes) == 4
    assert told(schedule).why.startswith("the limit of the pass is 4 MiB")


def test_sizes_that_are_tried() -> None:
    assert candidate_sizes(64 * MIB, hidden=False) == [64 * MIB]
    assert candidate_sizes(MIB, hidden=True) == [MIB, 256 * KIB, 64 * KIB]
    assert candidate_sizes(200 * MIB, hidden=False) == [200 * MIB, 50 * MIB]
    assert all(size >= DEFAULT for size in candidate_sizes(2**33, hidden=False))
