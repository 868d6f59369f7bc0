"""The whole leaves of pieces of split values."""

from __future__ import annotations

import pytest

from commplan.ir.schedule import Axis
from commplan.ir.shard_shapes import cut
from commplan.ir.transfer import ValueTypes
from commplan.ir.types import AxisKind, DType, Placement
from commplan.ir.values import Kind, Leaf, Value

AXES = (Axis("a", AxisKind.REPLICA, 2), Axis("b", AxisKind.REPLICA, 3))


@pytest.mark.parametrize(
    ("kind", "piece", "whole"),
    [("tree", (5,), (30,)), ("tree", (), ()), ("array", (5,), (30,)), ("array", (5, 7, 2), (30, 7, 2))],
)
def test_a_whole_leaf_has_the_rows_of_all_shards(
    kind: Kind, piece: tuple[int, ...], whole: tuple[int, ...]
) -> None:
    leaf = Leaf("w", piece, DType.F32)
    value = Value("x.0", kind, (leaf,), Placement(split=("a", "b")))
    (formed,) = ValueTypes(AXES, {}).with_whole(value).whole
    assert formed.shape == whole
    assert cut(kind, formed, 6) == leaf
