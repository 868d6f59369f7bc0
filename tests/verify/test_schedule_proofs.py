"""Schedules: their algorithms are proved, clocks and memory; errors point at the plan line."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.byhand import HERE, Maker, compiled, reduce_plan, tree

from commplan.collectives import registry
from commplan.collectives.algorithms import ring
from commplan.collectives.program import RoundSequence
from commplan.diagnostics import Span
from commplan.ir import plan as graph
from commplan.ir import schedule as ir
from commplan.ir.types import DType
from commplan.verify import verify
from commplan.verify.algorithms import prove_op
from commplan.verify.memory import memory
from commplan.verify.programs import algorithm_proof

GIVEN = tree(w=(30, 10), b=(2,))


def replaced(schedule: ir.Schedule, **changes: Any) -> ir.Schedule:
    """`schedule` with other fields of its collectives."""
    phases = tuple(
        msgspec.structs.replace(
            phase,
            ops=tuple(
                msgspec.structs.replace(op, **changes) if isinstance(op, ir.Collective) else op
                for op in phase.ops
            ),
        )
        for phase in schedule.phases
    )
    return msgspec.structs.replace(schedule, phases=phases)


def collectives(schedule: ir.Schedule) -> list[ir.Collective]:
    return [op for phase in schedule.phases for op in phase.ops if isinstance(op, ir.Collective)]


def plain() -> ir.Schedule:
    return compiled(reduce_plan("sum"), None, grads=GIVEN)


@pytest.mark.parametrize("name", registry.algorithms("all_reduce"))
def test_schedules_with_programs_are_proved(name: str) -> None:
    schedule = replaced(plain(), algorithm=graph.Algorithm(name))
    assert verify(schedule) == ()
    (op,) = collectives(schedule)
    proof = prove_op(schedule, op)
    assert proof is not None
    assert [task[:3] for task in proof.tasks] == [(name, "all_reduce", 4)]
    assert prove_op(plain(), collectives(plain())[0]) is None


def test_levels_of_one_axis_are_those_of_the_topology() -> None:
    axis = msgspec.structs.replace(plain().axes[0], levels=(ir.Spread("host", 2), ir.Spread("rack", 2)))
    both = graph.Algorithm("hierarchical", (graph.Arg("ring", "host"), graph.Arg("scatter_gather", "rack")))
    schedule = msgspec.structs.replace(replaced(plain(), algorithm=both), axes=(axis,))
    assert [problem.code for problem in verify(schedule)] == ["CP0739"]  # no all_reduce
    both = graph.Algorithm("hierarchical", (graph.Arg("ring", "host"), graph.Arg("ring", "rack")))
    schedule = replaced(schedule, algorithm=both)
    assert verify(schedule) == ()
    proof = prove_op(schedule, collectives(schedule)[0])
    assert proof is not None
    assert len(proof.tasks) == 3


def test_roots_are_counted_over_the_axes_whatever_the_order_of_the_levels() -> None:
    maker = Maker(node=2, gpu=3)
    maker.input("x", per="node gpu")
    maker.value("x.1")
    for root in range(6):
        stage = graph.Broadcast("x.1", "x.0", ("node", "gpu"), root, HERE)
        maker.phases.clear()
        maker.phase("step", stage, outputs=("x.1",))
        for names in (("gpu", "node"), ("node", "gpu")):
            args = tuple(graph.Arg("binomial_tree", name) for name in names)
            schedule = replaced(
                compiled(maker.plan(), "", x=tree(w=(7,))), algorithm=graph.Algorithm("hierarchical", args)
            )
            assert verify(schedule) == ()
            proof = prove_op(schedule, collectives(schedule)[0])
            assert proof is not None
            place = {"node": root // 3, "gpu": root % 3}
            assert {(task.ranks, task.root) for task in proof.tasks} == {
                (3, place["gpu"]), (2, place["node"]),
            }  # fmt: skip


def test_a_broken_algorithm_is_refused_at_its_plan_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """An algorithm file with a mistake: its last round is missing."""

    programs = ring.PROGRAMS

    def all_reduce(n: int) -> RoundSequence:
        whole = programs["all_reduce"](n)
        return RoundSequence(whole.chunks, tuple(whole.rounds)[:-1])

    files = {**registry.files()}
    monkeypatch.setattr(ring, "PROGRAMS", {**programs, "all_reduce": all_reduce})
    monkeypatch.setattr(registry, "files", lambda: files)
    algorithm_proof.prove_task.cache_clear()
    try:
        at = Span(7, 5, 7, 30)
        schedule = replaced(plain(), algorithm=graph.Algorithm("ring"), span=at)
        (problem,) = verify(schedule)
    finally:
        algorithm_proof.prove_task.cache_clear()
    assert (problem.code, problem.span, problem.file) == ("CP0740", at, "made.plan")
    assert "ring for all_reduce over 4 ranks: at the end rank 3 has" in problem.message
    assert [note.text.split()[0] for note in problem.notes] == ["expected", "found"]


def test_members_with_clocks_of_their_own_do_not_meet() -> None:
    schedule = plain()
    phase = schedule.phases[0]
    value = ir.Value("raw.0", "records", (ir.Leaf("", (8, 5), DType.U8),), phase.values[0].placement)
    (op,) = collectives(schedule)
    read = ir.Read("raw.0", "images", (8,), "exactly_once", 0, Span(3, 1, 3, 5), clock=op.axes[0])
    changed = msgspec.structs.replace(phase, ops=(read, *phase.ops), values=(value, *phase.values))
    problems = verify(msgspec.structs.replace(schedule, phases=(changed,)))
    (problem,) = [each for each in problems if each.code == "CP0747"]
    assert "with independent clocks (line 3): a member with more steps waits forever" in problem.message


def test_memory_is_what_lies_there_at_the_worst_moment() -> None:
    schedule = plain()
    (peak,) = memory(schedule)
    entry_nbytes = 302 * 4
    # The input, the packed buffer, and the result of the collective; no more at once.
    assert (peak.phase, peak.nbytes, peak.buffers) == ("step", 3 * entry_nbytes, 2 * entry_nbytes)
    assert peak.span == collectives(schedule)[0].span
    (staged,) = memory(replaced(schedule, algorithm=graph.Algorithm("ring")))
    assert (staged.nbytes, staged.buffers) == (4 * entry_nbytes, 3 * entry_nbytes)
    (split,) = memory(replaced(schedule, algorithm=graph.Algorithm("ring"), form="split"))
    assert split.nbytes >= staged.nbytes


def test_a_phase_that_makes_nothing_holds_what_it_is_given() -> None:
    schedule = plain()
    phase = msgspec.structs.replace(schedule.phases[0], ops=(), values=(), outputs=())
    (peak,) = memory(msgspec.structs.replace(schedule, phases=(phase,)))
    assert peak == ("step", 302 * 4, 0, None)


def test_proofs_are_made_once() -> None:
    schedule = replaced(plain(), algorithm=graph.Algorithm("halving_doubling"))
    assert verify(schedule) == ()
    before = algorithm_proof.prove_task.cache_info().misses
    assert verify(copied(schedule)) == ()
    assert algorithm_proof.prove_task.cache_info().misses == before


def copied(schedule: ir.Schedule) -> ir.Schedule:
    """An equal schedule that shares no object with it."""
    return msgspec.json.decode(msgspec.json.encode(schedule), type=ir.Schedule)
