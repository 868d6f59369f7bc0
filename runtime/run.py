"""A program bound to a mesh, functions and data: what training code holds."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import os
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from commplan.diagnostics import CommplanError, Diagnostic, Note, fail, listed, near_note
from commplan.ir import schedule as ir
from commplan.ir.types import Placement
from commplan.lowering.audit.estimate import Machine as Rates
from commplan.lowering.jax import _compat
from commplan.lowering.jax.layers import backward_reduce as tap
from commplan.lowering.jax.pytree import build, flatten, known_structures
from commplan.lowering.jax.typing_shim import jax, jnp
from commplan.lowering.mpi.job import watchdog as mpi_watchdog
from commplan.lowering.mpi.job.engine_errors import reason
from commplan.runtime import member as members
from commplan.runtime import spmd
from commplan.runtime.check_bound import check_bound, check_kinds
from commplan.runtime.context import CALLS, Context
from commplan.runtime.input.device.batches import Batches
from commplan.runtime.input.group import Group
from commplan.runtime.input.multirate.run_batches import ClockedPhases
from commplan.runtime.input.multirate.schedule import taken_apart
from commplan.runtime.input.restarts import Restarts
from commplan.runtime.input.sources.files import bound
from commplan.runtime.input.stages.functions import checked_functions
from commplan.runtime.layers import ShardedWeights
from commplan.runtime.machines.explicit import has_reduced, reduced_over
from commplan.runtime.machines.machine import Binding
from commplan.runtime.machines.mesh import machine_for
from commplan.runtime.observe import preflight, watchdog
from commplan.runtime.observe.collective_check import BUDGET_S, Checked, check_collectives
from commplan.runtime.observe.metrics import PERIOD_S, Ledger, Metrics, close_quietly, kept
from commplan.runtime.param_server.server_rank import Serving
from commplan.runtime.phases import Every, PhaseCall
from commplan.tracebacks import public_face
from commplan.wait import BUSY_S, TIMEOUT_S, check_seconds

if TYPE_CHECKING:
    from commplan.api import Program


class UnknownPhaseError(CommplanError, AttributeError):
    """The plan has no phase so called."""


@public_face
class Bound(ShardedWeights):
    """Phases on a mesh: what a whole run and one member of an ensemble have in common."""

    every: Any

    def __init__(self, context: Context, sources: Mapping[str, Any]) -> None:
        schedule = context.schedule
        self.context, self.mesh, self.sources = context, context.machine.mesh, dict(sources)
        self.ledger = Ledger()  # what the batches of this run cost
        self.clocks, self.restarts = ClockedPhases(), Restarts()
        self._checked = False  # whether collectives were tried
        self.phases = {phase.name: PhaseCall(context, phase) for phase in schedule.phases}
        self.every = Every({p.period: self.phases[p.name] for p in schedule.phases if p.kind == "every"})

    if not TYPE_CHECKING:  # the faces of plans that `commplan stubs` writes have no phases but their own

        def __getattr__(self, name: str) -> PhaseCall:
            return self._phase_called(name)

    def _phase_called(self, name: str) -> PhaseCall:
        phases: Mapping[str, PhaseCall] = self.__dict__.get("phases", {})
        if name in phases:
            return phases[name]
        notes = (*near_note(name, dir(self) if phases else ()), f"it has: {listed(phases) or 'none'}")
        message = f"the plan has no phase `{name}`"
        raise UnknownPhaseError(Diagnostic("CP0817", message, None, tuple(map(Note, notes))))

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.phases})

    def init(self) -> dict[str, Any]:
        """The plan's states before `at start`: zeros, as global arrays; `{}` for a plan without states."""
        self.restarts.clear()
        context, state = self.context, dict[str, Any]()
        for name, value in context.states.items():
            leaves = [context.machine.zeros(value, leaf) for leaf in value.leaves]
            context.unset.add(name, leaves)
            state[name] = build([leaf.path for leaf in value.leaves], leaves, context.structures)
        if context.counted:
            state[CALLS] = context.no_calls()
        return state

    def spmd(
        self, *values: str, returns: Sequence[str] | str | None = None, check_vma: bool = True, **names: str
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorate a step: `jax.shard_map` over the plan's axes, with specs from the plan.

        The first parameter of the function is the state; each other one is named here with the value
        of the plan that it lies like: the last output so called, else the state, else the input, else the
        source value that a phase takes; or with a placement ("per member, data"). Arguments may be any
        pytrees (an optimiser's state lies like its parameters). The function sees one rank's arrays, `per`
        dimensions stripped, and returns the state, then its named arguments in order or the first few of
        them; `returns` lists other results: each one after the state by the value of the plan or the argument
        that it lies like, or by a placement: `returns=("params", "opt", "loss")`. The state may hold those
        states alone that phases inside use.
        check_vma: as of `jax.shard_map`; False for steps whose types JAX cannot tell (Pallas kernels). Then
        nobody notices gradients that are reduced already (CP0807) and results that differ though they should
        be the same (CP0813).

        Raises CP0806 for partial values, CP0810 when called inside a shard_map, CP0811 for names and
        results that do not agree, CP0805 and CP0812 for arguments that do not fit.
        """
        if values:
            spmd.refuse_unnamed(self.context, values)
        return spmd.decorate(self.context, names, returns, check_vma=check_vma)

    def jit(
        self,
        function: Callable[..., Any] | None = None,
        *,
        timeout: float = preflight.TIMEOUT_S,
        check_s: float = BUDGET_S,
        check_same: bool = True,
        pgle: bool | str | Path | Rates = False,
        **options: Any,
    ) -> Any:
        """`jax.jit(function, **options)` of a step that all ranks compare before they run it.

        Before the first call for new shapes, types or shardings all ranks of this run, which therefore call
        alike, compare its arguments and collectives, compile it, and compare the compiled collectives. Before
        the first step of the run they try the plan's collectives, see `check_collectives`, for about
        `check_s` seconds; 0: not at all. check_same: also compare, once, checksums of the arguments that
        several processes or devices hold alike: under MPI those that `run.spmd` places so, on a mesh all that
        are replicated. Later calls cost what those of `jax.jit` do. On GPUs XLA gets the options of
        `program.compiler_options`, except those that `compiler_options` sets. timeout: seconds to wait for a
        rank, which may still compile. pgle: compile for GPUs once more with a profile of instructions:
        estimated for `"h100:4x8"`, a `lowering.audit.Machine`, or the devices at hand (True), and used if by
        the same estimate the step is faster; or the path of a measured one. Without `function` a decorator.
        Calls raise on all ranks CP0854 if steps do not fit together, CP0855 if a rank does not come, CP0856
        if a collective gives a wrong result, CP0861 if an argument differs that should be the same. Raises
        CP0857 for invalid times, and CP0859 and CP1150 for `pgle`; warns if that has no effect (CP0860).
        """
        self._check_times(check_s=check_s, timeout=timeout)
        if function is None:
            return functools.partial(
                self.jit, timeout=timeout, check_s=check_s, check_same=check_same, pgle=pgle, **options
            )

        def check() -> preflight.Check | None:
            return None if self._checked or not check_s else functools.partial(self._check, check_s)

        own: dict[str, Any] = options.pop("compiler_options", None) or {}
        options["compiler_options"] = {**self.context.compiler_options, **own}
        profile = self.context.profile(pgle)
        machine, file = self.context.machine, self._file
        return preflight.jit(machine, function, file, timeout, options, check, profile, check_same=check_same)

    def check_collectives(
        self, seconds: float = BUDGET_S, timeout: float = preflight.TIMEOUT_S
    ) -> list[Checked]:
        """Carry out each distinct collective of the plan at its real size on data whose result is known.

        The largest come first; none is begun once `seconds` have passed, on any rank. All ranks call this
        alike. Returns what was tried: `text` and `place` of a collective and the `seconds` that it took.
        Raises CP0856 on all ranks where one of them gets something else than the plan asks for, CP0854 where
        some are about to run a step instead, CP0855 where one does not come within `timeout` seconds, CP0857
        for times that are none and inside a function that JAX traces.
        """
        self._check_times(seconds=seconds, timeout=timeout)
        if _compat.tracing():
            call = "run.check_collectives() is called inside a function that JAX traces"
            self.context.fail("CP0857", call, "it carries out collectives: call it before the step")
        comparison = preflight.Preflight(self.context.machine, self._file, timeout)
        with self.context.machine.joint.ahead(comparison):
            comparison.begin(preflight.Hello(checks=True))
            return self._check(seconds, comparison)

    def _check(self, seconds: float, comparison: preflight.Preflight) -> list[Checked]:
        self._checked = True
        return check_collectives(self.context, seconds, comparison)

    def _check_times(self, *, timeout: float, **budget: float) -> None:
        """Raises CP0857 for a time that is no number of seconds; of a budget 0 is one, too."""
        for name, value in {"timeout": timeout, **budget}.items():
            check_seconds("CP0857", name, value, file=self._file, also_allowed=(0,) if name in budget else ())

    def varying(self, tree: Any) -> Any:
        """`tree`, typed by JAX as varying over all of the plan's axes: no communication.

        Differentiate with respect to this, and gradients are each rank's own term. Outside of a shard_map
        arrays on Explicit axes become `reduced`, whose gradients are terms, too: of the whole sum, so the
        plan reduces them `by sum`. Raises CP0816 outside of a shard_map over other axes.
        """
        axes, backend, mesh = tuple(self.context.sizes), self.context.backend, self.context.machine.mesh
        if has_reduced(mesh, axes) and not self.context.around("run.varying is called"):
            with self.context.machine.context():
                return jax.tree_util.tree_map(functools.partial(reduced_over, mesh, axes), tree)
        self._inside("run.varying")

        def vary(x: Any) -> Any:
            return backend.varying(jnp.asarray(x), axes)

        return jax.tree_util.tree_map(vary, tree)

    def sharding(self, name: str) -> Any:
        """The `NamedSharding` of the arrays of a value on this mesh; of a tree a tree of them.

        name: of an output, else a state, else an input, as in `run.spmd`. `jax.device_put` and
        `jax.jit(in_shardings=..)` take it. Raises CP0811 for an unknown name, CP0806 for a partial value,
        CP0874 for a run on the ranks of a communicator.
        """
        return self.context.sharding(name)

    save_anything_except_tapped = staticmethod(tap.save_anything_except_tapped)

    def tap(self, tree: Any, *, like: str | None = None, phase: str = "step") -> Any:
        """`tree` itself, but its gradient is reduced where the backward pass makes it.

        For parameters of layers under `lax.scan`, in the body of the scan: there the reduction runs under
        the layers that are still to come. The gradient is reduced as phase `phase` reduces its input
        `like` (by default its only partial input), so it must not be passed to the phase again. Scan
        `jax.checkpoint(body, policy=run.save_anything_except_tapped, prevent_cse=False)`, or the backward
        pass has a copy of all layers.

        tree: parameters as they are, not `run.varying(...)` of them, in dtypes that `like` was compiled
        for. Raises CP0815 where the plan's reduction cannot run inside the backward pass, CP0816 outside
        of a shard_map.
        """
        self._inside("run.tap")
        call = self._phase(phase)
        partial = [name for name, value in call.lowered.arguments.items() if value.placement.partial]
        names = [like] if like is not None else partial
        if len(names) != 1 or names[0] not in partial:
            self.context.fail(
                "CP0815",
                f"run.tap needs one partial input of phase `{phase}` to reduce like",
                f"its partial inputs: {', '.join(partial) or 'none'}",
                'name one: run.tap(layer, like="grads")',
            )
        paths, flat = flatten(tree)
        how = tap.recipe(call.lowered, names[0], flat.leaves)
        for path, leaf in zip(paths, flat.leaves, strict=True):
            again = [axis for axis in how.axes if axis in _compat.varying_axes(leaf)]
            if again and any(self.context.sizes[axis] > 1 for axis in again):
                where = f" at `{path}`" if path else ""
                self.context.fail(
                    "CP0815",
                    f"run.tap is given parameters{where} that vary over {', '.join(again)} already",
                    "tap the parameters as they are: run.tap makes them varying itself",
                )
        return tap.tap(how, tree)

    def member(self, place: int) -> Member:
        """Member `place` of the plan's ensemble: its devices and what belongs to it. Raises CP0818."""
        return Member(self, place)

    def batches(
        self,
        phase: str = "step",
        *,
        member: int | None = None,
        state: Mapping[str, int] | None = None,
        group: Group | None = None,
        timeout: float | None = None,
        workers: str = "threads",
    ) -> Batches:
        """What depends on sources alone in `phase`, as sharded arrays: see `runtime.batches.Batches`.

        member: only that member's part, on its own part of the mesh; members that share what they load take
        it from one stream, and every process of a job asks for its own members' batches alike. state: what
        `.state()` of earlier batches returned. group: the processes of this host that share loaded values
        (CP0927 where there are none to share); found by asking all processes if not given. timeout: seconds
        to wait for one of them that lives but is silent, compilation and start-up included; by default as
        `group` says, and 1800 for one that is found.
        workers: "threads", or "processes" for host functions that hold the interpreter lock; as many as
        `cores` says. Raises CP0803 where a source is not bound, CP0817 for an unknown phase, CP0818 for an
        unknown member, and CP09xx.
        """
        if member is not None:
            part = self.member(member)
            return part.batches(phase, state=state, group=group, timeout=timeout, workers=workers)
        own = self.context.schedule.phase(phase)
        missing = [op.source for op in own.ops if isinstance(op, ir.Read) and op.source not in self.sources]
        if missing:
            note = f"pass it: program.bind(mesh, sources={{{missing[0]!r}: ...}})"
            self.context.fail("CP0803", f"source `{missing[0]}` is not bound", note)
        clock = None
        if self.context.members and taken_apart(self.context.whole or self.context.schedule, own):
            clock = self.clocks.member(self.context, own, self.sources, state, group, timeout, workers)
        batches = Batches(
            self.context, own, self.sources,
            state=state, among=group, timeout=timeout, clocked=clock, workers=workers, restarts=self.restarts,
        )  # fmt: skip
        self.ledger.add(batches, batches.meters)
        return batches

    def _phase(self, name: str) -> PhaseCall:
        return self.phases[self.context.schedule.phase(name).name]

    def _inside(self, caller: str) -> None:
        if self.context.sizes and not self.context.around(f"{caller} is called"):
            note = "it belongs into run.spmd, or into a shard_map of your own over the plan's axes"
            self.context.fail("CP0816", f"{caller} is called outside of a shard_map", note)

    def failure(self, error: BaseException) -> CommplanError | None:
        """What JAX raised where a phase of this run could not be carried out over MPI, as CP0834 with the
        plan's line; None for other errors.

        error: a `RuntimeError` or `ValueError` from a compiled function, or from asking for its results.
        """
        spans = [op.span for phase in self.context.schedule.phases for op in phase.ops]
        diagnostic = reason(error, spans, self._file)
        return None if diagnostic is None else CommplanError(diagnostic)

    @property
    def place(self) -> dict[str, int]:
        """Under MPI this rank's index along each axis and ensemble; `{}` for a mesh of devices."""
        local = self.context.machine.local() if self.context.machine.layout == "local" else {}
        return {axis: held[0] for axis, held in local.items()}

    @property
    def init_names(self) -> tuple[str, ...]:
        """The names of the plan's states."""
        return tuple(self.context.states)

    @property
    def _file(self) -> str:
        return self.context.schedule.file


@public_face
class TypedRun(Bound):
    """A program on a mesh, as it is known of every plan: what faces of plans add their phases to.

    Phases are attributes: `run.start`, `run.step`, `run.every[4]`, and those with names of their own
    (`run.evaluate`). Raises `CommplanError`: CP0801 and CP0802 for a mesh that does not fit, CP0803 for
    functions and sources that are missing or unknown, CP0901 to CP0903 for sources that cannot be read in any
    order, CP0908 for host functions that take other arguments.
    """

    def __init__(
        self,
        program: Program[Any],
        mesh: Any,
        *,
        sources: Mapping[str, Any] | None = None,
        functions: Mapping[str, Callable[..., Any]] | None = None,
        seed: int = 0,
        watchdog_s: float | None = None,
        busy_s: float = BUSY_S,
        timeout: float = TIMEOUT_S,
    ) -> None:
        schedule = program.schedule

        def check() -> None:
            check_kinds(schedule, sources, functions, seed, watchdog_s, busy_s, timeout)
            check_bound(schedule, dict(sources or {}), dict(functions or {}))
            bound(schedule, dict(sources or {}), sources or {})
            checked_functions(schedule, dict(functions or {}))

        self.program = program
        context = Context(
            schedule,
            machine_for(Binding(schedule, program.digest, seed, check, watchdog_s, timeout, busy_s), mesh),
            dict(functions or {}),
            operator.index(seed),
            known_structures(program.structures.values()),
        )
        super().__init__(context, sources or {})
        context.warn_of_flags()

    def __repr__(self) -> str:
        return f"<Run {self.program.schedule.plan}: {', '.join(self.phases)}>"

    @property
    def role(self) -> Literal["worker", "server"]:
        """What this process is: under MPI the ranks after the workers' are the plan's servers."""
        return "server" if isinstance(self.context.machine, Serving) else "worker"

    def serve(self, **how: Any) -> Any:
        """On a server: serve until every worker has left, and tell what was served. On a worker: None.

        how: see `commplan.runtime.param_server.serve.serve`.
        """
        machine = self.context.machine
        if not isinstance(machine, Serving):
            return None
        from commplan.runtime.param_server.serve import serve  # noqa: PLC0415  only where there are servers

        return serve(self.context, machine, **how)

    def close(self, why: str = "") -> None:
        """Tell the plan's servers that this worker is done, and why if that is a failure.

        Without servers nothing happens. What was begun is waited for. Phases that ask servers fail from now
        on (CP0832). It happens by itself at the interpreter's exit, and when nothing refers to the run.
        """
        if self.role == "worker" and self.context.backend.service is not None:
            self.context.backend.service.close(why)

    @contextlib.contextmanager
    def late(self) -> Generator[None]:
        """While this runs, the others' watchdogs expect this process to come late: it evaluates, or writes.

        Without it, those that wait for this one print it after `watchdog_s` of `Program.bind`, and end with
        CP0834 after `busy_s`.
        """
        with mpi_watchdog.expected_late(), watchdog.expected_late():
            yield

    def metrics(
        self, path: str | os.PathLike[str] | None = None, *, period_s: float = PERIOD_S,
        address: str | None = None,
    ) -> Metrics:  # fmt: skip
        """Say what the input of this run costs, in the text format of Prometheus: in a file, at an address
        that is scraped, or both.

        It covers all batches that this process asks the run for, members' ones included. The file is written
        now, every `period_s` seconds and at the end: by `close` of what is returned (a `with` block will do),
        when the run is collected, and at the interpreter's exit. Samples carry the labels `plan`, `phase`,
        `line`, `stage` and `rank` (this process's number).

        path: a file in a folder that exists; where a job has several processes and no `{rank}` stands in the
        path, `costs.prom` becomes `costs.rank3.prom`. address: `9464`, on the loopback interface, or
        `host:9464`; rank r answers at port 9464 + r. Raises CP0960 where that cannot be written or listened
        at, CP0961 for a period that is none, CP0962 without prometheus-client, CP0963 for what is no address.
        """
        metrics = kept(self.ledger.summaries, self.context.machine.process(), path, period_s, address)
        weakref.finalize(self, close_quietly, metrics)
        return metrics

    def join(self, name: str, parts: Mapping[int, Any]) -> Any:
        """Global arrays of the value `name`, from the parts of members (see `Member.take`).

        parts: by member, for every member whose devices this process holds. Raises CP0811 for an unknown
        name, CP0818 where the value does not differ between members.
        """
        axis = members.ensemble(self.program.schedule, next(iter(parts), 0))
        return self.context.machine.join(parts, placed(self, name, axis), axis)


class AnyPhases:
    """To type checkers: whatever is no other attribute is a phase."""

    if TYPE_CHECKING:
        every: Every

        def __getattr__(self, name: str) -> PhaseCall: ...


@public_face
class Run(AnyPhases, TypedRun):
    """A program on a mesh. Made by `Program.bind`; see `TypedRun`."""


@public_face
class Member(AnyPhases, Bound):
    """One member of an ensemble, made by `run.member(m)`: a mesh of its own devices, and on it the phases
    that cross no members, as callables; `spmd`, `varying`, `tap`, `batches` and `init` as on the run.

    Values have no dimension for the member. Members may have different architectures: compile the plan
    once for the shapes of each and take every member from its own run; their programs may run different
    numbers of times. `mesh`: the member's devices. `index`: its place.
    """

    def __init__(self, run: Bound, place: int) -> None:
        whole = run.context
        axis = members.ensemble(whole.schedule, place)
        self.run, self.index, self.axis = run, place, axis
        context = dataclasses.replace(
            whole,
            schedule=members.without(whole.schedule, axis),
            machine=whole.machine.member(members.without(whole.schedule, axis), axis, place),
            members={axis: place},
            whole=whole.schedule,
        )
        super().__init__(context, run.sources)
        self.ledger, self.clocks, self.restarts = run.ledger, run.clocks, run.restarts

    def __repr__(self) -> str:
        return f"<Member {self.index} of {self.axis}: {', '.join(self.phases)}>"

    def take(self, name: str, tree: Any) -> Any:
        """This member's part of global arrays that lie like the value `name`; nothing moves."""
        placement = placed(self.run, name)
        return self.run.context.machine.part(name, tree, placement, self.axis, self.context.machine)


def placed(run: Bound, name: str, axis: str | None = None) -> Placement:
    """The placement of the value called `name`. Raises CP0811, and CP0818 where it is not per `axis`."""
    value, file = run.context.named(name), run.context.schedule.file
    if axis is not None and axis not in value.placement.per:
        fail("CP0818", f"`{name}` is the same for all members: it is {value.placement}", file=file)
    return value.placement
