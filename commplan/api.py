"""The public face: plans, programs, and the way from one to the other."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, cast

import msgspec

from commplan import compiler, io, pytree
from commplan.diagnostics import CommplanError, fail
from commplan.frontend.bind_axes import check_mesh
from commplan.ir import plan as graph
from commplan.ir.schedule import Backend, Leaf, Schedule
from commplan.ir.serialization.canonical_json import encode, is_of, plan_digest, schedule_digest
from commplan.mesh_kind import is_communicator, shares_memory
from commplan.passes.pipeline.manager import Observer
from commplan.passes.pipeline.registry import default
from commplan.topology import (
    Topology,
    announce,
    assumed_hosts,
    declared_in,
    load_topology,
    places_of_hosts,
    topology_of,
)
from commplan.tracebacks import ends_at_caller, public_face
from commplan.verify import load_schedule
from commplan.wait import TIMEOUT_S, check_seconds

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    from commplan.cost.calibration import Calibration
    from commplan.cost.schedule.step import StepComputation
    from commplan.lowering.audit import Audit, Machine
    from commplan.runtime.run import Run, TypedRun

    RunT = TypeVar("RunT", bound=TypedRun, default=Run)
else:
    from typing import TypeVar

    RunT = TypeVar("RunT")


@public_face
class Plan(msgspec.Struct, Generic[RunT], frozen=True):
    """A checked plan. Make one with `commplan.load` or `commplan.loads`.

    To type checkers `Plan[plans.Linear]` binds to the face that `commplan stubs` wrote of it.
    """

    graph: graph.Plan

    @property
    def name(self) -> str:
        return self.graph.name

    @property
    def digest(self) -> str:
        """sha256 of what the plan says; comments and layout are no part of it."""
        return plan_digest(self.graph)

    def compile(
        self,
        mesh: Any = None,
        shapes: Mapping[str, Any] | None = None,
        topology: Topology | str | Path | None = None,
        axes: Mapping[str, int] | None = None,
        order: Mapping[str, Sequence[str]] | None = None,
        passes: str | None = None,
        *,
        mapping: Mapping[str, str] | None = None,
        oversubscribe: bool = False,
        backend: Backend | None = None,
        calibration: Calibration | str | Path | None = None,
        step: StepComputation | str | Path | None = None,
        observer: Observer | None = None,
        timeout: float = TIMEOUT_S,
    ) -> Program[RunT]:
        """This plan for one mesh and one set of shapes.

        mesh: anything whose `.shape` maps axis names to sizes (a `jax.sharding.Mesh`), or a mapping; or an
        `mpi4py` communicator, one rank for each combination of the plan's axes, the last one innermost.
        shapes: name -> pytree of arrays, `jax.ShapeDtypeStruct` or `{"shape", "dtype"}`, for inputs,
        states and map results of type tree; `per` dimensions omitted, split ones uncut.
        topology: a path to a topology file, or a `commplan.topology.Topology`. Default: the file that the
        plan declares with `topology "FILE"`. Without either, a mesh of GPUs or of several processes is taken
        for machines with the links of such devices' data sheets; the first process logs what it assumes.
        mapping: axis -> level of the topology, where names and order do not say it. With a communicator the
        hosts that its ranks run on say it, and all ranks compile together: hosts take the places of the
        topology in the order that it lists them, else in the natural order of their names, which rank 0 logs.
        axes: sizes by name, for axes declared `?` where there is no mesh. With a communicator one of them
        may be left out: it takes the ranks that are left.
        order: name -> leaf paths in the order in which the backward pass makes them.
        passes: a pipeline such as `"share,bucket{max=4MiB},decompose,wire,overlap"`. By default all. Leaves
        stay out of buckets unless a stage says `{ bucket = .. }` if the mesh has more axes than the plan
        (tensor parallelism beside it), or if it has CPU devices of one process only and no topology is given.
        backend: `jax` or `mpi`, where there is no mesh to tell.
        calibration: what `commplan calibrate` measured on the topology, or the file with it.
        step: the computation beside which phases run, or the profile that `commplan calibrate --step` wrote:
        gradients are sent in the order in which it makes them.
        timeout: seconds to wait for the other ranks of a communicator, where their hosts are asked for.
        Raises CommplanError (CP07xx), CP084x for a communicator that does not fit, or a rank that stays away.
        """
        _check_kinds(axes, order, passes, timeout)
        kind = _backend(mesh, backend)
        undescribed = topology is None and self.graph.topology is None
        sizes = dict(axes or {})
        if is_communicator(mesh):
            from commplan.runtime.machines.ranks import sizes_of  # noqa: PLC0415  MPI is loaded already

            sizes = sizes_of(self.graph, mesh, sizes)
        elif mesh is not None:
            mesh_axes = mesh_sizes(mesh)
            check_mesh(self.graph, mesh_axes)
            _check_twice(self.graph, sizes, mesh_axes)
            named = {axis.name for axis in self.graph.axes}
            sizes |= {name: size for name, size in mesh_axes.items() if name in named}
            has_others = any(mesh_axes[name] not in (0, 1) for name in set(mesh_axes) - named)
            if passes is None:
                passes = default(pinned=has_others, in_process=undescribed and shares_memory(mesh))
        if shapes is not None and not hasattr(shapes, "items"):
            kind = type(shapes).__name__
            message = f"shapes is a {kind}: names and their trees were expected"
            fail("CP0720", message, 'shapes={"grads": tree}')
        given = dict(shapes or {})
        leaves = {name: shapes_of(tree) for name, tree in given.items()}
        machine = topology_of(self.graph, topology)
        places, assumed = None, ()
        if undescribed and hasattr(mesh, "devices") and not shares_memory(mesh):
            from commplan.lowering.device_topology import is_first_process, topology_of_mesh  # noqa: PLC0415  only if devices are far apart

            ranked = [axis.name for axis in self.graph.axes if axis.kind is not graph.AxisKind.SERVER]
            if (derived := topology_of_mesh(mesh, ranked)) is not None:
                topology, assumed = derived.topology, (derived.assumed,)
                places = derived.places if mapping is None else None
                if is_first_process(mesh):
                    announce(self.name, assumed)
        if machine is not None and mapping is None and mesh is not None and is_communicator(mesh):
            from commplan.runtime.machines.ranks import deaths, host_names  # noqa: PLC0415  as above

            with deaths(mesh, self.graph.file):
                hosts = host_names(mesh, self.name, timeout)
            with declared_in(self.graph) if topology is None else contextlib.nullcontext():
                places, assumed = places_of_hosts(machine, hosts), assumed_hosts(machine, hosts)
            if mesh.Get_rank() == 0:
                announce(self.name, assumed)
        schedule = compiler.compile_plan(
            self.graph,
            sizes,
            leaves,
            topology=topology,
            mapping=mapping,
            order=order,
            step=_step(step),
            pipeline=passes,
            observer=observer,
            oversubscribe=oversubscribe,
            backend=kind,
            calibration=calibration,
            places=places,
            assumed=assumed,
        )
        return Program(schedule, given)


@public_face
class Program(Generic[RunT]):
    """A compiled plan: frozen, hashable, equal where the schedules are."""

    __slots__ = ("_digest", "_schedule", "_structures")
    _digest: str
    _schedule: Schedule
    _structures: dict[str, Any]

    def __init__(self, schedule: Schedule, structures: Mapping[str, Any] | None = None) -> None:
        object.__setattr__(self, "_schedule", schedule)
        object.__setattr__(self, "_structures", dict(structures or {}))
        object.__setattr__(self, "_digest", schedule_digest(schedule))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a program is frozen: `{name}` cannot be set")

    @property
    def schedule(self) -> Schedule:
        return self._schedule

    @property
    def digest(self) -> str:
        """sha256 of the schedule, the same on every machine."""
        return self._digest

    @property
    def structures(self) -> Mapping[str, Any]:
        """The pytrees that gave the shapes, by name: neither compared nor saved."""
        return dict(self._structures)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and self._digest == other._digest

    def __hash__(self) -> int:
        return hash(self._digest)

    def __reduce__(self) -> tuple[type[Program], tuple[Schedule, dict[str, Any]]]:
        return Program, (self._schedule, self._structures)  # how a frozen object is copied and pickled

    def __repr__(self) -> str:
        axes = ", ".join(f"{axis.name}={axis.size}" for axis in self._schedule.axes)
        return f"<Program {self._schedule.plan} {axes} {self._digest[:12]}>"

    def save(self, path: str | Path) -> Path:
        """Write the schedule to `path`: readers see all of it, or the file as it was. Gives back where it is.

        A name without an ending gets `.schedule.json`; a directory gets `PLAN.schedule.json`.
        Raises CP1009 where it cannot be written.
        """
        place = Path(path)
        if place.is_dir():
            place = place / f"{self._schedule.plan}.schedule.json"
        elif not place.suffix:
            place = place.with_name(f"{place.name}.schedule.json")
        try:
            io.write(place, encode(self._schedule))
        except OSError as error:
            fail("CP1009", f"{place} cannot be written: {error.strerror or error}", file=str(place))
        return place

    @classmethod
    @ends_at_caller
    def load(cls, path: str | Path, plan: Plan[RunT] | None = None) -> Program[RunT]:
        """The program that `save` wrote, verified. With `plan`, refuses another plan's (CP1007).

        Trees are rebuilt as nested dicts, since a file holds paths and no Python types.
        Raises CP1001 to CP1005 where the file is wrong, CP1009 where it cannot be read.
        """
        place = Path(path)
        try:
            data = io.read(place, io.SCHEDULE)
        except OSError as error:
            fail("CP1009", f"{place} cannot be read: {error.strerror or error}", file=str(place))
        schedule = load_schedule(data, str(place))
        if plan is not None and not is_of(schedule, plan.graph):
            message = f"{place} was compiled from another plan than `{plan.name}`"
            theirs = f"the schedule's plan `{schedule.plan}` has the digest {schedule.plan_digest}"
            ours = f"`{plan.name}` has the digest {plan.digest}"
            fail("CP1007", message, theirs, ours, "compile the plan again", file=str(place))
        return cls(schedule)

    def bind(
        self,
        mesh: Any,
        sources: Mapping[str, Any] | None = None,
        functions: Mapping[str, Callable[..., Any]] | None = None,
        seed: int = 0,
        *,
        watchdog_s: float | None = 10.0,
        timeout: float = TIMEOUT_S,
    ) -> RunT:
        """This program with the mesh, data and functions that it runs on (see `runtime.run.Run`).

        mesh: a `jax.sharding.Mesh`, or an `mpi4py` communicator; then every rank calls this alike.
        watchdog_s: seconds after which a collective in which nothing moves, or under `jax.distributed` a step
        that does not end, ends with an error on all that wait in it, which says who holds them; five times
        what usually passes between two runs of it where that is longer. None waits for ever. `run.late()`
        announces that this process comes later. timeout: seconds to wait for the other
        ranks, or processes, to come and bind this program: they may still compile, or load data.

        Raises CP1006 where the mesh has other sizes than the one compiled for, and CP08xx for all
        else that does not fit.
        """
        check_binding(self._schedule, self._digest, mesh)
        from commplan.runtime.run import Run  # noqa: PLC0415  jax is loaded only here

        run = Run(
            self,
            mesh,
            sources=sources,
            functions=functions,
            seed=seed,
            watchdog_s=watchdog_s,
            timeout=timeout,
        )
        return cast("RunT", run)

    def compiler_options(self, target: str = "gpu") -> dict[str, bool | int | str]:
        """What XLA is told to compile steps of this program as planned, for `jax.jit(compiler_options=..)`.

        `run.jit` passes those for the mesh's devices by itself. Empty for CPUs, and where nothing is sent.
        Options that the installed XLA does not know are left out; without JAX all are there.
        target: cpu, gpu, cuda, rocm, or such as `h100:4x8`. Raises CP1150 for another; `commplan explain
        --target` says why each is there, and which are left out.
        """
        from commplan.lowering.compiler_options import accepted, as_installed, compiler_options  # noqa: PLC0415

        return accepted(as_installed(compiler_options(self._schedule, target)))

    def audit(
        self,
        step: Callable[..., Any],
        *args: Any,
        mesh: Any = None,
        phases: Sequence[str] = (),
        machine: Machine | str | None = None,
        topology: Topology | str | Path | None = None,
        pgle: bool = False,
    ) -> Audit:
        """Compile `step`, which runs phases of this program, and compare its collectives with the schedule.

        step: jitted or not; args: arrays, or `jax.ShapeDtypeStruct` with shardings. Nothing runs.
        mesh: that of the step, by default the one that it names. phases: those to look for, by default those
        that the step calls and `each step`. machine: `"h100:4x8"`, or the rates to estimate exposed
        communication with, a `commplan.lowering.audit.Machine`. topology: has the links to price collectives
        by, instead of those of `machine`. pgle: compile the step once more, with a
        profile of what its instructions take on `machine`, and say which collectives XLA then moves.

        Raises CP1150 for no such machine, CP1151 for a phase that the plan does not have, CP1156 where `pgle`
        has no machine or the step no GPUs, and what `step` raises.
        """
        from commplan.lowering.audit.report import audit  # noqa: PLC0415  jax is loaded only here
        from commplan.lowering.audit.targets import rates  # noqa: PLC0415
        from commplan.lowering.jax.aot import GPUS_ONLY, compile_step  # noqa: PLC0415

        sizes = mesh_sizes(mesh) if mesh is not None else None
        estimated = rates(machine)
        if topology is not None:
            if estimated is None:
                note = 'add machine="h100:4x8", or its rates'
                fail("CP1150", "topology= prices the collectives of a machine, and no machine is given", note)
            from commplan.explain.links import links_of  # noqa: PLC0415

            network = load_topology(topology) if isinstance(topology, str | Path) else topology
            estimated = msgspec.structs.replace(estimated, links=links_of(self._schedule, network))
        if pgle and estimated is None:
            fail("CP1156", "pgle=True needs a machine to estimate a profile for", GPUS_ONLY)
        text = compile_step(step, *args, profiled_for=estimated if pgle else None)
        return audit(self._schedule, *text, mesh=sizes, phases=phases, machine=estimated)


@ends_at_caller
def load(path: str | Path) -> Plan[RunT]:  # pyright: ignore[reportInvalidTypeVarUse]  said by the caller
    """The plan in the file at `path`, checked. Raises CommplanError with all that is wrong with it."""
    place = Path(path)
    try:
        text = io.read(place).decode("utf-8")
    except OSError as error:
        fail("CP1009", f"{place} cannot be read: {error.strerror or error}", file=str(place))
    except ValueError as error:
        if not isinstance(error, UnicodeDecodeError):  # a NUL in the name
            fail("CP1009", f"{str(place)!r} cannot be read: {error}")
        fail("CP1009", f"{place} is not UTF-8 text", "a plan is plain text", file=str(place))
    return loads(text, str(place))


@ends_at_caller
def loads(text: str, file: str = "<plan>") -> Plan[RunT]:  # pyright: ignore[reportInvalidTypeVarUse]
    """The plan in `text`, checked. Raises CommplanError with all that is wrong with it, CP0002 for bytes."""
    from commplan import dsl  # noqa: PLC0415  the parser is loaded only where text is read

    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        kind = type(text).__name__
        message = f"a plan is text, and this is of type {kind}"
        fail("CP0002", message, "decode bytes as UTF-8, or `load` a file")
    plan, diagnostics = dsl.load(text, file)
    if plan is None:
        raise CommplanError(*diagnostics)
    return Plan(plan)


def _check_kinds(axes: object, order: object, passes: object, timeout: object) -> None:
    """Refuse arguments of `compile` of another kind (CP0722, CP0711, CP0717, CP0803)."""
    wrong = "{} is of type {}: {} expected"
    if axes is not None and not isinstance(axes, Mapping):
        fail("CP0722", wrong.format("axes", type(axes).__name__, "sizes by name were"), 'axes={"data": 8}')
    if order is not None and not isinstance(order, Mapping):
        wanted = "lists of paths by name were"
        fail("CP0711", wrong.format("order", type(order).__name__, wanted), 'order={"grads": ["b", "w"]}')
    if passes is not None and not isinstance(passes, str):
        wanted = "a pipeline as text was"
        fail("CP0717", wrong.format("passes", type(passes).__name__, wanted), 'passes="share,bucket,overlap"')
    check_seconds("CP0803", "timeout", timeout, "timeout=600")


def _step(given: StepComputation | str | Path | None) -> StepComputation | None:
    """The computation of a step, from its profile. Raises CP0772."""
    from commplan.cost.step_profile import load_step  # noqa: PLC0415  only where one is given

    return load_step(given) if isinstance(given, str | Path) else given


def _backend(mesh: object, given: Backend | None) -> Backend:
    """What a plan is compiled for. Raises CP0841 where the mesh is of another kind than asked for."""
    if given not in (None, "jax", "mpi"):
        fail("CP0841", f"there is no backend `{given}`", "expected: jax or mpi")
    implied: Backend = "mpi" if is_communicator(mesh) else "jax"
    tells = implied == "mpi" or hasattr(mesh, "devices")  # None and mappings of sizes tell nothing
    if given is not None and tells and given != implied:
        kind = "a communicator" if implied == "mpi" else "a mesh"
        message = f"the plan is compiled with {kind}, and for the backend `{given}`"
        fail("CP0841", message, "leave `backend` out")
    return given or implied


def _check_twice(plan: graph.Plan, sizes: Mapping[str, int], mesh: Mapping[str, int]) -> None:
    """Refuse sizes that contradict the mesh (CP0708)."""
    for name, size in sizes.items():
        if mesh.get(name, size) != size:
            message = f"axis `{name}` has size {size} in `axes` and {mesh[name]} in the mesh"
            fail("CP0708", message, "give the mesh alone", file=plan.file)


def mesh_sizes(mesh: Any) -> dict[str, int]:
    """Axis name -> size of a mesh, or of a mapping that says the same; sizes as they are given."""
    shape: Any = getattr(mesh, "shape", mesh)
    if not hasattr(shape, "items"):
        expected = "expected a jax.sharding.Mesh, an mpi4py communicator, or axis sizes"
        fail("CP0722", f"a {type(mesh).__name__} is no mesh", expected)
    for name, size in shape.items():
        if size is None:  # no size would be taken for one that is given elsewhere
            message = f"axis `{name}` has no size in the mesh"
            fail("CP0708", message, "a mesh has a whole number for every axis")
    return {str(name): size for name, size in shape.items()}


def shapes_of(tree: Any) -> tuple[Leaf, ...]:
    """The leaves of `tree`, whatever kind of pytree it is.

    Plain containers need no jax; a node of another kind is asked of jax where that is loaded.
    """
    if "jax" not in sys.modules or pytree.is_plain(tree):
        return pytree.shapes_of(tree)
    from commplan.lowering.jax.pytree import flatten  # noqa: PLC0415  jax is loaded already

    paths, flat = flatten(tree)
    return pytree.leaves_of(zip(paths, flat.leaves, strict=True))


def check_binding(schedule: Schedule, digest: str, mesh: Any) -> None:
    """Refuse a mesh with other sizes than those compiled for (CP1006); axes it lacks are Run's to say."""
    if is_communicator(mesh):  # which the runtime looks at
        return
    ours = schedule.mesh_sizes
    shape: Any = getattr(mesh, "shape", {})
    if not hasattr(shape, "items"):
        message = f"a {type(mesh).__name__} is no mesh"
        fail("CP0801", message, "expected a jax.sharding.Mesh, or an mpi4py communicator", file=schedule.file)
    if schedule.backend == "mpi":
        fail(
            "CP0841",
            f"program `{schedule.plan}` was compiled for the ranks of a communicator, and is bound to a mesh",
            "compile it with the mesh: plan.compile(mesh)",
            file=schedule.file,
        )
    theirs = {str(name): int(size) for name, size in dict(shape).items()}
    if any(name not in theirs for name in ours) or all(theirs[name] == size for name, size in ours.items()):
        return
    message = f"program `{schedule.plan}` was compiled for another mesh"
    expected = f"compiled for {_sizes(ours)} (schedule {digest})"
    fix = "bind to the mesh that it was compiled for, or compile again with this one"
    fail("CP1006", message, expected, f"found {_sizes(theirs)}", fix, file=schedule.file)


def _sizes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items()) or "no axes"
