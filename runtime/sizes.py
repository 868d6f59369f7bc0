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

    Servers are ranks of their own, after all others. Raises CP0840 where the sizes do not make up the ranks
    of `comm`, CP0843 and CP0844 for a communicator that cannot be used.
    """
    check_communicator(comm, plan.file)
    count = int(comm.Get_size())
    sizes = dict(given)
    known: dict[str, int] = {}
    unknown: list[str] = []
    servers: dict[str, int] = {}
    for axis in plan.axes:
        size = sizes.get(axis.name, axis.size)
        if axis.kind is AxisKind.SERVER:
            servers[axis.name] = size if type(size) is int and size > 0 else 1  # else the compiler names it
            continue
        if size is None:
            unknown.append(axis.name)
        else:
            known[axis.name] = size
    whole = all(type(size) is int and size > 0 for size in known.values())
    if len(unknown) > 1 or not whole:
        return sizes  # which the compiler names, axis by axis
    product, beside = math.prod(known.values()), sum(servers.values())
    workers = count - beside
    if unknown and workers > 0 and workers % product == 0:
        return sizes | {unknown[0]: workers // product}
    if product != workers or unknown:
        axes = " x ".join(f"{name} = {size}" for name, size in known.items()) or "no axes of known size"
        more = f" and {beside} for servers" if beside and unknown else ""
        wanted = f"a multiple of {product}" if unknown else str(product + beside)
        named = ", ".join(f"{name} = {size}" for name, size in servers.items())
        many = f"a multiple of {product}" if unknown else f"{product}"
        fail(
            "CP0840",
            f"the plan needs {wanted} ranks{more}, and the communicator has {count}",
            f"ranks for its workers: {many} ({axes})" if servers else f"its axes: {axes}",
            *([f"and for its servers, after them: {beside} ({named})"] if servers else []),
            f"start {wanted}{more}: mpirun -n {product + beside}; or split the communicator",
            file=plan.file,
        )
    return sizes
