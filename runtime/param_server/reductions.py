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
        """Add `term`, times `weight` in the gradient's dtype; whether `term` is the sum's own now."""
        x = term
        with np.errstate(all="ignore"):
            if weight is not None:
                x = converted(x, self.dtype)
                x = np.multiply(x, converted(weight, self.dtype))
                self.weights.append(weight)
            x = converted(x, self.accumulate)
            if self.total is None:
                self.total = x
                return x is term
            np.add(self.total, x, out=self.total)
        return False

    def take(self, terms: int, *, mean: bool) -> Array:
        """The sum or the mean, in the gradient's dtype; the sum begins again."""
        total, weights = self.total, self.weights
        assert total is not None, "a sum without terms"
        self.total, self.weights = None, []
        result = converted(total, self.dtype)
        if not mean:
            return result
        divisor = _added(weights) if weights else np.asarray(terms)
        by = converted(np.asarray(divisor), self.dtype)
        if not by:  # a weighted mean of no records
            return np.zeros_like(result)
        with np.errstate(all="ignore"):
            return np.divide(result, by, out=result)


def _added(weights: Sequence[Array]) -> Array:
    """Their sum; that of whole numbers in i64, where records of all workers have room."""
    total = weights[0].astype(np.int64) if weights[0].dtype.kind == "i" else weights[0].copy()
    with np.errstate(all="ignore"):
        for weight in weights[1:]:
            total = total + weight
    return total


def pulled(own: Array, center: Array, eta: Array, rho: Array, wire: DType) -> Array:
    """d = eta * rho * (W - C), each step rounded to the dtype of C; C <- C + d in place (Zhang, Choromanska,
    LeCun 2015).

    Returns d in `wire`. What C gains is what travels, so that no part of it is lost to rounding.
    """
    dtype = center.dtype
    with np.errstate(all="ignore"):
        factor = np.multiply(eta.astype(dtype), rho.astype(dtype))
        pull = np.subtract(own.astype(dtype, copy=False), center)
        np.multiply(pull, factor, out=pull)
        sent = converted(pull, wire)
        if sent is not pull:
            pull = sent.astype(dtype)
        np.add(center, pull, out=center)
    return sent


def scalar(value: float, dtype: DType) -> Array:
    """`value` as an array without dimensions."""
    return np.asarray(value, numpy_dtype(dtype))
