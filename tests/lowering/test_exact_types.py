"""Operations that the prover treats as exact are exact on devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from commplan.ir.symbolic.rounding import EXACT
from commplan.ir.types import DType
from commplan.lowering.jax.ops import jax_dtype


def values(dtype: DType) -> Any:
    """All values of a type of at most 16 bits."""
    if dtype is DType.BOOL:
        return np.array([False, True])
    unsigned = np.uint8 if dtype.nbytes == 1 else np.uint16
    return np.arange(2 ** (8 * dtype.nbytes)).astype(unsigned).view(jax_dtype(dtype))


def test_a_type_that_holds_another_gives_its_values_back() -> None:
    pairs = [(narrow, wide) for narrow, types in EXACT.items() for wide in types if wide != narrow]
    assert len(pairs) > 20
    assert all(narrow.nbytes <= 2 and wide.nbytes <= 4 for narrow, wide in pairs)

    def widened(arrays: dict[DType, Any]) -> list[Any]:
        return [arrays[narrow].astype(jax_dtype(wide)) for narrow, wide in pairs]

    def narrowed(wide: list[Any]) -> list[Any]:
        return [x.astype(jax_dtype(narrow)) for x, (narrow, _) in zip(wide, pairs, strict=True)]

    arrays = {narrow: values(narrow) for narrow in EXACT}
    results = jax.jit(narrowed)(jax.jit(widened)(jax.tree.map(jnp.asarray, arrays)))
    for back, (narrow, wide) in zip(results, pairs, strict=True):
        expected = arrays[narrow]
        number = ~np.isnan(expected.astype(np.float32)) if narrow.is_float else np.ones(len(expected), bool)
        assert np.asarray(back)[number].tobytes() == expected[number].tobytes(), (narrow, wide)
        assert np.isnan(np.asarray(back)[~number].astype(np.float32)).all(), (narrow, wide)  # of any payload
