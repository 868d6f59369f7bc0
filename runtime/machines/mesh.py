"""A mesh of devices as a machine: arrays are global, and `run.spmd` is a shard_map.

`machine_for` selects the machine of `Program.bind`. `check_mesh` and `check_processes` check a mesh.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal, NoReturn, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from commplan.diagnostics import fail, type_of
from commplan.frontend.bind_axes import is_communicator
from commplan.ir import schedule as ir
from commplan.ir.axes import groups
from commplan.ir.types import Placement
from commplan.lowering.audit import CompiledCollective, HloError, audit_text
from commplan.lowering.jax import _compat, _context
from commplan.lowering.jax.check import Layout
from commplan.lowering.jax.collectives.lax_backend import LaxBackend
from commplan.lowering.jax.layout import global_shape, spec
from commplan.lowering.jax.listing import collectives_of
from commplan.lowering.jax.pytree import flatten
from commplan.lowering.jax.servers import check_servers
from commplan.lowering.programs import spreads
from commplan.recorder.notice import NOTICE_S, Notice
from commplan.runtime.machines import coordinator
from commplan.runtime.machines.explicit import explicit_axes, resharded
from commplan.runtime.machines.gather import Absence, gathered, gathered_values
from commplan.runtime.machines.machine import BindRequest, Issue, Machine, agree, place_of, shortened
from commplan.runtime.machines.mesh_input import MeshInput
from commplan.runtime.machines.placing import Cut, bounds
from commplan.runtime.observe import alone, watchdog
from commplan.runtime.observe.abort_hook import report_once
from commplan.runtime.observe.calls import Calls
from commplan.runtime.observe.joint_calls import JointCalls


@dataclasses.dataclass(frozen=True, eq=False)
class MeshMachine:
    """A mesh of devices as a machine. `machine.Machine` documents the methods.

    Attributes:
        mesh: The `jax.sharding.Mesh` of the run, or that of a member.
        sizes: The sizes of the mesh axes that the plan names.
        file: The plan's file, for errors.
        levels: The levels of the topology over which each axis is spread, by axis; empty without a topology.
        calls: The counter of steps that the watchdog reads, or None.
        whole: For a member's machine, the processes of the whole mesh; empty for a run's.
        unwatched: The calls of steps if `calls` is None.
    """

    mesh: Any
    sizes: Mapping[str, int]
    file: str = ""
    levels: Mapping[str, tuple[ir.Spread, ...]] = dataclasses.field(default_factory=dict[str, Any])
    calls: Calls | None = None
    whole: tuple[int, ...] = ()
    unwatched: JointCalls = dataclasses.field(default_factory=JointCalls)

    @property
    def layout(self) -> Layout:
        return "global"

    @property
    def role(self) -> Literal["worker"]:
        return "worker"

    def serve(self, context: Any, **options: Any) -> None:
        """Return None: the plan's servers are other ranks."""

    @property
    def backend(self) -> LaxBackend:
        platform = self.mesh.devices.flat[0].platform
        platform = "gpu" if platform in ("cuda", "rocm") else platform
        is_whole_mesh = all(size == 1 for name, size in self.mesh.shape.items() if name not in self.sizes)
        return LaxBackend(platform, self.sizes, self.file, self.levels, is_whole_mesh)

    @property
    def input(self) -> MeshInput:
        return self._input

    @functools.cached_property
    def _input(self) -> MeshInput:
        processes = self.whole or self.participants()
        return MeshInput(self.mesh, self.sizes, self.file, processes, on_cpu=self.backend.on_cpu)

    def context(self) -> contextlib.AbstractContextManager[Any]:
        return _context.in_mesh(self.mesh)

    def manual(self) -> dict[str, int]:
        return _compat.manual_axes()

    def spread(
        self, body: Callable[..., Any], in_specs: Any, out_specs: Any, *, check_vma: bool = True
    ) -> Callable[..., Any]:
        """Map `body` by `jax.shard_map` over the plan's axes; other mesh axes are left to the compiler.

        On Explicit axes the arguments are resharded first, because JAX requires that types have the specs.
        """
        names = frozenset(self.sizes)
        mapped = _compat.shard_map(
            body,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=names,
            check_vma=check_vma,
        )

        def call(*trees: Any) -> Any:
            with _context.traced_in(self.mesh, self.file):
                return mapped(*trees)

        if explicit_axes(self.mesh).isdisjoint(self.sizes):
            return call

        def placed(specs: Any, tree: Any) -> Any:
            def placed_part(declared: PartitionSpec, part: Any) -> Any:
                reshard = functools.partial(resharded, declared, self.mesh, self.sizes, self.file)
                return jax.tree_util.tree_map(reshard, part)

            # A spec may be the prefix of a tree.
            return jax.tree_util.tree_map(placed_part, specs, tree, is_leaf=_is_spec)

        return lambda *trees: call(
            *(placed(specs, tree) for specs, tree in zip(in_specs, trees, strict=True))
        )

    def zeros(self, value: ir.Value, leaf: ir.Leaf) -> Array:
        """A leaf of zeros, made shard by shard: nothing is sent, and empty leaves are sharded, too."""
        shape = global_shape(value, leaf, self.sizes)
        sharding = NamedSharding(self.mesh, spec(value.placement, scalar=not leaf.shape))

        def piece(_: object) -> Any:  # A new array: JAX may use it without a copy, and states are donated.
            return np.zeros(sharding.shard_shape(shape), jnp.dtype(leaf.dtype.numpy_name))

        with _context.explicit():
            return jax.make_array_from_callback(shape, sharding, piece)

    def process(self) -> tuple[int, int]:
        return int(jax.process_index()), int(jax.process_count())

    def participants(self) -> tuple[int, ...]:
        processes = processes_of(self.mesh)
        return processes if jax.process_index() in processes else (int(jax.process_index()),)

    @property
    def joint(self) -> JointCalls:
        return self.unwatched if self.calls is None else self.calls.joint

    def gather(self, text: str, timeout_s: float, notice: Notice | None = None) -> Mapping[int, str | None]:
        return gathered("gather", text, self.participants(), timeout_s, notice)[0]

    def issues(self, traced: Any, compiled: Any | None = None) -> tuple[Issue, ...]:
        """The collectives of the trace or of the scheduled HLO; all partitions take part in them.

        Warns and returns none if the HLO cannot be parsed.
        """
        if compiled is None:
            listed = collectives_of(traced.jaxpr.jaxpr, self.mesh.shape)
            return tuple(Issue(text, place_of(scope)) for text, scope in listed)
        try:
            step = audit_text(compiled.as_text())
        except HloError as error:
            warnings.warn(f"the step's collectives cannot be compared: {error}", RuntimeWarning, 2)
            return ()
        trips = {loop.body: loop.trips or "unknown" for loop in step.loops}
        # By the groups of devices that they form, the names of axes. A set of fewer axes overwrites a larger
        # one with the same groups, which differs by axes of size 1.
        over = {
            tuple(groups(axes, self.mesh.shape)): f"over {', '.join(axes)}"
            for count in range(len(self.mesh.axis_names), 0, -1)
            for axes in itertools.combinations(self.mesh.axis_names, count)
        }

        def text(collective: CompiledCollective) -> str:
            kind = f"{collective.kind}({collective.op})" if collective.op else collective.kind
            where = over.get(collective.groups) or f"between {shortened(str(collective.groups))}"
            channel = f", channel {collective.channel}" if collective.channel is not None else ""
            trip = trips.get(collective.computation)
            loop = f", in a loop of length {trip}" if trip else ""
            return f"{kind} {', '.join(map(str, collective.inputs))} {where}{channel}{loop}"

        return tuple(Issue(text(each), self.place(each)) for each in step.collectives)

    def place(self, collective: CompiledCollective) -> str:
        """The plan line, or the scope, that requested a collective."""
        return place_of(collective.op_name)

    def copies(self, leaf: Any, placement: Placement | None) -> list[tuple[tuple[int, ...], dict[str, Any]]]:
        """The copies of any argument: JAX assumes that replicas and host arrays are equal everywhere."""
        shape, pieces = tuple(np.shape(leaf)), dict[Any, Any]()
        sharding: Any = None
        # The sharding of the array, or for an array on the host the one that it will get.
        if isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1:
            sharding = leaf.sharding
            pieces = {shard.device: shard.data for shard in leaf.addressable_shards}
        elif placement is not None:
            sharding = NamedSharding(self.mesh, spec(placement, scalar=len(shape) == len(placement.per)))
        else:
            sharding = NamedSharding(self.mesh, PartitionSpec())

        # By bounds in the array, the devices that hold a copy of this shard, with its index.
        shards: dict[Any, list[Any]] = {}
        indices: dict[Any, Cut] = getattr(sharding, "devices_indices_map")(shape)  # noqa: B009  untyped
        for device, index in indices.items():
            shards.setdefault(bounds(index, shape), []).append((device, index))

        copies: list[tuple[tuple[int, ...], dict[str, Any]]] = []
        for copies_of_shard in shards.values():
            holders = tuple(sorted({int(device.process_index) for device, _ in copies_of_shard}))
            if pieces:
                arrays = {str(device): pieces[device] for device, _ in copies_of_shard if device in pieces}
            else:
                arrays = {"": leaf[copies_of_shard[0][1]] if shape else leaf}
            if len(copies_of_shard) > 1 and int(jax.process_index()) in holders:
                copies.append((holders, arrays))
        return copies

    def member(self, schedule: ir.Schedule, axis: str, place: int) -> MeshMachine:
        """The devices of one member, as a mesh without `axis`."""
        mesh = self.mesh
        dimension = mesh.axis_names.index(axis)
        devices = np.take(mesh.devices, place, axis=dimension)
        names = tuple(name for name in mesh.axis_names if name != axis)
        types = tuple(kind for i, kind in enumerate(mesh.axis_types) if i != dimension)
        submesh = Mesh(devices, names, axis_types=types)
        calls = watchdog.watch_subset(self.calls, processes_of(submesh), schedule.plan)
        return machine_of(schedule, submesh, calls, self.whole or processes_of(mesh))

    def part(self, name: str, tree: Any, placement: Placement, axis: str, member: Machine) -> Any:
        """One member's part of global arrays on its own mesh, without the dimension of `axis`.

        Raises CP0805 for arrays with another sharding on this mesh.
        """
        dimension = placement.per.index(axis) if axis in placement.per else None
        devices = set(member.mesh.devices.flat)
        paths, flat = flatten(tree)
        specs = [self._spec_of(x, placement) for x in flat.leaves]
        for path, actual in zip(paths, specs, strict=True):
            if actual is None:
                fail(
                    "CP0805",
                    f"`{name}`{f' at `{path}`' if path else ''} has another sharding than the plan",
                    f"its placement is `{placement}`: expected a jax.Array with spec {spec(placement)} on the"
                    " mesh of the run",
                )

        def take(x: jax.Array, whole: PartitionSpec | None) -> jax.Array:
            pieces = [shard.data for shard in x.addressable_shards if shard.device in devices]
            shape, entries = x.shape, _compat.entries(whole)
            if dimension is not None:  # The member's pieces have the size 1 there.
                after = dimension + 1
                pieces = [piece.reshape(piece.shape[:dimension] + piece.shape[after:]) for piece in pieces]
                shape = shape[:dimension] + shape[after:]
                entries = entries[:dimension] + entries[after:]
            sharding = NamedSharding(member.mesh, PartitionSpec(*entries))
            return jax.make_array_from_single_device_arrays(shape, sharding, pieces, dtype=x.dtype)

        with _context.in_mesh(None):
            return flat.like(list(map(take, flat.leaves, specs))).build()

    def _spec_of(self, x: Any, placement: Placement) -> PartitionSpec | None:
        """The partition spec of `x` if it has this placement over the plan's axes; else None.

        Other axes of the mesh may divide `x` in any way.
        """
        sharding, lead = getattr(x, "sharding", None), len(placement.per)
        expected = spec(placement, scalar=getattr(x, "ndim", 0) == lead)
        if sharding is None or x.ndim < len(_compat.entries(expected)):
            return None
        is_named = isinstance(sharding, NamedSharding) and sharding.mesh == self.mesh
        if is_named and self._over_plan(sharding.spec) == self._over_plan(expected):
            return sharding.spec
        is_equal = sharding.is_equivalent_to(NamedSharding(self.mesh, expected), x.ndim)
        return expected if is_equal else None

    def _over_plan(self, whole: PartitionSpec) -> list[tuple[str, ...]]:
        """The plan's axes of each dimension of `whole`, without the last dimensions that have none."""
        axes = [
            tuple(
                axis for axis in ((entry,) if isinstance(entry, str) else entry or ()) if axis in self.sizes
            )
            for entry in _compat.entries(whole)
        ]
        while axes and not axes[-1]:
            axes.pop()
        return axes

    def join(self, parts: Mapping[int, Any], placement: Placement, axis: str) -> Any:
        """See `Machine.join`. Raises CP0818 if a member with devices of this process has no part."""
        at = placement.per.index(axis)  # The dimension of members in the result.
        mesh_dimension = self.mesh.axis_names.index(axis)
        count, process = int(self.mesh.shape[axis]), int(jax.process_index())
        devices = [np.take(self.mesh.devices, [index], axis=mesh_dimension).flat for index in range(count)]
        local = [i for i, each in enumerate(devices) if any(d.process_index == process for d in each)]
        if missing := [index for index in local if index not in parts]:
            message = (
                f"the input has no part of member{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
            )
            fail("CP0818", message, "run.join needs the part of every member with devices of this process")

        def put(*members: jax.Array) -> jax.Array:
            first = members[0]
            shape = (*first.shape[:at], count, *first.shape[at:])
            whole = spec(placement, scalar=first.ndim + 1 == len(placement.per))
            if isinstance(first.sharding, NamedSharding):
                entries = _compat.entries(first.sharding.spec)
                outer = (*entries[:at], *[None] * (at - len(entries)))
                whole = PartitionSpec(*outer, axis, *entries[at:])
            pieces = [
                shard.data.reshape((*shard.data.shape[:at], 1, *shard.data.shape[at:]))
                for x in members
                for shard in x.addressable_shards
            ]
            sharding = NamedSharding(self.mesh, whole)
            return jax.make_array_from_single_device_arrays(shape, sharding, pieces, dtype=first.dtype)

        with _context.in_mesh(None):
            return jax.tree_util.tree_map(put, *(parts[index] for index in local))


def machine_of(
    schedule: ir.Schedule, mesh: Any, calls: Calls | None = None, whole: tuple[int, ...] = ()
) -> MeshMachine:
    """The machine of `mesh` for `schedule`; see `MeshMachine` for `calls` and `whole`."""
    levels = spreads(schedule)
    return MeshMachine(mesh, schedule.mesh_sizes, schedule.file, levels, calls=calls, whole=whole)


def machine_for(request: BindRequest, mesh: Any) -> Machine:
    """The machine of `mesh`: a mesh of devices, or the ranks of an `mpi4py` communicator.

    All processes that hold devices of the mesh, or all ranks of the communicator, call this.

    Raises:
        CommplanError: for a mesh, CP0801 or CP0802 if it does not fit, the errors of `check_servers` and
            `request.check`, and those of `check_processes`; for a communicator, the errors of `ranks.ranks`.
    """
    if is_communicator(mesh):
        from commplan.runtime.machines.ranks import ranks  # noqa: PLC0415  Only programs under MPI load MPI.

        return cast("Machine", ranks(request, mesh))

    def check() -> None:
        check_mesh(request.schedule, mesh)
        check_servers(request.schedule)
        request.check()

    if isinstance(mesh, AbstractMesh) or not hasattr(mesh, "devices"):
        check_mesh(request.schedule, mesh)  # Raises, since there are no processes to agree on the error.
    request_of_mesh = request._replace(check=check, mesh=_described(mesh))
    return machine_of(request.schedule, mesh, check_processes(request_of_mesh, mesh))


def _described(mesh: Any) -> str:
    """The axes of `mesh` and its devices in order."""
    axes = zip(mesh.axis_names, mesh.axis_types, strict=True)
    text = ", ".join(f"{name} = {mesh.shape[name]} ({kind.name})" for name, kind in axes)
    return shortened(f"{text}; devices {', '.join(str(device.id) for device in mesh.devices.flat)}")


def _is_spec(node: object) -> bool:
    return isinstance(node, PartitionSpec)


def check_mesh(schedule: ir.Schedule, mesh: Any) -> None:
    """Check that a mesh has devices, the plan's axes with the program's sizes, and suitable axis types.

    Raises:
        CommplanError: CP0801 for another object, axis or size; CP0802 for a Manual axis of the plan, and for
            another Explicit axis if the schedule packs leaves.
    """
    sizes = schedule.mesh_sizes
    shape: dict[str, int] = {str(k): int(v) for k, v in dict(getattr(mesh, "shape", {})).items()}
    actual = _sizes(shape)

    def refuse(message: str, *notes: str) -> NoReturn:
        expected = f"the plan was compiled for {_sizes(sizes)}"
        fail("CP0801", message, f"the mesh has {actual}", expected, *notes, file=schedule.file)

    if isinstance(mesh, AbstractMesh) or not hasattr(mesh, "devices"):
        refuse(f"{type_of(mesh)} is not a mesh of devices", "expected a jax.sharding.Mesh")
    for name in sizes:
        if name not in shape:
            refuse(f"the mesh has no axis `{name}`")
    for name, size in sizes.items():
        if shape[name] != size:
            refuse(f"axis `{name}` has {shape[name]} devices in the mesh and {size} in the program")
    packed = [op for phase in schedule.phases for op in phase.ops if isinstance(op, ir.Pack)]
    for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True):
        if name in sizes and kind is AxisType.Manual:
            fail(
                "CP0802",
                f"axis `{name}` of the mesh is Manual outside any shard_map",
                "phases and run.spmd make the plan's axes Manual inside",
                "make the mesh with jax.make_mesh(sizes, names): its axes are Explicit; Auto axes work, too",
                file=schedule.file,
            )
        if name not in sizes and kind is AxisType.Explicit and shape[name] > 1 and packed:
            fail(
                "CP0802",
                f"leaves that may be sharded over `{name}`, an Explicit axis of the mesh, would be packed",
                f"the plan does not name `{name}`: JAX cannot flatten an array that is sharded over it",
                "compile for the mesh, plan.compile(mesh, ...), without `{ bucket = .. }`: leaves are then"
                " reduced one by one; or make the axis Auto",
                span=packed[0].span,
                file=schedule.file,
            )


def check_processes(request: BindRequest, mesh: Any) -> Calls | None:
    """Check that all processes of the mesh bind the same program in the same order, and start the watchdog.

    Returns:
        The counter of steps; None if they are neither watched nor recorded. Steps of several processes are
        watched unless the watchdog is off. Steps of this process alone are recorded if records are kept.

    Raises:
        CommplanError: the errors of `agree`; CP0849, on all processes, if one does not arrive.
    """
    schedule = request.schedule
    processes = processes_of(mesh)
    if jax.process_count() == 1 or len(processes) == 1 or jax.process_index() not in processes:
        request.check()
        runs = all(device in jax.local_devices() for device in mesh.devices.flat)
        # A mesh that is only described has processes that do not run.
        return alone.start(schedule.plan, request.limits.watchdog_s) if runs else None
    waits = f"process {jax.process_index()} waits in `program.bind` of `{schedule.plan}`"
    notice = Notice([waits], request.limits.watchdog_s or NOTICE_S)

    fix = "bind the same programs in the same order in every process that holds devices of the mesh"
    absence = Absence(f"bind `{schedule.plan}`", fix, schedule.file)

    def exchange(message: Any, purpose: str = "bind") -> dict[int, Any]:
        return gathered_values(purpose, message, processes, request.timeout_s, absence, notice)

    with report_once("process", int(jax.process_index()), processes[0]):
        agree("process", request, exchange)
    return watchdog.start(
        int(jax.process_index()),
        coordinator.job(),
        lambda message: exchange(message, "watchdog"),
        request.limits,
        request.schedule.plan,
    )


def processes_of(mesh: Any) -> tuple[int, ...]:
    """The numbers of the processes that hold devices of `mesh`, in increasing order."""
    return tuple(sorted({int(device.process_index) for device in mesh.devices.flat}))


def _sizes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} = {size}" for name, size in sizes.items()) or "no axes"
