"""The public API: load plans, compile them to programs, and bind, audit and save programs.

`commplan` re-exports `Plan`, `Program`, `load` and `loads`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Unpack, cast

import msgspec

from commplan import io
from commplan.compile_options import DEFAULTS, IN_ORDER, CompileKeywords, CompileOptions, RankPlaces
from commplan.diagnostics import CommplanError, fail, type_of
from commplan.frontend.bind_axes import (
    check_binding,
    check_mesh,
    check_sizes_agree,
    devices_of,
    is_communicator,
    mesh_sizes,
    shares_memory,
)
from commplan.hang_limits import BUSY_S, HangLimits, OnHang
from commplan.ir import plan as plan_ir
from commplan.ir.schedule import Backend, Leaf, Schedule
from commplan.ir.serialization.canonical_json import encode, is_of, plan_digest, schedule_digest
from commplan.tracebacks import ends_at_caller, public_face
from commplan.wait import TIMEOUT_S, check_seconds

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    from commplan.lowering.audit import Audit, Machine
    from commplan.passes.pipeline.manager import Pipeline
    from commplan.runtime.run import Run, TypedRun
    from commplan.topology import Topology

    RunT = TypeVar("RunT", bound=TypedRun, default=Run)
else:
    from typing import TypeVar

    RunT = TypeVar("RunT")


@public_face
class Plan(msgspec.Struct, Generic[RunT], frozen=True):
    """A checked plan. Create one with `commplan.load` or `commplan.loads`.

    For type checkers, `Plan[plans.Linear]` binds to the class that `commplan stubs` generated for it.

    Attributes:
        graph: the typed plan graph that the checker produced.
    """

    graph: plan_ir.Plan

    @property
    def name(self) -> str:
        """The name in the `plan` line."""
        return self.graph.name

    @property
    def digest(self) -> str:
        """SHA-256 of the plan, independent of comments and layout."""
        return plan_digest(self.graph)

    def compile(
        self,
        mesh: Any = None,
        shapes: Mapping[str, Any] | None = None,
        topology: Topology | str | Path | None = None,
        options: CompileOptions = DEFAULTS,
        **keywords: Unpack[CompileKeywords],
    ) -> Program[RunT]:
        """Compile this plan for a mesh and shapes.

        Args:
            mesh: an object whose `.shape` maps axis names to sizes (a `jax.sharding.Mesh`), or a mapping; or
                an `mpi4py` communicator with one rank for each combination of the plan's axes, last axis
                innermost. None: the sizes are those of `axes` and of the plan.
            shapes: pytrees of arrays, `jax.ShapeDtypeStruct` or `{"shape", "dtype"}` by name, for inputs,
                states and map results of type tree. Omit `per` dimensions, and give global shapes of split
                ones.
            topology: a topology, or the path of a topology file. By default the file that the plan declares
                with `topology "FILE"`. Without either, for a mesh of GPUs or of several processes, a topology
                is assumed with the links in the data sheets of the devices, and the first process logs this
                assumption.
            options: all other options.
            keywords: fields of `options`, such as `axes`, `order`, `passes`, `mapping`, `oversubscribe`,
                `backend`, `calibration`, `step`, `observer` and `timeout`.

        Returns:
            The compiled program.

        Raises:
            CommplanError: CP07xx for invalid options, shapes or sizes; CP0606 for leaves wider than the
                dtype in which `native` adds; CP0803 for an invalid timeout; CP084x for a backend or a
                communicator that does not fit, or if a rank does not join.
        """
        from commplan import topology as topologies  # noqa: PLC0415  only programs that compile load the compiler
        from commplan.compiler import compile_plan  # noqa: PLC0415

        if not isinstance(options, CompileOptions):  # pyright: ignore[reportUnnecessaryIsInstance]  untyped callers
            message = f"options is of type {type(options).__name__}: expected CompileOptions"
            fail("CP0722", message, 'sizes of axes are a keyword: axes={"data": 8}')
        options = msgspec.structs.replace(options, **keywords)
        _check_argument_types(options)
        backend = _backend(mesh, options.backend)
        has_topology = topology is not None or self.graph.topology is not None
        sizes, passes = self._sizes_and_passes(mesh, options, has_topology=has_topology)
        if shapes is not None and not hasattr(shapes, "items"):
            message = f"shapes is {type_of(shapes)}: expected a mapping from names to trees"
            fail("CP0720", message, 'shapes={"grads": tree}')
        structures = dict(shapes or {})
        leaves = {name: shapes_of(tree) for name, tree in structures.items()}
        loaded_topology = topologies.topology_of(self.graph, topology)
        ranks = IN_ORDER
        if not has_topology and devices_of(mesh) and not shares_memory(mesh):
            topology, ranks = self._assume_topology(mesh, options)
        elif loaded_topology is not None and options.mapping is None and is_communicator(mesh):
            is_declared = topology is None
            ranks = self._places_of_ranks(mesh, loaded_topology, options.timeout, is_declared=is_declared)
        options = msgspec.structs.replace(options, axes=sizes, passes=passes, backend=backend)
        schedule = compile_plan(self.graph, leaves, topology, options, ranks)
        return Program(schedule, structures)

    def _sizes_and_passes(
        self, mesh: Any, options: CompileOptions, *, has_topology: bool
    ) -> tuple[dict[str, int], Pipeline | str | None]:
        """The sizes of axes, from the options and the mesh, and the passes. Raises if the sizes differ."""
        sizes, passes = dict(options.axes or {}), options.passes
        if is_communicator(mesh):
            from commplan.runtime.machines.communicator import sizes_of  # noqa: PLC0415  MPI is loaded already

            return sizes_of(self.graph, mesh, sizes), passes
        if mesh is None:
            return sizes, passes
        mesh_axes = mesh_sizes(mesh)
        check_mesh(self.graph, mesh_axes)
        check_sizes_agree(self.graph, sizes, mesh_axes)
        plan_axes = {axis.name for axis in self.graph.axes}
        sizes |= {name: size for name, size in mesh_axes.items() if name in plan_axes}
        if passes is None:
            from commplan.passes.pipeline.registry import default  # noqa: PLC0415  only programs that compile load passes

            has_other_axes = any(mesh_axes[name] not in (0, 1) for name in set(mesh_axes) - plan_axes)
            passes = default(pinned=has_other_axes, in_process=not has_topology and shares_memory(mesh))
        return sizes, passes

    def _assume_topology(self, mesh: Any, options: CompileOptions) -> tuple[Topology | None, RankPlaces]:
        """A topology with the links in the devices' data sheets (None: unknown), and the ranks' places."""
        from commplan import topology as topologies  # noqa: PLC0415  as in `compile`
        from commplan.lowering.jax.device_topology import is_first_process, topology_of_mesh  # noqa: PLC0415  only if devices are far apart

        axes = [axis.name for axis in self.graph.axes if axis.kind is not plan_ir.AxisKind.SERVER]
        derived = topology_of_mesh(mesh, axes)
        if derived is None:
            return None, IN_ORDER
        ranks = RankPlaces(derived.places if options.mapping is None else None, (derived.assumed,))
        if is_first_process(mesh):
            topologies.announce(self.name, ranks.assumed)
        return derived.topology, ranks

    def _places_of_ranks(
        self, comm: Any, topology: Topology, timeout: float, *, is_declared: bool
    ) -> RankPlaces:
        """The places of the ranks of `comm` on `topology`, from the names of their hosts.

        Collective: all ranks of `comm` call it, and rank 0 logs the assumptions. If `is_declared`, errors
        have the location of the plan's `topology` line.
        """
        from commplan import topology as topologies  # noqa: PLC0415  as in `compile`
        from commplan.runtime.machines.ranks import deaths, host_names  # noqa: PLC0415  MPI is loaded already

        with deaths(comm, self.graph.file):
            hosts = host_names(comm, self.name, timeout)
        with topologies.declared_in(self.graph) if is_declared else contextlib.nullcontext():
            ranks = RankPlaces(
                topologies.places_of_hosts(topology, hosts), topologies.assumed_hosts(topology, hosts)
            )
        if comm.Get_rank() == 0:
            topologies.announce(self.name, ranks.assumed)
        return ranks


@public_face
class Program(Generic[RunT]):
    """A compiled plan: immutable, hashable, and equal if the schedules are equal.

    Args:
        schedule: the verified schedule.
        structures: the pytrees passed as shapes, by name. Without them, trees are nested dicts.
    """

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
        """The ops of each phase in order, with sizes, shapes and algorithms."""
        return self._schedule

    @property
    def digest(self) -> str:
        """SHA-256 of the schedule, which is the same on every machine."""
        return self._digest

    @property
    def structures(self) -> Mapping[str, Any]:
        """The pytrees passed as shapes, by name. They are neither compared nor saved."""
        return dict(self._structures)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and self._digest == other._digest

    def __hash__(self) -> int:
        return hash(self._digest)

    def __reduce__(self) -> tuple[type[Program], tuple[Schedule, dict[str, Any]]]:
        return Program, (self._schedule, self._structures)  # for copy and pickle

    def __repr__(self) -> str:
        axes = ", ".join(f"{axis.name}={axis.size}" for axis in self._schedule.axes)
        return f"<Program {self._schedule.plan} {axes} {self._digest[:12]}>"

    def save(self, path: str | Path) -> Path:
        """Write the schedule atomically to a file.

        Args:
            path: the file. `.schedule.json` is appended to a name without a suffix; in a directory the file
                is called `PLAN.schedule.json`.

        Returns:
            The path of the file.

        Raises:
            CommplanError: CP1009 if it cannot be written.
        """
        path = Path(path)
        if path.is_dir():
            path = path / f"{self._schedule.plan}.schedule.json"
        elif not path.suffix:
            path = path.with_name(f"{path.name}.schedule.json")
        try:
            io.write(path, encode(self._schedule))
        except OSError as error:
            fail("CP1009", f"{path} cannot be written: {error.strerror or error}", file=str(path))
        return path

    @classmethod
    @ends_at_caller
    def load(cls, path: str | Path, plan: Plan[RunT] | None = None) -> Program[RunT]:
        """Load and verify a program written by `save`.

        Trees are rebuilt as nested dicts, since a file contains paths but no Python types.

        Args:
            path: the file.
            plan: the expected plan.

        Raises:
            CommplanError: CP1001 to CP1005 if the file is invalid, CP1007 if it was compiled from another
                plan, CP1009 if it cannot be read.
        """
        path = Path(path)
        try:
            data = io.read(path, io.SCHEDULE)
        except OSError as error:
            fail("CP1009", f"{path} cannot be read: {error.strerror or error}", file=str(path))
        from commplan.verify import load_schedule  # noqa: PLC0415  not needed to run a program just compiled

        schedule = load_schedule(data, str(path))
        if plan is not None and not is_of(schedule, plan.graph):
            message = f"{path} was compiled from another plan than `{plan.name}`"
            saved_plan = f"the schedule's plan `{schedule.plan}` has the digest {schedule.plan_digest}"
            expected_plan = f"`{plan.name}` has the digest {plan.digest}"
            fail("CP1007", message, saved_plan, expected_plan, "compile the plan again", file=str(path))
        return cls(schedule)

    def bind(
        self,
        mesh: Any,
        sources: Mapping[str, Any] | None = None,
        functions: Mapping[str, Callable[..., Any]] | None = None,
        seed: int = 0,
        *,
        watchdog_s: float | None = 10.0,
        busy_s: float = BUSY_S,
        on_hang: OnHang = "abort",
        timeout: float = TIMEOUT_S,
    ) -> RunT:
        """Bind this program to a mesh, data and functions (see `runtime.run.Run`).

        Args:
            mesh: a `jax.sharding.Mesh`, or an `mpi4py` communicator, on which all ranks must call this.
            sources: data, by the plan's names.
            functions: functions, by the plan's names; none for built-in ones.
            seed: seed of random functions and of the order of records.
            watchdog_s: seconds without progress after which a collective, or under `jax.distributed` a step,
                fails on all waiting ranks with an error that names the blocking ranks. It is extended to five
                times the usual interval between two runs. None disables it.
            busy_s: seconds after which the operation fails if the blocking ranks are alive and busy with
                other work, such as a checkpoint. They are printed after `watchdog_s`. `run.late()` announces
                such work, for which the others wait without a limit.
            on_hang: with `report`, a waiting rank only prints the blocking ranks, once for each wait, and
                continues to wait. This applies to all ranks if one rank passes it.
            timeout: seconds to wait for other ranks or processes to bind, which may still be compiling or
                loading.

        Returns:
            The run: the phases of the plan as functions.

        Raises:
            CommplanError: CP1006 if the mesh has other sizes than the program was compiled for, CP08xx for
                other mismatches.
        """
        check_binding(self._schedule, self._digest, mesh)
        from commplan.runtime.binding import Bindings, bind  # noqa: PLC0415  jax is loaded only here

        limits = HangLimits(watchdog_s, busy_s, on_hang)
        run = bind(self, mesh, Bindings(sources, functions, seed, limits, timeout))
        return cast("RunT", run)

    def compiler_options(self, target: str = "gpu") -> dict[str, bool | int | str]:
        """XLA options for steps of this program, for `jax.jit(compiler_options=..)`.

        `run.jit` passes the options for the devices of the mesh. They are empty for CPUs and for programs
        without communication. Options unknown to the installed XLA are omitted; without JAX all are included.
        `commplan explain --target` lists their purposes.

        Args:
            target: cpu, gpu, cuda, rocm, or a target such as `h100:4x8`.

        Raises:
            CommplanError: CP1150 for an unknown target.
        """
        from commplan.lowering.jax.compiler_options import accepted, as_installed, compiler_options  # noqa: PLC0415

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
        """Compile `step`, which calls phases of this program, and compare its collectives with the schedule.

        Nothing is executed.

        Args:
            step: the step, jitted or not.
            args: the arguments of `step`: arrays, or `jax.ShapeDtypeStruct` with shardings.
            mesh: the mesh of the step, by default inferred from the compiled step.
            phases: phases to audit, by default those that the step calls and those that run `each step`.
            machine: a target such as `"h100:4x8"`, or rates (`commplan.lowering.audit.Machine`), to estimate
                exposed communication.
            topology: its links replace those of `machine` in the cost of collectives.
            pgle: whether to compile the step again with a profile estimated for `machine`, and to report
                which collectives XLA moves then.

        Returns:
            The differences between the compiled step and the schedule, and the estimates.

        Raises:
            CommplanError: CP1150 for an unknown machine, or for a topology without a machine; CP1151 for a
                phase that the plan does not have; CP1156 if `pgle` is set without a machine or for a step
                without GPUs; or an error of `step`.
        """
        from commplan.lowering.audit.report import audit  # noqa: PLC0415  jax is loaded only here
        from commplan.lowering.gpu.targets import rates  # noqa: PLC0415
        from commplan.lowering.jax.aot import GPUS_ONLY, compile_step  # noqa: PLC0415

        sizes = mesh_sizes(mesh) if mesh is not None else None
        estimated = rates(machine)
        if topology is not None:
            if estimated is None:
                note = 'add machine="h100:4x8", or its rates'
                fail("CP1150", "topology= needs the machine that runs the step: machine= is missing", note)
            from commplan.explain.links import links_of  # noqa: PLC0415
            from commplan.topology import load_topology  # noqa: PLC0415

            network = load_topology(topology) if isinstance(topology, str | Path) else topology
            estimated = msgspec.structs.replace(estimated, links=links_of(self._schedule, network))
        if pgle and estimated is None:
            fail("CP1156", "pgle=True needs a machine to estimate a profile for", GPUS_ONLY)
        text = compile_step(step, *args, profiled_for=estimated if pgle else None)
        return audit(self._schedule, text, mesh=sizes, phases=phases, machine=estimated)


@ends_at_caller
def load(path: str | Path) -> Plan[RunT]:  # pyright: ignore[reportInvalidTypeVarUse]  said by the caller
    """Load and check the plan in a file.

    Args:
        path: the file.

    Raises:
        CommplanError: all errors of the plan, or CP1009 if the file cannot be read or is not UTF-8 text.
    """
    path = Path(path)
    try:
        text = io.read(path).decode("utf-8")
    except OSError as error:
        fail("CP1009", f"{path} cannot be read: {error.strerror or error}", file=str(path))
    except ValueError as error:
        if not isinstance(error, UnicodeDecodeError):  # a NUL in the name
            fail("CP1009", f"{str(path)!r} cannot be read: {error}")
        fail("CP1009", f"{path} is not UTF-8 text", "a plan is plain text", file=str(path))
    return loads(text, str(path))


@ends_at_caller
def loads(text: str, file: str = "<plan>") -> Plan[RunT]:  # pyright: ignore[reportInvalidTypeVarUse]
    """Check the plan in `text`.

    Args:
        text: the text of the plan.
        file: name used in diagnostics.

    Raises:
        CommplanError: all errors of the plan, or CP0002 if `text` is not a `str`.
    """
    from commplan import dsl  # noqa: PLC0415  the parser is loaded only where text is read

    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        kind = type(text).__name__
        message = f"a plan is text, and this is of type {kind}"
        fail("CP0002", message, "decode bytes as UTF-8, or `load` a file")
    plan, diagnostics = dsl.load(text, file)
    if plan is None:
        raise CommplanError(*diagnostics)
    return Plan(plan)


def _check_argument_types(options: CompileOptions) -> None:
    """Check the types of the options of `compile` (CP0722, CP0711, CP0717, CP0803)."""
    rules: tuple[tuple[str, str, object, type, str, str], ...] = (
        ("CP0722", "axes", options.axes, Mapping, "sizes by name", 'axes={"data": 8}'),
        ("CP0711", "order", options.order, Mapping, "lists of paths by name", 'order={"grads": ["b", "w"]}'),
        ("CP0717", "passes", options.passes, str, "a pipeline as text", 'passes="share,bucket,overlap"'),
    )
    for code, name, value, kind, expected, fix in rules:
        if value is not None and not isinstance(value, kind):
            fail(code, f"{name} is of type {type(value).__name__}: expected {expected}", fix)
    check_seconds("CP0803", "timeout", options.timeout, "timeout=600")


def _backend(mesh: object, requested: Backend | None) -> Backend:
    """Infer the backend. Raises CP0841 if `requested` is unknown or contradicts the mesh."""
    if requested not in (None, "jax", "mpi"):
        fail("CP0841", f"there is no backend `{requested}`", "expected: jax or mpi")
    implied: Backend = "mpi" if is_communicator(mesh) else "jax"
    is_conclusive = implied == "mpi" or bool(devices_of(mesh))  # None and sizes alone fit any backend
    if requested is not None and is_conclusive and requested != implied:
        kind = "a communicator" if implied == "mpi" else "a mesh"
        message = f"the plan is compiled with {kind}, and for the backend `{requested}`"
        fail("CP0841", message, "omit `backend`")
    return requested or implied


def shapes_of(tree: Any) -> tuple[Leaf, ...]:
    """The leaves of any pytree.

    Plain containers do not require jax. Other nodes are flattened by jax if it is loaded.

    Raises:
        CommplanError: CP0703 and CP0720, as `commplan.pytree.shapes_of`.
    """
    from commplan import pytree  # noqa: PLC0415  only to compile

    if "jax" not in sys.modules or pytree.is_plain(tree):
        return pytree.shapes_of(tree)
    from commplan.lowering.jax.pytree import flatten  # noqa: PLC0415  jax is loaded already

    paths, flat = flatten(tree)
    return pytree.leaves_of(zip(paths, flat.leaves, strict=True))
