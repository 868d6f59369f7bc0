"""The phases of a machine, with the methods of a run and of one of its members."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commplan.diagnostics import CommplanError, Diagnostic, Note, fail, listed, near_note
from commplan.ir import schedule as ir
from commplan.ir.types import Placement
from commplan.lowering.audit.estimate import Machine as Rates
from commplan.lowering.jax import _compat
from commplan.lowering.jax.layers import backward_reduce as tap
from commplan.lowering.jax.pytree import build, flatten
from commplan.lowering.jax.typing_shim import jax, jnp
from commplan.lowering.mpi.job.engine_errors import reason
from commplan.runtime import member as members
from commplan.runtime import spmd
from commplan.runtime.context import CALLS, Context
from commplan.runtime.input.device.batches import Batches
from commplan.runtime.input.group import Group
from commplan.runtime.input.multirate.run_batches import ClockedPhases
from commplan.runtime.input.multirate.schedule import taken_apart
from commplan.runtime.input.restarts import Restarts
from commplan.runtime.layers import ShardedWeights
from commplan.runtime.machines.explicit import has_reduced, reduced_over
from commplan.runtime.observe import preflight
from commplan.runtime.observe.collective_check import BUDGET_S, Checked, check_collectives
from commplan.runtime.observe.metrics import Ledger
from commplan.runtime.phases import Every, PhaseCall
from commplan.tracebacks import public_face
from commplan.wait import check_seconds


class UnknownPhaseError(CommplanError, AttributeError):
    """The plan has no phase of this name."""


@public_face
class Bound(ShardedWeights):
    """The phases of a machine: the common part of a whole run and of one member of an ensemble."""

    every: Any

    def __init__(self, context: Context, sources: Mapping[str, Any]) -> None:
        schedule = context.schedule
        self.context, self.mesh, self.sources = context, context.machine.mesh, dict(sources)
        self.ledger = Ledger()  # The costs of this run's batches.
        self.clocks, self.restarts = ClockedPhases(), Restarts()
        self._is_checked = False  # Whether the collectives were tried.
        self.phases = {phase.name: PhaseCall(context, phase) for phase in schedule.phases}
        self.every = Every({p.period: self.phases[p.name] for p in schedule.phases if p.kind == "every"})

    if not TYPE_CHECKING:  # Plan classes that `commplan stubs` writes have no other phases than their own.

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
        """The plan's states before `at start`.

        Returns:
            Zeros as global arrays, by state; `{}` for a plan without states.
        """
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

        The first parameter of the function is the state. Each other parameter is named here with a value of
        the plan, whose placement it gets: the last output of that name, else the state, else the input, else
        the source value that a phase takes. A placement can be written out instead ("per member, data").

        The function sees one rank's arrays without `per` dimensions. It returns the state, then its named
        arguments in order, or the first few of them. Arguments may be any pytrees: an optimiser's state has
        the placement of its parameters. The state may lack states that no phase inside the function uses.

        Args:
            *values: Not allowed: values need parameter names.
            returns: The results after the state. Each is named by a value of the plan, by an argument with
                the same placement, or by a placement: `returns=("params", "opt", "loss")`.
            check_vma: See `jax.shard_map`. False is for steps whose types JAX cannot infer (Pallas kernels).
                Gradients that are reduced already (CP0807) and results that differ (CP0813) are then not
                detected.
            **names: The value or placement of each parameter.

        Returns:
            The decorator.

        Raises:
            CommplanError: CP0806 for partial values; CP0810 if called inside a shard_map; CP0811 for unknown
                names and for results that do not fit `returns`; CP0805 or CP0812 for arguments that do not
                fit.
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
        """`jax.jit(function, **options)` for a step that all ranks compare before they run it.

        Before the first call for new shapes, dtypes or shardings, all ranks of this run compare the step's
        arguments and collectives. They compile it and then compare the compiled collectives. All ranks must
        therefore make the same calls. Later calls cost as much as those of `jax.jit`. Before the first step
        of the run they also try the plan's collectives; see `check_collectives`.

        On GPUs XLA gets the options of `program.compiler_options`, except those in `compiler_options`.

        Args:
            function: The step; without it, a decorator is returned.
            timeout: Seconds to wait for a rank, which may still compile.
            check_s: Seconds for trying the plan's collectives; 0 skips them.
            check_same: Whether to compare once the checksums of arguments that several processes or devices
                hold. Under MPI these are the arguments whose placement in `run.spmd` says so; on a mesh, all
                replicated arguments.
            pgle: A latency profile with which GPUs compile the step once more. It is estimated for
                `"h100:4x8"`, for a `lowering.audit.Machine`, or for the devices of this process (True), and
                used if the step is faster by the same estimate. A path names a measured profile instead.
            **options: The options of `jax.jit`.

        Returns:
            The compiled step. Its calls raise on all ranks CP0854 if steps do not fit together, CP0855 if a
            rank does not arrive, CP0856 if a collective has a wrong result, and CP0861 if an argument differs
            that should be the same.

        Raises:
            CommplanError: CP0857 for invalid times; CP0859 or CP1150 for `pgle`. Warns if `pgle` has no
                effect (CP0860).
        """
        self._check_times(check_s=check_s, timeout=timeout)
        if function is None:
            return functools.partial(
                self.jit, timeout=timeout, check_s=check_s, check_same=check_same, pgle=pgle, **options
            )

        def check() -> preflight.Check | None:
            return None if self._is_checked or not check_s else functools.partial(self._check, check_s)

        user_options: dict[str, Any] = options.pop("compiler_options", None) or {}
        options["compiler_options"] = {**self.context.compiler_options, **user_options}
        profile = self.context.profile(pgle)
        machine, file = self.context.machine, self._file
        return preflight.jit(machine, function, file, timeout, options, check, profile, check_same=check_same)

    def check_collectives(
        self, seconds: float = BUDGET_S, timeout: float = preflight.TIMEOUT_S
    ) -> list[Checked]:
        """Run each distinct collective of the plan at its real size on data with a known result.

        The largest come first. No rank starts another one after `seconds`. All ranks call this.

        Args:
            seconds: The budget.
            timeout: Seconds to wait for a rank.

        Returns:
            The collectives that were tried: `text`, `place`, and the `seconds` that each took.

        Raises:
            CommplanError: CP0856 on all ranks if one of them gets a wrong result; CP0854 if some ranks are
                about to run a step instead; CP0855 if a rank does not arrive; CP0857 for invalid times, and
                inside a function that JAX traces.
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
        self._is_checked = True
        return check_collectives(self.context, seconds, comparison)

    def _check_times(self, *, timeout: float, **budget: float) -> None:
        """Raise CP0857 for an invalid number of seconds; a budget may be 0."""
        for name, value in {"timeout": timeout, **budget}.items():
            check_seconds("CP0857", name, value, file=self._file, also_allowed=(0,) if name in budget else ())

    def varying(self, tree: Any) -> Any:
        """Type `tree` as varying over all of the plan's axes; nothing is communicated.

        Gradients with respect to the result are each rank's term. Outside a shard_map arrays on Explicit axes
        become `reduced`. Their gradients are terms, too, but of the whole sum, so the plan reduces them `by
        sum`.

        Raises CP0816 outside a shard_map if the axes are not Explicit.
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
        """The `NamedSharding` of a value on this mesh, or a tree of them for a tree.

        Args:
            name: An output, else a state, else an input, as in `run.spmd`.

        Returns:
            A sharding for `jax.device_put` and `jax.jit(in_shardings=..)`.

        Raises:
            CommplanError: CP0811 for an unknown name; CP0806 for a partial value; CP0874 for a run on the
                ranks of a communicator.
        """
        return self.context.sharding(name)

    save_anything_except_tapped = staticmethod(tap.save_anything_except_tapped)

    def tap(self, tree: Any, *, like: str | None = None, phase: str = "step") -> Any:
        """Return `tree`, and reduce its gradient where the backward pass computes it.

        Use it for parameters of layers under `lax.scan`, in the body of the scan: the reduction then overlaps
        the layers that follow. The gradient is reduced as phase `phase` reduces its input `like`, so do not
        pass it to the phase again. Scan `jax.checkpoint(body, policy=run.save_anything_except_tapped,
        prevent_cse=False)`; otherwise the backward pass has a copy of all layers.

        Args:
            tree: Parameters, not `run.varying(...)` of them, in dtypes for which `like` was compiled.
            like: A partial input of the phase, by default its only one.
            phase: The phase that reduces the gradients.

        Raises:
            CommplanError: CP0815 if the plan's reduction cannot run inside the backward pass; CP0816 outside
                a shard_map.
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
        recipe = tap.recipe(call.lowered, names[0], flat.leaves)
        for path, leaf in zip(paths, flat.leaves, strict=True):
            again = [axis for axis in recipe.axes if axis in _compat.varying_axes(leaf)]
            if again and any(self.context.sizes[axis] > 1 for axis in again):
                where = f" at `{path}`" if path else ""
                self.context.fail(
                    "CP0815",
                    f"run.tap takes parameters{where} that vary over {', '.join(again)} already",
                    "tap the parameters before run.varying: run.tap makes them varying itself",
                )
        return tap.tap(recipe, tree)

    def member(self, place: int) -> Member:
        """Member `place` of the plan's ensemble, with its devices and its part of the plan; raises CP0818."""
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
        """The batches of `phase`, its values that depend only on sources, as sharded arrays; see `Batches`.

        Args:
            phase: The name of a phase.
            member: If set, only this member's part, on its part of the mesh. Members that share data read it
                from one stream. Every process of a job requests the batches of its own members.
            state: The result of `.state()` of earlier batches.
            group: The processes of this host that share loaded values. If None, all processes are asked.
            timeout: Seconds to wait for a process of the group that is alive but does not answer, compilation
                and start-up included. By default that of `group`, or 1800 for a group that is found.
            workers: "threads", or "processes" for host functions that hold the interpreter's lock. Their
                number is that of `cores` in the plan.

        Raises:
            CommplanError: CP0803 for a source that is not bound; CP0817 for an unknown phase; CP0818 for an
                unknown member; CP0927 for a group without values to share; and other CP09xx errors.
        """
        if member is not None:
            part = self.member(member)
            return part.batches(phase, state=state, group=group, timeout=timeout, workers=workers)
        plan_phase = self.context.schedule.phase(phase)
        missing = [
            op.source for op in plan_phase.ops if isinstance(op, ir.Read) and op.source not in self.sources
        ]
        if missing:
            note = f"pass it: program.bind(mesh, sources={{{missing[0]!r}: ...}})"
            self.context.fail("CP0803", f"source `{missing[0]}` is not bound", note)
        clock = None
        if self.context.members and taken_apart(self.context.whole or self.context.schedule, plan_phase):
            clock = self.clocks.member(self.context, plan_phase, self.sources, state, group, timeout, workers)
        batches = Batches(
            self.context, plan_phase, self.sources,
            state=state, among=group, timeout=timeout, clocked=clock, workers=workers, restarts=self.restarts,
        )  # fmt: skip
        self.ledger.add(batches, batches.meters)
        return batches

    def _phase(self, name: str) -> PhaseCall:
        return self.phases[self.context.schedule.phase(name).name]

    def _inside(self, caller: str) -> None:
        if self.context.sizes and not self.context.around(f"{caller} is called"):
            note = "call it in run.spmd, or in your own shard_map over the plan's axes"
            self.context.fail("CP0816", f"{caller} is called outside a shard_map", note)

    def failure(self, error: BaseException) -> CommplanError | None:
        """The error CP0834 of a phase that failed over MPI, with the plan's line; None for other errors.

        Args:
            error: A `RuntimeError` or `ValueError` from a compiled function or from waiting for its results.
        """
        spans = [op.span for phase in self.context.schedule.phases for op in phase.ops]
        diagnostic = reason(error, spans, self._file)
        return None if diagnostic is None else CommplanError(diagnostic)

    @property
    def place(self) -> dict[str, int]:
        """This rank's index along each axis and ensemble under MPI; `{}` for a mesh of devices."""
        local = self.context.machine.local() if self.context.machine.layout == "local" else {}
        return {axis: indices[0] for axis, indices in local.items()}

    @property
    def init_names(self) -> tuple[str, ...]:
        """The names of the plan's states."""
        return tuple(self.context.states)

    @property
    def _file(self) -> str:
        return self.context.schedule.file


class AnyPhases:
    """For type checkers: every other attribute is a phase."""

    if TYPE_CHECKING:
        every: Every

        def __getattr__(self, name: str) -> PhaseCall: ...


@public_face
class Member(AnyPhases, Bound):
    """One member of an ensemble, made by `run.member(m)`, with a mesh of its devices.

    Its attributes are the phases without communication between members. `spmd`, `varying`, `tap`, `batches`
    and `init` work as on the run. Values have no dimension for the member.

    Members may have different architectures: compile the plan once for the shapes of each, and take every
    member from its own run. Their programs may run different numbers of steps. `mesh` contains the member's
    devices, and `index` is its place.
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
        """This member's part of global arrays with the placement of the value `name`; nothing is sent."""
        placement = placed(self.run, name)
        return self.run.context.machine.part(name, tree, placement, self.axis, self.context.machine)


def placed(run: Bound, name: str, axis: str | None = None) -> Placement:
    """The placement of the value `name`; raises CP0811, and CP0818 if it is not per `axis`."""
    value, file = run.context.named(name), run.context.schedule.file
    if axis is not None and axis not in value.placement.per:
        fail("CP0818", f"`{name}` is the same for all members: it is {value.placement}", file=file)
    return value.placement
