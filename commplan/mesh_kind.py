"""Meshes, which are named axes of devices or the ranks of a communicator, and checks of their sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from commplan.diagnostics import fail, type_of
from commplan.ir.plan import Plan
from commplan.ir.schedule import Schedule


def is_communicator(mesh: Any) -> bool:
    """Whether `mesh` is an `mpi4py` communicator. Does not import MPI."""
    return all(hasattr(mesh, name) for name in ("Get_size", "Get_rank", "Split"))


def devices_of(mesh: Any) -> list[Any]:
    """The devices of `mesh` in order; none for a mapping of sizes, and for an abstract mesh."""
    try:
        return list(mesh.devices.flat)
    except (AttributeError, ValueError):  # an abstract mesh has the attribute, which raises
        return []


def shares_memory(mesh: Any) -> bool:
    """Whether all devices of `mesh` are CPU devices of one process, so that no data crosses a link."""
    devices = devices_of(mesh)
    processes = {getattr(device, "process_index", None) for device in devices}
    return len(processes) == 1 and all(getattr(device, "platform", "") == "cpu" for device in devices)


def mesh_sizes(mesh: Any) -> dict[str, int]:
    """The axis sizes of a mesh or mapping."""
    shape: Any = getattr(mesh, "shape", mesh)
    if not hasattr(shape, "items"):
        expected = "expected a jax.sharding.Mesh, an mpi4py communicator, or axis sizes"
        fail("CP0722", f"{type_of(mesh)} is not a mesh", expected)
    for name, size in shape.items():
        if size is None:  # otherwise it would count as a size to be inferred
            message = f"axis `{name}` has no size in the mesh"
            fail("CP0708", message, "a mesh has a whole number for every axis")
    return {str(name): size for name, size in shape.items()}


def check_sizes_agree(plan: Plan, sizes: Mapping[str, int], mesh: Mapping[str, int]) -> None:
    """Check that sizes do not contradict the mesh (CP0708)."""
    for name, size in sizes.items():
        if mesh.get(name, size) != size:
            message = f"axis `{name}` has size {size} in `axes` and {mesh[name]} in the mesh"
            fail("CP0708", message, "give the mesh alone", file=plan.file)


def check_binding(schedule: Schedule, digest: str, mesh: Any) -> None:
    """Check that a mesh has the sizes of the schedule (CP1006). Missing axes are reported by `Run`."""
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
    expected = f"compiled for {_sizes(compiled_sizes)} (schedule {digest})"
    fix = "bind to the mesh that it was compiled for, or compile again with this one"
    fail("CP1006", message, expected, f"found {_sizes(mesh_axes)}", fix, file=schedule.file)


def _sizes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items()) or "no axes"
