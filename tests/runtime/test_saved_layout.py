"""Values of checkpoints whose axes have another order."""

from __future__ import annotations

import pytest

from commplan.diagnostics import CommplanError
from commplan.runtime.saved_layout import SavedLayout, SavedLeaf, SavedValue, check, is_as_saved

ROWS_FIRST, COLUMNS_FIRST = SavedLayout({"a": 2, "b": 2}), SavedLayout({"b": 2, "a": 2})


def test_leading_axes_of_equal_sizes_in_another_order_are_refused() -> None:
    leaf = SavedLeaf("w", (2, 2, 5), "float32", (5,))
    assert is_as_saved(leaf, leaf, ROWS_FIRST, ROWS_FIRST)
    assert not is_as_saved(leaf, leaf, ROWS_FIRST, COLUMNS_FIRST)
    with pytest.raises(CommplanError, match="CP0871"):
        check("w", SavedValue(ROWS_FIRST, (leaf,)), SavedValue(COLUMNS_FIRST, (leaf,)), "p.plan")


def test_a_cut_along_axes_of_equal_sizes_in_another_order_is_another_layout() -> None:
    leaf = SavedLeaf("w", (8,), "float32", (7,))
    rows, columns = SavedLayout(split={"a": 2, "b": 2}), SavedLayout(split={"b": 2, "a": 2})
    assert is_as_saved(leaf, leaf, rows, rows) and not is_as_saved(leaf, leaf, rows, columns)
