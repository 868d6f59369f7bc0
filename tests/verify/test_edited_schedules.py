"""Schedules edited by hand, in any way: the verifier has an answer, and its answer is no traceback."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from support.byhand import compiled, reduce_plan, sharded_plan, tree
from support.calls import calls_of, check_calls

from commplan.ir import plan as graph
from commplan.ir import schedule as ir
from commplan.verify import verify
from commplan.verify.algorithms import prove_op
from commplan.verify.memory import memory

GIVEN = tree(w=(3, 3), b=(2,))
LEVELS = (ir.Spread("host", 2), ir.Spread("rack", 2))
HIERARCHY = graph.Algorithm("hierarchical", (graph.Arg("ring", "host"), graph.Arg("chain", "rack")))
WORDS = ("ring", "native", "hierarchical", "torus", "data", "host", "magic", "", "sum", "broadcast", "mpi")


def sound() -> list[Any]:
    """Two schedules as plain values: one with a hierarchy over the levels of its axis, one with a shard."""
    reduced = compiled(reduce_plan("sum"), None, grads=GIVEN)
    (phase,) = reduced.phases
    ops = tuple(
        msgspec.structs.replace(op, algorithm=HIERARCHY) if isinstance(op, ir.Collective) else op
        for op in phase.ops
    )
    levelled = msgspec.structs.replace(
        reduced,
        axes=(msgspec.structs.replace(reduced.axes[0], levels=LEVELS),),
        phases=(msgspec.structs.replace(phase, ops=ops),),
    )
    assert verify(levelled) == ()
    sharded = compiled(sharded_plan(), None, params=GIVEN, grads=GIVEN)
    return [msgspec.to_builtins(levelled), msgspec.to_builtins(sharded)]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something can be changed."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inside:
        yield from places(part, (*path, key))
    if path and not isinstance(value, dict):
        yield path


def edit(rng: random.Random, content: Any) -> None:
    """Change one number, text or list."""
    *above, last = rng.choice(list(places(content)))
    parent = content
    for key in above:
        parent = parent[key]
    match parent[last]:
        case bool() as flag:
            parent[last] = not flag
        case int() as number:
            parent[last] = rng.choice([0, -1, 1, 2, number + 1, 2 * number, 2**40])
        case str():
            parent[last] = rng.choice(WORDS)
        case list() as many:
            parent[last] = rng.choice([[], many * 2, many[::-1], many[1:]])
        case _:
            parent[last] = rng.choice([0, 1, "ring", "split", []])


@pytest.mark.parametrize("seed", range(8))
def test_an_edited_schedule_is_refused_or_proved(seed: int) -> None:
    rng, starts, refused = random.Random(seed), sound(), 0
    for _ in range(60):
        content = json.loads(json.dumps(rng.choice(starts)))
        for _ in range(rng.choice([1, 1, 2])):
            edit(rng, content)
        try:
            schedule = msgspec.convert(content, ir.Schedule)
        except msgspec.ValidationError:
            continue
        problems = verify(schedule)
        refused += bool(problems)
        if problems:
            assert all(problem.code.startswith("CP0") and problem.message for problem in problems)
            continue
        assert len(memory(schedule)) == len(schedule.phases)
        assert check_calls(schedule.mesh_sizes, calls_of(schedule)) is None
        ops = (op for phase in schedule.phases for op in phase.ops if isinstance(op, ir.Collective))
        proofs = [prove_op(schedule, op) for op in ops]
        assert all(not proof.wrong for proof in proofs if proof is not None)
    assert refused > 10
