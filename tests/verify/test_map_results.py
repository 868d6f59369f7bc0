"""The results of a function have the declared leaves: values without any are refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

import commplan
from commplan.ir import schedule as ir
from commplan.ir.types import DType
from commplan.verify import verify


def test_decoded_records_without_leaves_are_refused() -> None:
    """Both the records that a member decodes and those that it shares: neither contradicts the other."""
    schedule = (
        commplan.load("examples/plans/ensemble_shared.plan")
        .compile(passes="share{design=all_shared}")
        .schedule
    )
    (phase,) = schedule.phases
    decoded = {"pixels.0/own", "pixels.0"}
    assert decoded <= {value.id for value in phase.values} and not verify(schedule)
    values = tuple(
        msgspec.structs.replace(value, leaves=()) if value.id in decoded else value for value in phase.values
    )
    edited = msgspec.structs.replace(phase, values=values)
    problems = verify(msgspec.structs.replace(schedule, phases=(edited,)))
    assert {problem.code for problem in problems} == {"CP0731"}


UNREAD = """plan unread
axis a = 2
input g : tree partial a
input p : tree per a
input n : tree
state w : tree
state m : tree
fn zeros(tree) -> tree on device elementwise
fn fill(tree) -> tree on device elementwise
fn sgd(tree, tree, tree) -> tree, tree on device elementwise
at start {
    w = broadcast p over a from 0
    m = map zeros(w)
    output w
}
each step {
    w, m = exchange g into w, m with sgd over a by mean
    y = map fill(n)
    output w
}
"""
TREE = {"w": {"shape": [3], "dtype": "f32"}}


@pytest.mark.parametrize("how", ["sharded", "replicated"])
@pytest.mark.parametrize("name", ["y.0", "y.0/x"])
def test_results_that_no_output_reads_have_their_declared_leaves(how: str, name: str) -> None:
    """This includes states that the schedule shards, and names that are not values of the plan."""
    shapes = {**dict.fromkeys("gpwmy", TREE), "n": {"s": {"shape": [], "dtype": "f32"}}}
    plan = commplan.loads(UNREAD, "unread.plan")
    schedule = plan.compile(shapes=shapes, passes=f"place{{how={how}}},wire").schedule
    assert bool(schedule.state_shards) == (how == "sharded")
    start, step = schedule.phases

    def with_leaf(**fields: Any) -> ir.Schedule:
        ops = tuple(
            msgspec.structs.replace(op, results=(name,)) if isinstance(op, ir.Map) and op.fn == "fill" else op
            for op in step.ops
        )
        values = tuple(
            msgspec.structs.replace(
                value, id=name, leaves=(msgspec.structs.replace(value.leaves[0], **fields),)
            )
            if value.id == "y.0"
            else value
            for value in step.values
        )
        return msgspec.structs.replace(
            schedule, phases=(start, msgspec.structs.replace(step, ops=ops, values=values))
        )

    assert verify(with_leaf()) == ()
    for edited in (with_leaf(shape=(5,)), with_leaf(path="q"), with_leaf(dtype=DType.BF16)):
        assert {problem.code for problem in verify(edited)} == {"CP0766"}
