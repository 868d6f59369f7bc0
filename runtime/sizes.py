"""Axis sizes from a communicator: every rank is one combination of indices along the plan's axes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from commplan.diagnostics import fail
from commplan.ir.plan import AxisKind, Plan
from commplan.runtime.ranks import check_communicator


def sizes_of(plan: Plan, comm: Any, given: Mapping[str, int]) -> dict[str, int]:
    """`given`, and the size of the one axis that is declared `?` and not given: the ranks that are left.

    Raises CP0840 where the sizes do not make up the ranks of `comm`, CP0843 and CP0844 for a communicator
    that cannot be used.
    """
    check_communicator(comm, plan.file)
    count = int(comm.Get_size())
    sizes = dict(given)
    known: dict[str, int] = {}
    unknown: list[str] = []
    for axis in plan.axes:
        size = sizes.get(axis.name, axis.size)
        if axis.kind is AxisKind.SERVER:
            continue
        if size is None:
            unknown.append(axis.name)
        else:
            known[axis.name] = size
    whole = all(type(size) is int and size > 0 for size in known.values())
    if len(unknown) > 1 or not whole:
        return sizes  # which the compiler names, axis by axis
    product = math.prod(known.values())
    if unknown and count % product == 0:
        return sizes | {unknown[0]: count // product}
    if product != count or unknown:
        axes = " x ".join(f"{name} = {size}" for name, size in known.items()) or "no axes of known size"
        wanted = f"a multiple of {product}" if unknown else str(product)
        fail(
            "CP0840",
            f"the plan needs {wanted} ranks, and the communicator has {count}",
            f"its axes: {axes}",
            f"start {wanted}: mpirun -n {product}; or split the communicator",
            file=plan.file,
        )
    return sizes
