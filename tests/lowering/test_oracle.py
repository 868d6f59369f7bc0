"""The oracle, op by op, on schedules written by hand."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.oracle import Oracle
from support.oracle.numbers import combine, convert, round_bfloat16, storage

from commplan.diagnostics import CommplanError, Span
from commplan.ir import schedule as ir
from commplan.ir.plan import AxisKind
from commplan.ir.types import DType, Placement, TreeType

SPAN = Span(1, 1, 1, 2)
SAME = Placement()


def leaf(*shape: int, dtype: DType = DType.F32, path: str = "") -> ir.Leaf:
    return ir.Leaf(path, shape, dtype)


def value(ref: str, leaves: Sequence[ir.Leaf], placement: Placement, kind: str = "array") -> ir.Value:
    return ir.Value(ref, kind, tuple(leaves), placement)  # pyright: ignore[reportArgumentType]


def schedule(
    axes: dict[str, int],
    entry: Sequence[ir.Value],
    ops: Sequence[ir.Op],
    values: Sequence[ir.Value],
    outputs: dict[str, str],
    states: Sequence[ir.Value] = (),
    updates: dict[str, str] | None = None,
    fns: Sequence[ir.FnType] = (),
    takes: Sequence[ir.Binding] = (),
) -> ir.Schedule:
    inputs = tuple(v.id for v in entry)
    phase = ir.Phase(
        "step", "step", SPAN, 1, tuple(ops), inputs, tuple(v.id for v in states),
        tuple(ir.Binding(name, ref) for name, ref in outputs.items()),
        tuple(ir.Binding(name, ref) for name, ref in (updates or {}).items()), tuple(values), tuple(takes),
    )  # fmt: skip
    return ir.Schedule(
        "test", "", tuple(ir.Axis(name, AxisKind.REPLICA, size) for name, size in axes.items()), (),
        tuple(fns), inputs, tuple(v.id for v in states), (*entry, *states), (phase,),
    )  # fmt: skip


def collective(
    kind: str, axes: Sequence[str], result: str = "y.0", operand: str = "x.0", **more: object
) -> ir.Op:
    return ir.Collective(kind, result, operand, tuple(axes), DType.F32, 0, SPAN, **more)  # pyright: ignore[reportArgumentType]


def run(plan: ir.Schedule, **inputs: object) -> dict[str, Any]:
    return Oracle(plan).phase("step", {}, inputs)[0]


def test_all_reduce_sums_over_the_named_axes_only():
    per = Placement(per=("node",), partial=("gpu",))
    plan = schedule(
        {"node": 2, "gpu": 3},
        [value("x.0", [leaf(2)], per)],
        [collective("all_reduce", ["gpu"], op="sum")],
        [value("y.0", [leaf(2)], Placement(per=("node",)))],
        {"y": "y.0"},
    )
    x = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    np.testing.assert_array_equal(run(plan, x=x)["y"], x.sum(1))


@pytest.mark.parametrize("op", ["max", "min"])
def test_all_reduce_of_extremes(op: str):
    x = np.array([[3, -1], [2, 7], [5, 0]], np.int32)
    plan = schedule(
        {"data": 3},
        [value("x.0", [leaf(2, dtype=DType.I32)], Placement(per=("data",)))],
        [collective("all_reduce", ["data"], op=op)],
        [value("y.0", [leaf(2, dtype=DType.I32)], SAME)],
        {"y": "y.0"},
    )
    np.testing.assert_array_equal(run(plan, x=x)["y"], getattr(x, op)(0))


@pytest.mark.parametrize(("root", "expected"), [(0, (0, 0)), (1, (0, 1)), (2, (1, 0)), (5, (2, 1))])
def test_broadcast_counts_its_root_row_major_first_named_major(root: int, expected: tuple[int, int]):
    plan = schedule(
        {"a": 2, "b": 3},
        [value("x.0", [leaf()], Placement(per=("a", "b")))],
        [collective("broadcast", ["b", "a"], root=root)],
        [value("y.0", [leaf()], SAME)],
        {"y": "y.0"},
    )
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert run(plan, x=x)["y"] == x[expected[1], expected[0]]


def tree_split(axis: str) -> tuple[list[ir.Leaf], list[ir.Leaf]]:
    """A tree of odd, empty and scalar leaves, whole and cut in three."""
    whole = [leaf(5, path="a"), leaf(0, 4, path="b"), leaf(path="c"), leaf(2, 2, path="d")]
    return whole, [leaf(2, path="a"), leaf(0, path="b"), leaf(path="c"), leaf(2, path="d")]


def test_reduce_scatter_of_a_tree_flattens_pads_and_cuts_and_reduces_scalars():
    whole, cut = tree_split("data")
    plan = schedule(
        {"data": 3},
        [value("x.0", whole, Placement(partial=("data",)), "tree")],
        [collective("reduce_scatter", ["data"], op="sum")],
        [value("y.0", cut, Placement(split=("data",)), "tree")],
        {"y": "y.0"},
    )
    x = {
        "a": np.arange(15, dtype=np.float32).reshape(3, 5),
        "b": np.zeros((3, 0, 4), np.float32),
        "c": np.array([1, 2, 3], np.float32),
        "d": np.arange(12, dtype=np.float32).reshape(3, 2, 2),
    }
    y = run(plan, x=x)["y"]
    np.testing.assert_array_equal(y["a"], np.append(x["a"].sum(0), 0))
    assert y["b"].shape == (0,)
    assert y["c"] == 6
    np.testing.assert_array_equal(y["d"], [*x["d"].sum(0).reshape(-1), 0, 0])


def test_slice_and_all_gather_are_each_others_inverse():
    whole, cut = tree_split("data")
    plan = schedule(
        {"data": 3},
        [value("x.0", whole, SAME, "tree")],
        [ir.Slice("s.0", "x.0", ("data",), SPAN), collective("all_gather", ["data"], operand="s.0")],
        [value("s.0", cut, Placement(split=("data",)), "tree"), value("y.0", whole, SAME, "tree")],
        {"y": "y.0", "s": "s.0"},
    )
    x = {"a": np.arange(5, dtype=np.float32), "b": np.zeros((0, 4), np.float32),
         "c": np.float32(7), "d": np.arange(4, dtype=np.float32).reshape(2, 2)}  # fmt: skip
    out = run(plan, x=x)
    for name, array in x.items():
        np.testing.assert_array_equal(out["y"][name], array)
    np.testing.assert_array_equal(out["s"]["a"], [0, 1, 2, 3, 4, 0])


def test_two_cuts_pad_each_for_itself():
    # 5 elements over a: 3 + 2 padded to 3; each 3 over b: 2 + 1 padded to 2.
    plan = schedule(
        {"a": 2, "b": 2},
        [value("x.0", [leaf(5)], SAME)],
        [ir.Slice("s.0", "x.0", ("a",), SPAN), ir.Slice("t.0", "s.0", ("b",), SPAN),
         collective("all_gather", ["b"], "u.0", "t.0"), collective("all_gather", ["a"], "v.0", "u.0")],
        [value("s.0", [leaf(3)], Placement(split=("a",))),
         value("t.0", [leaf(2)], Placement(split=("a", "b"))),
         value("u.0", [leaf(3)], Placement(split=("a",))), value("v.0", [leaf(5)], SAME)],
        {"t": "t.0", "v": "v.0"},
    )  # fmt: skip
    out = run(plan, x=np.arange(1, 6, dtype=np.float32))
    np.testing.assert_array_equal(out["t"], [1, 2, 3, 0, 4, 5, 0, 0])
    np.testing.assert_array_equal(out["v"], [1, 2, 3, 4, 5])


def test_an_array_is_cut_along_its_leading_dimension():
    plan = schedule(
        {"data": 2},
        [value("x.0", [leaf(3, 2)], Placement(partial=("data",)))],
        [collective("reduce_scatter", ["data"], op="sum")],
        [value("y.0", [leaf(2, 2)], Placement(split=("data",)))],
        {"y": "y.0"},
    )
    x = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    np.testing.assert_array_equal(run(plan, x=x)["y"], [*x.sum(0), [0, 0]])


def test_all_to_all_sends_row_i_to_rank_i():
    plan = schedule(
        {"data": 3},
        [value("x.0", [leaf(6)], Placement(per=("data",)), "flat")],
        [collective("all_to_all", ["data"]), ir.LocalSum("z.0", "y.0", 3, SPAN)],
        [value("y.0", [leaf(6)], Placement(per=("data",)), "flat"),
         value("z.0", [leaf(2)], Placement(split=("data",)), "flat")],
        {"y": "y.0", "z": "z.0"},
    )  # fmt: skip
    x = np.arange(18, dtype=np.float32).reshape(3, 6)
    out = run(plan, x=x)
    np.testing.assert_array_equal(out["y"], x.reshape(3, 3, 2).swapaxes(0, 1).reshape(3, 6))
    np.testing.assert_array_equal(out["z"], x.sum(0))


def packing(ways: int, kind: str) -> ir.Schedule:
    leaves = [leaf(3, 2, path="a" if kind == "tree" else "")]
    width = 3 if kind == "tree" else 4
    parts = (ir.Part("x.0", 0, 0, 1, width - 1), ir.Part("x.0", 0, 1, width - 1, 0))
    back = tuple(ir.Part("b.0", 0, p.start, p.size, p.offset) for p in parts)
    return schedule(
        {"data": 1},
        [value("x.0", leaves, SAME, kind)],
        [ir.Pack("b.0", parts, SPAN, ways), ir.Unpack("y.0", back, SPAN, ways)],
        [value("b.0", [leaf(ways * width)], SAME, "flat"), value("y.0", leaves, SAME, kind)],
        {"b": "b.0", "y": "y.0"},
    )


def test_pack_in_rows_is_by_columns_and_unpack_undoes_it():
    x = np.arange(1, 7, dtype=np.float32).reshape(3, 2)
    out = run(packing(2, "tree"), x={"a": x})
    np.testing.assert_array_equal(out["b"], [2, 3, 1, 5, 6, 4])
    np.testing.assert_array_equal(out["y"]["a"], x)


def test_pack_of_an_array_pads_its_leading_dimension():
    x = np.arange(1, 7, dtype=np.float32).reshape(3, 2)
    out = run(packing(2, "array"), x=x)
    np.testing.assert_array_equal(out["b"], [2, 3, 4, 1, 6, 0, 0, 5])
    np.testing.assert_array_equal(out["y"], x)


def test_scale_by_a_scalar_or_its_share_and_what_does_not_count_is_zero():
    plan = schedule(
        {"data": 2},
        [value("x.0", [leaf(2)], Placement(per=("data",))), value("n.0", [leaf()], Placement(per=("data",)))],
        [ir.Scale("m.0", "x.0", "mul", "n.0", SPAN), ir.Scale("d.0", "x.0", "mul", "n.0", SPAN, over="n.0"),
         ir.Scale("h.0", "x.0", "div", 2.0, SPAN)],
        [value(f"{name}.0", [leaf(2)], Placement(per=("data",))) for name in "mdh"],
        {"m": "m.0", "d": "d.0", "h": "h.0"},
    )  # fmt: skip
    x = np.array([[1, 1], [1, np.nan]], np.float32)
    out = run(plan, x=x, n=np.array([4, 0], np.float32))
    np.testing.assert_array_equal(out["m"], [[4, 4], [0, 0]])
    np.testing.assert_array_equal(out["d"], [[1, 1], [0, 0]])
    np.testing.assert_array_equal(out["h"], [[0.5, 0.5], [0.5, np.nan]])


def test_elastic_pull_and_update_of_the_center():
    per = Placement(per=("worker",))
    plan = schedule(
        {"worker": 2},
        [value("w.0", [leaf(2, path="k")], per, "tree"), value("eta.0", [leaf()], SAME)],
        [ir.Elastic("pull.1", "w.0", "c.0", "sync", "eta.0", 0.5, ("worker",), SPAN),
         collective("all_reduce", ["worker"], "total.1", "pull.1", op="sum"),
         ir.Update("c.1", "c.0", "total.1", SPAN)],
        [value("pull.1", [leaf(2, path="k")], per, "tree"),
         value("total.1", [leaf(2, path="k")], SAME, "tree"),
         value("c.1", [leaf(2, path="k")], SAME, "tree")],
        {"pull": "pull.1"},
        states=[value("c.0", [leaf(2, path="k")], SAME, "tree")], updates={"c": "c.1"},
    )  # fmt: skip
    oracle = Oracle(plan)
    state = oracle.init()
    assert state["c"]["k"].shape == (2,)
    w = {"k": np.array([[1, 2], [5, 6]], np.float32)}
    center = {"c": {"k": np.array([1, 2], np.float32)}}
    out, state = oracle.phase("step", center, {"w": w, "eta": np.float32(0.5)})
    np.testing.assert_array_equal(out["pull"]["k"], [[0, 0], [1, 1]])
    np.testing.assert_array_equal(state["c"]["k"], [2, 3])


def test_cast_rounds_to_nearest_even_with_and_without_ml_dtypes():
    numbers = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, -3.14159, 1e-40, np.inf, np.nan, 3.4e38], np.float32)
    with np.errstate(all="ignore"):
        emulated = round_bfloat16(numbers)
    np.testing.assert_array_equal(emulated[:3], np.array([1.0, 1.0, 1 + 2**-6], np.float32))
    np.testing.assert_array_equal(convert(numbers, DType.BF16).astype(np.float32), emulated)


def test_bfloat16_without_ml_dtypes_is_held_in_float32(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    storage.cache_clear()
    try:
        stored = convert(np.array([1 + 3 * 2**-8], np.float32), DType.BF16)
        total = combine("sum", stored, stored, DType.BF16)
    finally:
        storage.cache_clear()
    assert stored.dtype == np.float32
    assert stored[0] == 1 + 2**-6
    assert total[0] == 2 + 2**-5


def fn(name: str, *, random: bool = False) -> ir.FnType:
    return ir.FnType(name, (TreeType(),), (TreeType(),), "device", random=random)


def test_map_keeps_the_containers_that_were_given():
    leaves = [leaf(2, path="0/w"), leaf(path="1")]
    plan = schedule(
        {"data": 2},
        [value("x.0", leaves, Placement(per=("data",)), "tree")],
        [ir.Map(("y.0",), "double", ("x.0",), SPAN)],
        [value("y.0", leaves, Placement(per=("data",)), "tree")],
        {"y": "y.0"},
        fns=[fn("double")],
    )

    def double(tree: tuple[dict[str, np.ndarray], np.ndarray]) -> object:
        return {"w": tree[0]["w"] * 2}, tree[1] * 2

    x = ({"w": np.ones((2, 2), np.float32)}, np.array([1, 2], np.float32))
    out, _ = Oracle(plan, {"double": double}).phase("step", {}, {"x": x})
    assert isinstance(out["y"], tuple)
    np.testing.assert_array_equal(out["y"][1], [2, 4])
    with pytest.raises(CommplanError, match=r"CP0803.*`double`"):
        Oracle(plan).phase("step", {}, {"x": x})
    with pytest.raises(CommplanError, match=r"CP0805.*has the leaves"):
        Oracle(plan, {"double": lambda tree: tree[1]}).phase("step", {}, {"x": x})
    with pytest.raises(CommplanError, match=r"CP0809.*made \(3,\)"):
        Oracle(plan, {"double": lambda tree: ({"w": np.ones(3)}, tree[1])}).phase("step", {}, {"x": x})


def records(random: bool, per: tuple[str, ...]) -> ir.Schedule:
    loaded = value("x.1", [leaf(2, 3, dtype=DType.U8)], Placement(split=("data",)), "records")
    axes = {"member": 2, "data": 2}
    batch = value("y.1", [leaf(2)], Placement(per=per, split=("data",)), "records")
    return schedule(
        axes, [],
        [ir.Read("x.1", "images", (4,), "exactly_once", 1, SPAN, split=("data",)),
         ir.Map(("y.1",), "f", ("x.1",), SPAN, per=per, per_record=True, random=random)],
        [loaded, batch], {"y": "y.1"}, fns=[fn("f", random=random)], takes=[ir.Binding("x", "x.1", True)],
    )  # fmt: skip


def test_per_record_functions_get_one_record_and_loaded_values_come_in():
    def mean(record: np.ndarray) -> np.float32:
        assert record.shape == (3,)
        return np.float32(record.mean())

    x = np.arange(12, dtype=np.uint8).reshape(4, 3)
    out, _ = Oracle(records(False, ()), {"f": mean}).phase("step", {}, {"x": x})
    np.testing.assert_array_equal(out["y"], x.mean(1))


def test_random_functions_agree_unless_told_otherwise_and_change_between_steps():
    def draw(generator: np.random.Generator, record: np.ndarray) -> np.float32:
        return np.float32(generator.random())

    x = np.zeros((4, 3), np.uint8)
    alike = Oracle(records(True, ()), {"f": draw}, seed=3)
    first = alike.phase("step", {}, {"x": x})[0]["y"]
    second = alike.phase("step", {}, {"x": x})[0]["y"]
    again = Oracle(records(True, ()), {"f": draw}, seed=3).phase("step", {}, {"x": x})[0]["y"]
    np.testing.assert_array_equal(first, again)
    assert (first != second).all()
    members = Oracle(records(True, ("member",)), {"f": draw}).phase("step", {}, {"x": x})[0]["y"]
    assert members.shape == (2, 4)
    assert (members[0] != members[1]).all()


def test_a_value_that_should_be_same_is_checked():
    plan = schedule(
        {"data": 2},
        [value("x.0", [leaf()], Placement(per=("data",)))],
        [ir.Scale("y.0", "x.0", "mul", 1.0, SPAN)],
        [value("y.0", [leaf()], SAME)],  # wrong: nothing made it the same
        {"y": "y.0"},
    )
    with pytest.raises(AssertionError, match=r"rank \(1,\) holds other data"):
        run(plan, x=np.array([1, 2], np.float32))
    assert run(plan, x=np.array([2, 2], np.float32))["y"] == 2


def test_wrong_calls_are_named():
    plan = schedule({"data": 2}, [value("x.0", [leaf()], SAME)], [], [], {"x": "x.0"})
    for inputs, code in [
        ({}, "CP0804"),
        ({"x": np.float32(1), "z": 1}, "CP0804"),
        ({"x": np.ones(3)}, "CP0805"),
    ]:
        with pytest.raises(CommplanError, match=code):
            run(plan, **inputs)
    with pytest.raises(CommplanError, match=r"CP0817.*no phase `walk`"):
        Oracle(plan).phase("walk", {}, {})


def test_what_needs_the_exchange_runtime_is_refused():
    w = value("w.0", [leaf()], Placement(per=("worker",)))
    center = value("c.0", [leaf()], SAME)
    elastic = ir.Elastic("p.1", "w.0", "c.0", "async", 0.1, 0.1, ("worker",), SPAN, result="c.1")
    plan = schedule(
        {"worker": 2}, [w, center], [elastic], [value("p.1", [leaf()], w.placement)], {"p": "p.1"}
    )
    with pytest.raises(CommplanError, match=r"CP0808.*elastic by async"):
        run(plan, w=np.ones(2, np.float32), c=np.float32(1))
    read = ir.Read("r.1", "s", (4,), "exactly_once", 1, SPAN)
    plan = schedule({"worker": 2}, [], [read], [value("r.1", [leaf(4)], SAME, "records")], {"r": "r.1"})
    with pytest.raises(CommplanError, match=r"CP0808.*source `s`"):
        run(plan)
