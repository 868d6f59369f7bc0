"""A jitted call over a list of tensors: the measured work of every system inside JAX."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.harness.work import Floats, Operation

jax: Any = importlib.import_module("jax")
Array = Any


class Jitted(Operation):
    """The jitted `call`. `given`: the operands of each variant. `note`: its remark in the table."""

    def __init__(
        self, call: Callable[[list[Array]], list[Array]], given: list[list[Array]], note: str = ""
    ) -> None:
        self.note = note
        self._call, self._given = call, given
        self._operands = given[0]
        self._results: list[Array] = []

    def fill(self, variant: int) -> None:
        self._operands = self._given[variant]
        self._results = []

    def run(self) -> None:
        self._results = jax.block_until_ready(self._call(self._operands))

    def results(self) -> list[Floats]:
        return [np.asarray(x.addressable_data(0)).reshape(-1) for x in self._results]
