"""place: exchanges between workers as scatters, updates by owners and gathers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.exchanges import SHAPES, oracle_run, plan_text, same, wanted

import commplan
from commplan.cost import Predictor, predict
from commplan.diagnostics import CommplanError
from commplan.ir.schedule import Collective, Exchange, Map, Slice
from commplan.passes.exchange import lower_exchange, owner_shards
from commplan.topology import load_topology
from commplan.verify import verify
from commplan.verify.memory import memory

TREE = {key: {"shape": list(shape), "dtype": "f32"} for key, shape in SHAPES.items()}
CUT = {key: leaf for key, leaf in TREE.items() if leaf["shape"]}
SMALL = "place,bucket{max=64},fuse_update,decompose,wire,select,overlap"
OWNED, WITHIN = "via parameter_server", "via parameter_server(within = rack)"


def compiled(text: str, passes: str | None = None, backend: Any = None, **shapes: Any) -> Any:
    all_shapes = {"params": TREE, "grads": TREE} | shapes
    return commplan.loads(text).compile(shapes=all_shapes, passes=passes, backend=backend).schedule


def refused(text: str, **shapes: Any) -> Any:
    with pytest.raises(CommplanError) as error:
        compiled(text, **shapes)
    (diagnostic,) = error.value.diagnostics
    return diagnostic


@pytest.mark.parametrize("passes", ["place", SMALL])
@pytest.mark.parametrize("states", [1, 2])
@pytest.mark.parametrize("by", ["sum", "mean", "mean(weight = n)"])
@pytest.mark.parametrize(
    ("axes", "via"),
    [
        ({"worker": 1}, OWNED), ({"worker": 3}, OWNED), ({"worker": 8}, ""),
        ({"rack": 2, "worker": 3}, OWNED),
        ({"worker": 4}, "via parameter_server(owners = 1)"),
        ({"worker": 5}, "via parameter_server(owners = 3)"),
        ({"rack": 2, "worker": 3}, "via parameter_server(owners = 2, within = rack)"),
        ({"rack": 2, "worker": 3}, WITHIN), ({"rack": 3, "host": 2, "worker": 2}, WITHIN),
    ],
)  # fmt: skip
def test_it_means_what_the_equations_say(
    axes: dict[str, int], via: str, by: str, states: int, passes: str | None
) -> None:
    schedule = compiled(plan_text(axes, via, by=by, states=states), passes)
    weights, _ = oracle_run(schedule, axes, 3, by, states)
    assert all(map(same, weights, wanted(axes, 3, by, states)))


@pytest.mark.parametrize(
    ("axes", "via", "options", "forms"),
    [
        ({"worker": 4}, OWNED, "", {"call"}), ({"worker": 4}, OWNED, "{ overlap = backward }", {"split"}),
        ({"worker": 4}, "via parameter_server(owners = 2)", "", {"split"}),
        ({"rack": 2, "worker": 2}, WITHIN, "", {"split"}),
    ],
)  # fmt: skip
def test_parts_are_under_way_at_once_where_that_is_asked_for_or_links_would_be_idle(
    axes: dict[str, int], via: str, options: str, forms: set[str]
) -> None:
    schedule = compiled(plan_text(axes, via, options), backend="mpi", params=CUT, grads=CUT)
    ops = schedule.phase("step").ops
    assert {op.form for op in ops if isinstance(op, Collective)} == forms


def test_large_gradients_travel_in_two_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over MPI: one half is updated while the other is sent."""
    large = {f"w{number}": {"shape": [128, 512], "dtype": "f32"} for number in range(8)}
    text, axes = plan_text({"worker": 4}, OWNED), {"worker": 4}

    def kinds(schedule: Any) -> list[str]:
        return sorted(op.kind for op in schedule.phase("step").ops if isinstance(op, Collective))

    assert kinds(compiled(text, backend="mpi", params=large, grads=large)) == [
        "all_gather", "all_gather", "reduce_scatter", "reduce_scatter",
    ]  # fmt: skip
    assert len(kinds(compiled(text, backend="jax", params=large, grads=large))) == 2
    monkeypatch.setattr(lower_exchange, "HALVES", 64)
    halved = compiled(text, backend="mpi")
    assert len(kinds(halved)) > len(kinds(compiled(text, backend="jax")))
    weights, _ = oracle_run(halved, axes, 3, "mean", 2)
    assert all(map(same, weights, wanted(axes, 3, "mean", 2)))


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [((100_000, 300_000, 250_000, 150_001), 2), ((200_003,) * 3, 2), ((100_001,) * 8, 2),
     ((800_000,), 1), ((10, 900_000, 20), 1)],
)  # fmt: skip
def test_halves_are_two_however_the_leaves_are(sizes: tuple[int, ...], parts: int) -> None:
    """There is one part, without hidden time, if one leaf is nearly everything."""
    large = {f"w{number}": {"shape": [size], "dtype": "f32"} for number, size in enumerate(sizes)}
    text = plan_text({"worker": 4}, OWNED, by="mean(weight = n)")
    schedule = compiled(text, backend="mpi", params=large, grads=large)
    ops = [op for op in schedule.phase("step").ops if isinstance(op, Collective)]
    sums = [op for op in ops if op.kind == "reduce_scatter"]
    assert len(sums) == len([op for op in ops if op.kind == "all_gather"]) == parts
    assert {op.form for op in sums} == {"split" if parts == 2 else "call"}
    assert max(op.nbytes for op in sums) <= 3 * min(op.nbytes for op in sums)
    assert {op.form for op in ops if op.kind == "all_reduce"} == {"call"}  # of the weights of the mean
    reasons = [choice.why for choice in schedule.choices if choice.by == "bucket"]
    assert any("nearly in half" in why for why in reasons) == (parts == 2)


@pytest.mark.parametrize("by", ["sum", "mean(weight = n)"])
@pytest.mark.parametrize(
    ("axes", "owners", "pieces"),
    [({"worker": 4}, "owners = 1", 6), ({"worker": 5}, "owners = 3", 2),
     ({"rack": 2, "worker": 3}, "owners = 2, within = rack", 4)],
)  # fmt: skip
def test_a_few_owners_update_piece_by_piece(
    axes: dict[str, int], owners: str, pieces: int, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner_shards, "LEAST", 16)
    text = plan_text(axes, f"via parameter_server({owners})", by=by, states=2)
    schedule = compiled(text, backend="mpi")
    weights, _ = oracle_run(schedule, axes, 3, by, 2)
    assert all(map(same, weights, wanted(axes, 3, by, 2)))
    assert not verify(schedule)
    ops = schedule.phase("step").ops
    assert sum(isinstance(op, Map) for op in ops) == pieces + 1  # and the scalars
    moved = [op.kind for op in ops if isinstance(op, Collective) and op.kind in ("reduce", "broadcast")]
    assert moved == sorted(moved, reverse=True)  # sums are all on their way before one is used


def test_what_an_exchange_becomes() -> None:
    schedule = compiled(plan_text({"worker": 4}, OWNED), "place")
    ops = schedule.phase("step").ops
    assert not any(isinstance(op, Exchange) for op in ops)
    kinds = [op.kind if isinstance(op, Collective) else type(op).__name__ for op in ops]
    assert kinds == ["reduce_scatter", "Scale", "Slice", "Map", "all_gather"]
    (cut,) = (op for op in ops if isinstance(op, Slice))
    assert cut.operand == "weights.0"  # the moment is cut for good


def test_owners_keep_the_state_of_the_optimizer() -> None:
    text = plan_text({"worker": 4}, OWNED)
    split, whole = compiled(text), compiled(plan_text({"worker": 4}), "place{how=replicated}")
    entry = {value.id: value for value in split.entry}
    assert entry["moment.0"].placement.split == ("worker",)
    assert entry["moment.0"].nbytes == 4 * (4 + 2 + 1 + 1)  # of 15 + 7 + 4 + 1 elements
    assert entry["weights.0"].placement.split == ()
    moment = {value.id: value for value in whole.entry}["moment.0"]
    assert moment.nbytes == 4 * (15 + 7 + 4 + 1)
    (zeros,) = (op for op in split.phase("start").ops if isinstance(op, Map))
    assert entry["moment.0"].leaves == {v.id: v for v in split.phase("start").values}[zeros.results[0]].leaves


def test_memory_of_a_rank_falls_by_what_owners_keep() -> None:
    big = {"w": {"shape": [100_000], "dtype": "f32"}}
    text = plan_text({"worker": 8}, OWNED)
    one_owner, all_ = (
        {each.phase: each.nbytes for each in memory(compiled(plan, passes, params=big, grads=big))}
        for plan, passes in ((text, "place"), (plan_text({"worker": 8}), "place{how=replicated}"))
    )
    assert all_["start"] - one_owner["start"] >= 400_000 * 7 / 8
    assert all_["step"] - one_owner["step"] >= 400_000 * 7 / 8


def test_phases_that_read_or_set_the_state_whole() -> None:
    text = plan_text({"worker": 3}, OWNED)
    text = text.replace("    output weights\n}\neach", "    output weights, moment\n}\neach")
    text = text.replace("fn update", "fn halve(tree) -> tree on device\nfn update")
    text += "every 2 steps {\n    moment = map halve(moment)\n    output moment\n}\n"
    schedule = compiled(text, moment=TREE)
    every = schedule.phase("every_2").ops
    assert [op.kind for op in every if isinstance(op, Collective)] == ["all_gather"]
    (cut,) = (op for op in every if isinstance(op, Slice))
    assert cut.axes == ("worker",)
    outputs = {b.name: b.value for b in schedule.phase("start").outputs}
    values = {value.id: value for value in schedule.phase("start").values}
    assert values[outputs["moment"]].placement.split == ()


def test_racks_are_crossed_once() -> None:
    """Each rack sends the other its half of the sums and of the weights: no less would do."""
    big: Any = {"w": {"shape": [1 << 18], "dtype": "f32"}}
    machine = load_topology(Path(__file__).parents[2] / "examples" / "topologies" / "two_rack.toml")

    def crossed(via: str, passes: str | None = None) -> float:
        """Bytes that collectives put on a rack's uplink in one step, each in its fuller direction."""
        program = commplan.loads(plan_text({"rack": 2, "worker": 4}, via)).compile(
            shapes={"params": big, "grads": big}, topology=machine, backend="mpi", passes=passes,
            mapping={"rack": "rack", "worker": "host"},
        )  # fmt: skip
        prediction = predict(program.schedule, Predictor(machine, program.schedule.axes, backend="mpi"))
        return dict(prediction.phases[1].nbytes)["rack"]

    whole = 4 << 18
    assert crossed(WITHIN) == pytest.approx(whole, rel=0.001)  # half of it down, half up
    central = crossed("via parameter_server(owners = 1, within = rack)")
    assert central == pytest.approx(2 * whole, rel=0.001)  # the sum of the other rack, and the weights back


def test_staleness_needs_a_server() -> None:
    problems = refused(plan_text({"worker": 4}, OWNED, "{ staleness = 2 }"))
    assert problems.code == "CP0728"
    assert problems.message == "`staleness = 2` needs a server: `weights` is on the workers"
    assert compiled(plan_text({"worker": 4}, OWNED, "{ staleness = 0 }"))


def test_a_state_that_cannot_be_cut_is_refused_where_owners_are_asked_for() -> None:
    count: Any = {"shape": [], "dtype": "i32"}
    strange: Any = {"mu": TREE, "rows": {"shape": [5], "dtype": "f32"}, "count": count}
    problems = refused(plan_text({"worker": 4}, OWNED), moment=strange)
    assert problems.code == "CP0726"
    reason = "no leaf of the weights has its shape and path"
    assert problems.message == f"owners cannot store leaf `rows` of `moment`, f32[5]: {reason}"
    schedule = compiled(plan_text({"worker": 4}), moment=strange)
    (choice,) = (choice for choice in schedule.choices if choice.by == "place")
    assert "every worker updates all parts" in choice.what
    assert reason in choice.why


def test_states_that_look_like_the_weights_are_cut_with_them() -> None:
    adam: Any = {"mu": TREE, "nu": TREE, "count": {"shape": [], "dtype": "i32"}}
    schedule = compiled(plan_text({"worker": 4}, OWNED), "place", moment=adam)
    shapes = {leaf.path: leaf.shape for leaf in {v.id: v for v in schedule.entry}["moment.0"].leaves}
    assert shapes["mu/a"] == shapes["nu/a"] == (4,)
    assert shapes["count"] == shapes["mu/scale"] == ()


def test_explain_shows_what_else_there_was() -> None:
    schedule = compiled(plan_text({"worker": 4}))
    (choice,) = (choice for choice in schedule.choices if choice.by == "place")
    assert choice.what == "`weights`: each worker owns a part: 4 owners along worker"
    expected = ["one owner of all parts", "all-reduce, and every worker updates all parts"]
    assert [alternative.what for alternative in choice.alternatives] == expected


def test_only_gradients_travel_narrow() -> None:
    schedule = compiled(plan_text({"worker": 4}, OWNED, "{ wire = bf16, accumulate = f32 }"))
    sent = [(op.kind, str(op.dtype)) for op in schedule.phase("step").ops if isinstance(op, Collective)]
    assert ("all_to_all", "bf16") in sent
    assert ("all_gather", "f32") in sent


def test_a_few_owners_hold_equal_parts_and_are_spread_over_racks() -> None:
    text = plan_text({"rack": 2, "worker": 4}, "via parameter_server(owners = 2)")
    schedule = compiled(text, "place")
    ops = schedule.phase("step").ops
    moves = [(op.kind, op.root) for op in ops if isinstance(op, Collective) and op.root is not None]
    assert moves == [("reduce", 0), ("reduce", 1), ("broadcast", 0), ("broadcast", 1), ("broadcast", 0)]
    assert all(op.axes == ("worker", "rack") for op in ops if isinstance(op, Collective))  # so 1 is in rack 1
    (choice,) = (choice for choice in schedule.choices if choice.by == "place")
    assert choice.what == (
        "`weights`: 2 owners (ranks 0, 1 along worker, rack), the fullest with 56 B, 1.077 of the mean"
    )
    moment = {value.id: value for value in schedule.entry}["moment.0"]
    assert moment.placement.per == ("rack", "worker")  # it must not count as replicated
    assert moment.nbytes == 4 * (8 + 4 + 2 + 1)


def test_a_few_owners_and_a_narrow_wire_do_not_go_together() -> None:
    problems = refused(plan_text({"worker": 4}, "via parameter_server(owners = 2)", "{ wire = bf16 }"))
    assert problems.code == "CP0757"
