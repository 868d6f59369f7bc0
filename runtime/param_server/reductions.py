"""Sums and pulls of a server, in NumPy: the same bits every time for the same order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from commplan.ir.types import DType
from commplan.runtime.input.sources.record_convert import numpy_dtype
from commplan.runtime.param_server.store import Array, converted


class Sum:
    """Terms of an update of one unit, added as they are given.

    dtype: of the gradient; terms may come in a narrower one. accumulate: in which they are added.
    """

    def __init__(self, dtype: DType, accumulate: DType) -> None:
        self.dtype, self.accumulate = dtype, accumulate
        self.total: Array | None = None
        self.weights: list[Array] = []

    def add(self, term: Array, weight: Array | None) -> bool:
        """Add `term` times `weight`; weight 0 adds zero, NaN or not. Returns whether the sum owns `term`."""
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
        """The sum or the mean, in the gradient's dtype; the sum begins again. A mean is divided before it is
        rounded to that dtype, which need not hold the sum."""
        total, weights = self.total, self.weights
        assert total is not None, "a sum without terms"
        self.total, self.weights = None, []
        if mean:
            divisor = _added(weights) if weights else np.asarray(terms)
            by = converted(np.asarray(divisor), self.accumulate)
            with np.errstate(all="ignore"):  # the mean of no records is zero
                total = np.divide(total, by, out=total) if by else np.zeros_like(total)
        return converted(total, self.dtype)


def _added(weights: Sequence[Array]) -> Array:
    """Their sum: of integers in i64, where records of all workers have room, of floats in f64."""
    wide = np.int64 if weights[0].dtype.kind in "iub" else np.float64
    with np.errstate(all="ignore"):
        return np.asarray(sum(weight.astype(wide) for weight in weights))


def pulled(own: Array, center: Array, eta: Array, rho: Array, wire: DType) -> Array:
    """d = eta * rho * (W - C), in f32 at least and rounded once to the dtype of C; C <- C + d in place
    (Zhang, Choromanska, LeCun 2015).

    Returns d in `wire`. What C gains is what travels, so that no part of it is lost to rounding.
    """
    dtype = center.dtype
    wide = np.promote_types(np.float32, dtype)
    with np.errstate(all="ignore"):
        factor = np.multiply(eta.astype(wide), rho.astype(wide))
        pull = np.subtract(own.astype(wide, copy=False), center, dtype=wide)
        np.multiply(pull, factor, out=pull)
        pull = pull.astype(dtype, copy=False)
        sent = converted(pull, wire)
        if sent is not pull:
            pull = sent.astype(dtype)
        np.add(center, pull, out=center)
    return sent


def scalar(value: float, dtype: DType) -> Array:
    """`value` as an array without dimensions."""
    return np.asarray(value, numpy_dtype(dtype))
