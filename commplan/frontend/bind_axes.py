"""Bind the sizes of axes, and check the rules that depend on them.

`bind_axes` is the first step of a compilation. The other functions check the mesh that a plan is compiled
for, or that a compiled schedule is bound to. A mesh is a `jax.sharding.Mesh`, an `mpi4py` communicator, or a
mapping of axis sizes. This module imports neither JAX nor MPI.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any, SupportsIndex

from commplan.diagnostics import Diagnostic, Note, Span, did_you_mean, fail, fail_if, type_of
from commplan.ir.plan import Axis as PlanAxis
from commplan.ir.plan import AxisKind, Plan
from commplan.ir.schedule import Axis, Schedule
from commplan.ir.types import LARGEST, MOST_SERVERS


def bind_axes(plan: Plan, sizes: Mapping[str, int]) -> tuple[Axis, ...]:
    """The axes of `plan` with their sizes, in the plan's order.

    Args:
        plan: The plan.
        sizes: The number of ranks along axes by name. It must contain the axes declared `?` and may contain
            other axes of the plan.

    Raises:
        CommplanError: CP0706 (no size), CP0708 (a size other than the declared one, or an invalid one) and
            CP0709 (no such axis), for all axes at once. If there are none of these, CP0710 for all stages
            with a rule that the sizes violate.
    """
    axis_names = {axis.name for axis in plan.axes}
    problems = [_unknown_axis(plan, name) for name in sizes if name not in axis_names]
    bound: list[Axis] = []
    for axis in plan.axes:
        size = _size(plan, axis, sizes.get(axis.name))
        if isinstance(size, Diagnostic):
            problems.append(size)
        else:
            bound.append(Axis(axis.name, axis.kind, size))
    fail_if(problems)
    counts = {axis.name: axis.size for axis in bound}
    for stage in (stage for phase in plan.phases for stage in phase.stages):
        violation = stage.violation(lambda axes: math.prod(counts[axis] for axis in axes))
        if violation is not None:
            problems.append(violation.diagnostic("CP0710", stage.span, plan.file))
    fail_if(problems)
    return tuple(bound)


def _size(plan: Plan, axis: PlanAxis, requested: object) -> int | Diagnostic:
    """The size of `axis`, from the plan if `requested` is None; or the diagnostic of an error."""
    size = axis.size if requested is None else _whole(requested)
    if size is None and requested is not None:
        message = f"axis `{axis.name}` has size {requested!r}, which is not a whole number"
        return _problem(plan, "CP0708", message, axis.span, "expected the number of ranks along it")
    if size is None:
        how = (
            f"give its size when compiling: a mesh with an axis `{axis.name}`, "
            f"axes={{{axis.name!r}: N}}, or --axis {axis.name}=N"
        )
        message = f"axis `{axis.name}` has no size yet: it is declared `?`"
        return _problem(plan, "CP0706", message, axis.span, how)
    if size < 1 or (axis.size is not None and size != axis.size):
        declared = "at least 1" if axis.size is None else str(axis.size)
        message = f"axis `{axis.name}` has size {size}, but the plan declares {declared}"
        remedy = f"use a mesh whose axis `{axis.name}` has that size, or declare `{axis.name} = ?`"
        return _problem(plan, "CP0708", message, axis.span, f"expected {declared}, found {size}", remedy)
    most = MOST_SERVERS if axis.kind is AxisKind.SERVER else LARGEST
    if size > most:
        message = f"axis `{axis.name}` has size {size}, and no machine has so many ranks"
        return _problem(plan, "CP0708", message, axis.span, f"at most {most} can be counted")
    return size


def check_mesh(plan: Plan, mesh: Mapping[str, int]) -> None:
    """Raise CP0707 for all axes of the plan that a mesh lacks. Servers are not axes of a mesh.

    Args:
        plan: The plan.
        mesh: The axis sizes of the mesh by name. Sizes are not checked here, and further axes are allowed.
    """
    sizes = _listed(mesh)
    problems: list[Diagnostic] = []
    for axis in plan.axes:
        if axis.kind is not AxisKind.SERVER and axis.name not in mesh:
            message, size = f"the mesh has no axis `{axis.name}`", axis.size or "your choice"
            expected = f"expected an axis `{axis.name}` of size {size}, found {sizes}"
            fix = _mesh_fix(axis.name, axis.kind, axis.size)
            problems.append(_problem(plan, "CP0707", message, axis.span, expected, fix))
    fail_if(problems)


def is_communicator(mesh: Any) -> bool:
    """Whether `mesh` is an `mpi4py` communicator. Does not import MPI."""
    return all(hasattr(mesh, name) for name in ("Get_size", "Get_rank", "Split"))


def devices_of(mesh: Any) -> list[Any]:
    """The devices of `mesh` in row-major order; empty for a mapping of sizes and for an abstract mesh."""
    try:
        return list(mesh.devices.flat)
    except (AttributeError, ValueError):  # an abstract mesh has the attribute, which raises
        return []


def shares_memory(mesh: Any) -> bool:
    """Whether all devices of `mesh` are CPU devices of one process, so that no data crosses a link.

    False for a mesh without devices, such as a mapping of sizes.
    """
    devices = devices_of(mesh)
    processes = {getattr(device, "process_index", None) for device in devices}
    return len(processes) == 1 and all(getattr(device, "platform", "") == "cpu" for device in devices)


def mesh_sizes(mesh: Any) -> dict[str, int]:
    """The axis sizes by name of a mesh or a mapping of sizes.

    Raises:
        CommplanError: CP0722 if `mesh` is neither. CP0708 if a size is None.
    """
    shape: Any = getattr(mesh, "shape", mesh)
    if not hasattr(shape, "items"):
        expected = "expected a jax.sharding.Mesh, an mpi4py communicator, or axis sizes"
        fail("CP0722", f"{type_of(mesh)} is not a mesh", expected)
    for name, size in shape.items():
        if size is None:  # `bind_axes` would take it for an axis without a size
            message = f"axis `{name}` has no size in the mesh"
            fail("CP0708", message, "a mesh has a whole number for every axis")
    return {str(name): size for name, size in shape.items()}


def check_sizes_agree(plan: Plan, sizes: Mapping[str, int], mesh: Mapping[str, int]) -> None:
    """Raise CP0708 if `sizes` and `mesh` have different sizes for an axis.

    Args:
        plan: The plan, for the error.
        sizes: Axis sizes from the argument `axes` of a compilation, by name.
        mesh: The axis sizes of the mesh, by name.
    """
    for name, size in sizes.items():
        if mesh.get(name, size) != size:
            message = f"axis `{name}` has size {size} in `axes` and {mesh[name]} in the mesh"
            fail("CP0708", message, "give the mesh alone", file=plan.file)


def check_binding(schedule: Schedule, digest: str, mesh: Any) -> None:
    """Check that a mesh has the sizes of the schedule.

    Communicators are not checked; the runtime checks them. Neither are meshes that lack an axis, which `Run`
    reports.

    Args:
        schedule: The schedule.
        digest: The digest of the schedule, to show in the error.
        mesh: The mesh that the schedule is bound to.

    Raises:
        CommplanError: CP0801 if `mesh` is not a mesh, CP0841 if the schedule was compiled for a communicator,
            or CP1006 if an axis has another size.
    """
    if is_communicator(mesh):  # checked by the runtime
        return
    compiled_sizes = schedule.mesh_sizes
    shape: Any = getattr(mesh, "shape", {})
    if not hasattr(shape, "items"):
        message = f"{type_of(mesh)} is not a mesh"
        fail("CP0801", message, "expected a jax.sharding.Mesh, or an mpi4py communicator", file=schedule.file)
    if schedule.backend == "mpi":
        fail(
            "CP0841",
            f"program `{schedule.plan}` was compiled for the ranks of a communicator, and is bound to a mesh",
            "compile it with the mesh: plan.compile(mesh)",
            file=schedule.file,
        )
    mesh_axes = {str(name): int(size) for name, size in dict(shape).items()}
    if any(name not in mesh_axes for name in compiled_sizes) or all(
        mesh_axes[name] == size for name, size in compiled_sizes.items()
    ):
        return
    message = f"program `{schedule.plan}` was compiled for another mesh"
    expected = f"compiled for {_listed(compiled_sizes)} (schedule {digest})"
    fix = "bind to the mesh that it was compiled for, or compile again with this one"
    fail("CP1006", message, expected, f"found {_listed(mesh_axes)}", fix, file=schedule.file)


def _listed(sizes: Mapping[str, int]) -> str:
    """The axes as `data=4, model=2`, for errors."""
    return ", ".join(f"{name}={size}" for name, size in sizes.items()) or "no axes"


def _whole(size: object) -> int | None:
    """`size` as an int if it is a whole number of any type, else None. A bool is not a number."""
    if isinstance(size, bool) or not isinstance(size, SupportsIndex):
        return None
    return operator.index(size)


def _mesh_fix(name: str, kind: AxisKind, size: int | None) -> str:
    """The fix for a mesh that lacks an axis; `size` is the declared size, or None for `?`."""
    spread = "members are spread over devices too: " if kind is AxisKind.ENSEMBLE else ""
    if size is not None:
        open_size = f"`{kind.value} {name} = ?` in the plan takes any size"
        return f"{spread}add an axis `{name}` of size {size} to the mesh; {open_size}"
    if spread:
        return f"{spread}add an axis `{name}` to the mesh, of size 1 if need be"
    return f"add an axis `{name}` to the mesh, of size 1 if nothing is replicated along it"


def _unknown_axis(plan: Plan, name: str) -> Diagnostic:
    hint = did_you_mean(name, [axis.name for axis in plan.axes], "its axes are:")
    return _problem(plan, "CP0709", f"plan `{plan.name}` has no axis `{name}`", None, hint)


def _problem(plan: Plan, code: str, message: str, span: Span | None, *notes: str) -> Diagnostic:
    return Diagnostic(code, message, span, tuple(Note(note) for note in notes), file=plan.file)
