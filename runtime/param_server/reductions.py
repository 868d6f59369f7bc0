"""Sums and pulls of a server in NumPy, with reproducible bits for the same order of terms."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from commplan.ir.types import DType
from commplan.runtime.input.sources.record_convert import numpy_dtype
from commplan.runtime.param_server.store import Array, converted


class Sum:
    """The sum of the terms of one unit, in the order in which they are added.

    Args:
        dtype: The dtype of the gradient and of results. Terms may have a narrower one.
        accumulate: The dtype of the sum.

    Attributes:
        total: The sum so far, in the dtype `accumulate`; None without terms.
        weights: The weights so far; empty if terms have none.
    """

    def __init__(self, dtype: DType, accumulate: DType) -> None:
        self.dtype, self.accumulate = dtype, accumulate
        self.total: Array | None = None
        self.weights: list[Array] = []

    def add(self, term: Array, weight: Array | None) -> bool:
        """Add `term` times `weight`; weight 0 adds zero, even for NaN.

        Args:
            term: The term of a worker, a flat array.
            weight: An array without dimensions, or None for no weight. All terms of a sum have one, or none.

        Returns:
            Whether the sum uses the memory of `term` from now on, and writes to it.
        """
        x = converted(term, self.accumulate)
        with np.errstate(all="ignore"):
            if weight is not None:
                x = np.multiply(x, converted(weight, self.accumulate)) if weight else np.zeros_like(x)
                self.weights.append(weight)
            if self.total is None:
                self.total = x
                return x is term
            np.add(self.total, x, out=self.total)
        return False

    def take(self, terms: int, *, mean: bool) -> Array:
        """Return the sum or the mean in the gradient's dtype, and reset the sum.

        A mean is divided before it is rounded to this dtype, which might not represent the sum. The divisor
        is the sum of the weights, or without weights the number of terms. The mean of weights 0 is zero.

        Args:
            terms: The number of terms that were added, at least one.
            mean: Whether to return the mean.
        """
        total, weights = self.total, self.weights
        assert total is not None, "a sum without terms"
        self.total, self.weights = None, []
        if mean:
            divisor = converted(np.asarray(_add_weights(weights) if weights else terms), self.accumulate)
            with np.errstate(all="ignore"):
                total = np.divide(total, divisor, out=total) if divisor else np.zeros_like(total)
        return converted(total, self.dtype)


def _add_weights(weights: Sequence[Array]) -> Array:
    """The sum of weights: of integers in i64, which has room for all records, of floats in f64."""
    wide = np.int64 if weights[0].dtype.kind in "iub" else np.float64
    with np.errstate(all="ignore"):
        return np.asarray(sum(weight.astype(wide) for weight in weights))


def pulled(local: Array, center: Array, eta: Array, rho: Array, wire: DType) -> Array:
    """Apply the force of elastic averaging (Zhang, Choromanska, LeCun 2015).

    d = eta * rho * (W - C), computed in f32 or wider, and rounded to the dtype of C and to `wire`;
    C <- C + d in place. C changes by exactly the value that is sent, so rounding loses nothing.

    Args:
        local: W, the weights of the worker, a flat array of any float dtype.
        center: C, the weights of the server, of the same shape; updated.
        eta: A factor, an array without dimensions.
        rho: Another factor.
        wire: The dtype of the answer.

    Returns:
        d in the dtype `wire`.
    """
    dtype = center.dtype
    wide = np.promote_types(np.float32, dtype)
    with np.errstate(all="ignore"):
        factor = np.multiply(eta.astype(wide), rho.astype(wide))
        pull = np.subtract(local.astype(wide, copy=False), center, dtype=wide)
        np.multiply(pull, factor, out=pull)
        pull = pull.astype(dtype, copy=False)
        sent = converted(pull, wire)
        if sent is not pull:  # Add the rounded value.
            pull = sent.astype(dtype)
        np.add(center, pull, out=center)
    return sent


def scalar(value: float, dtype: DType) -> Array:
    """`value` as an array without dimensions."""
    return np.asarray(value, numpy_dtype(dtype))
