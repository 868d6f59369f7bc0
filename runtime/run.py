"""A program that is bound to a mesh, functions and data."""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from commplan.diagnostics import CommplanError
from commplan.lowering.gpu.estimate import Machine as Rates
from commplan.lowering.jax import _compat
from commplan.lowering.jax.layers import backward_reduce
from commplan.lowering.mpi.job.engine_errors import reason
from commplan.lowering.mpi.job.watchdog import expected_late
from commplan.runtime import spmd
from commplan.runtime.context import Context
from commplan.runtime.context.member_schedule import ensemble
from commplan.runtime.input.device.batches import Batches
from commplan.runtime.input.group import Group
from commplan.runtime.layers import Body, ShardedWeights, tap_gradients
from commplan.runtime.observe.metrics import PERIOD_S, Metrics, close_quietly, start_metrics
from commplan.runtime.phase_lookup import Every, unknown_phase
from commplan.runtime.phases import PhaseCall
from commplan.runtime.preflight import preflight
from commplan.runtime.preflight.collective_check import BUDGET_S, Checked, check_collectives
from commplan.runtime.run_input import RunInput
from commplan.tracebacks import public_face
from commplan.wait import check_seconds

if TYPE_CHECKING:
    from commplan.api import Program
    from commplan.runtime.member import Member


@public_face
class TypedRun:
    """A program on a mesh, with the methods that all plans share; plan classes add their phases to it.

    Phases are attributes: `run.start`, `run.step`, `run.every[4]`, and phases with names (`run.evaluate`).

    Attributes:
        every: The phases `every N steps`, by N.
        program: The compiled program.
        context: The schedule with its machine and functions.
        input: The sources, and the batches that were opened.
        mesh: The mesh or communicator of the run.
        phases: All phases by name, in the plan's order.
    """

    every: Any

    def __init__(self, program: Program[Any], context: Context, run_input: RunInput) -> None:
        schedule = context.schedule
        self.program, self.context, self.input = program, context, run_input
        self.mesh = context.machine.mesh
        self._is_checked = False  # Whether `check_collectives` has run.
        self.phases = {phase.name: PhaseCall(context, phase) for phase in schedule.phases}
        self.every = Every({p.period: self.phases[p.name] for p in schedule.phases if p.kind == "every"})
        self._weights = ShardedWeights(context)
        self._members: dict[int, Member] = {}  # By place. A member keeps its compiled phases.

    def __repr__(self) -> str:
        return f"<Run {self.program.schedule.plan}: {', '.join(self.phases)}>"

    if not TYPE_CHECKING:  # Classes written by `commplan stubs` declare all phases of a plan.

        def __getattr__(self, name: str) -> PhaseCall:
            phases: Mapping[str, PhaseCall] = self.__dict__.get("phases", {})
            if name not in phases:
                raise unknown_phase(name, phases, dir(self) if phases else ())
            return phases[name]

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.phases})

    def init(self) -> dict[str, Any]:
        """The plan's states before `at start`.

        Returns:
            Zeros as global arrays, by state; `{}` for a plan without states.
        """
        self.input.restarts.clear()
        return self.context.initial_state()

    def spmd(
        self, *values: str, returns: Sequence[str] | str | None = None, check_vma: bool = True, **names: str
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorate a step: `jax.shard_map` over the plan's axes, with specs from the plan.

        The first parameter of the function is the state. Each other parameter is named here with a value of
        the plan, whose placement it gets: the last output of that name, else the state, else the input, else
        the source value that a phase takes. A placement can be written out instead ("per member, data").

        The function sees one rank's arrays without `per` dimensions. It returns the state, then its named
        arguments in order, or the first few of them. Arguments may be any pytrees: an optimizer's state has
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
            CommplanError: CP0806 for partial values; CP0811 for unknown names. A call of the step raises
                CP0805 or CP0812 for arguments or states that do not fit; CP0810 inside a shard_map; CP0811
                for results that do not fit `returns`; CP0813 for results that should be the same; CP0862 if
                a hidden phase has not ended.
        """
        if values:
            spmd.refuse_unnamed(self.context, values)
        return spmd.decorate(self.context, names, returns, check_vma=check_vma)

    def jit(
        self, function: Callable[..., Any] | None = None, *, timeout: float = preflight.TIMEOUT_S,
        check_s: float = BUDGET_S, check_same: bool = True, pgle: bool | str | Path | Rates = False,
        **options: Any,
    ) -> Any:  # fmt: skip
        """`jax.jit(function, **options)` for a step that all ranks compare before they run it.

        Before the first call for new shapes, dtypes or shardings, all ranks of this run compare the step's
        arguments and collectives. They compile the step and then compare the compiled collectives. All ranks
        must therefore make the same calls. Later calls cost as much as those of `jax.jit`. Before the first
        step of the run the ranks also test the plan's collectives; see `check_collectives`.

        On GPUs XLA gets the options of `program.compiler_options`, except those in `compiler_options`.

        Args:
            function: The step; without it, a decorator is returned.
            timeout: Seconds to wait for a rank, which may still compile.
            check_s: Seconds for trying the plan's collectives; 0 skips them.
            check_same: Whether to compare once the checksums of arguments that several processes or devices
                hold. Under MPI these are the arguments whose placement in `run.spmd` says so; on a mesh, all
                replicated arguments.
            pgle: A latency profile for compiling the step a second time on GPUs. It is estimated for
                `"h100:4x8"`, for a `lowering.audit.Machine`, or for the devices of this process (True), and
                used if the step is faster by the same estimate. A path names a measured profile instead.
            **options: The options of `jax.jit`.

        Returns:
            The compiled step. Its calls raise on all ranks CP0854 if steps do not fit together; CP0855 if a
            rank does not arrive; CP0856 if a collective has a wrong result; CP0861 if an argument differs
            that should be the same.

        Raises:
            CommplanError: CP0857 for invalid times; CP0859 or CP1150 for `pgle`. Warns with CP0860 if `pgle`
                has no effect.
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
        machine, file = self.context.machine, self.context.schedule.file
        step = preflight.ComparedStep(function, options, check, profile, check_same)
        return preflight.jit(machine, step, file, timeout)

    def check_collectives(
        self, seconds: float = BUDGET_S, timeout: float = preflight.TIMEOUT_S
    ) -> list[Checked]:
        """Run each distinct collective of the plan at its real size on data with a known result.

        The largest come first. No rank starts another one after `seconds`. All ranks call this.

        Args:
            seconds: The budget in seconds. At least one collective is tested.
            timeout: Seconds to wait for a rank.

        Returns:
            The tested collectives: `text`, `place`, and the `seconds` that each took.

        Raises:
            CommplanError: CP0856 on all ranks if one of them gets a wrong result; CP0854 if some ranks are
                about to run a step instead; CP0855 if a rank does not arrive; CP0857 for invalid times, and
                inside a function that JAX traces.
        """
        self._check_times(seconds=seconds, timeout=timeout)
        if _compat.tracing():
            call = "run.check_collectives() is called inside a function that JAX traces"
            self.context.fail("CP0857", call, "it carries out collectives: call it before the step")
        comparison = preflight.Preflight(self.context.machine, self.context.schedule.file, timeout)
        with self.context.machine.joint.ahead(comparison):
            comparison.begin(preflight.Hello(checks=True))
            return self._check(seconds, comparison)

    def _check(self, seconds: float, comparison: preflight.Preflight) -> list[Checked]:
        self._is_checked = True
        return check_collectives(self.context, seconds, comparison)

    def _check_times(self, *, timeout: float, **budget: float) -> None:
        """Raise CP0857 for an invalid number of seconds; a budget may be 0."""
        file = self.context.schedule.file
        check_seconds("CP0857", "timeout", timeout, file=file)
        for name, value in budget.items():
            check_seconds("CP0857", name, value, file=file, also_allowed=(0,))

    def varying(self, tree: Any) -> Any:
        """Type `tree` as varying over all of the plan's axes; nothing is communicated.

        Gradients with respect to the result are each rank's term. Outside a shard_map arrays on Explicit axes
        become `reduced`. Their gradients are terms, too, but of the whole sum, so the plan reduces them `by
        sum`.

        Raises CP0816 outside a shard_map if the axes are not Explicit.
        """
        return spmd.varying(self.context, tree)

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

    save_anything_except_tapped = staticmethod(backward_reduce.save_anything_except_tapped)

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
        return tap_gradients(self.context, self._phase(phase).lowered, tree, like)

    def layer(
        self, body: Callable[..., Any], shards: Any, *args: Any, shapes: Any = None, **options: Any
    ) -> Any:
        """Call `body(weights, *args)` with the weights gathered from `shards`; see `layers` for `options`."""
        whole = None if shapes is None else [shapes]
        return self.layers(lambda w, inputs: body(w, *inputs), [shards], args, shapes=whole, **options)

    def layers(
        self, body: Body | Sequence[Body], shards: Sequence[Any], x: Any, *,
        shapes: Sequence[Any] | None = None, phase: str = "step",
        weights: str | None = None, grads: str | None = None,
    ) -> Any:  # fmt: skip
        """Apply layers one after another: layer i returns `body(weights, x)` for the result of layer i - 1.

        A layer's weights are gathered from `shards` as phase `phase` gathers its split input. This runs while
        earlier layers compute: as many as the plan's `gather` has in `{ prefetch = .. }`, one by default. The
        weights are dropped after use.

        The backward pass gathers the weights again in reverse order. It scatters the gradient as the phase
        scatters its partial input. The gradient of `shards` is therefore sharded already: do not pass it to
        the phase again. The backward pass keeps all other residuals unless `body` is `jax.checkpoint(body)`.

        Only first-order, reverse-mode derivatives are supported.

        Args:
            body: One function, or one per layer.
            shards: For each layer a pytree of this rank's shards, as `slice` and `run.shards` make them, of
                any float dtype.
            x: The input of the first layer, a pytree.
            shapes: For each layer a pytree of its whole leaves, if the plan's weights do not determine them.
            phase: The phase that gathers and scatters.
            weights: The split input of the phase, if it has several.
            grads: The partial input of the phase, if it has several.

        Returns:
            The result of the last layer.

        Raises:
            CommplanError: CP0816 outside a shard_map; CP0826 if the phase does not gather the weights and
                scatter their gradient; CP0827 for shards that do not fit.
        """
        self.context.require_inside("run.layers")
        stages = self._weights.stages(self._phase(phase).name, weights, grads)
        return self._weights.layers(stages, body, shards, x, shapes)

    def scan_layers(
        self, body: Body, shards: Any, x: Any, *, shapes: Any = None, phase: str = "step",
        weights: str | None = None, grads: str | None = None,
    ) -> Any:  # fmt: skip
        """Apply equal layers under `lax.scan`; see `layers`.

        Args:
            body: A function whose result has the structure, shapes and dtypes of `x`.
            shards: A pytree of this rank's shards of all layers, stacked along a leading dimension as
                `run.shards(.., stacked=True)` makes them.
            x: The input of the first layer, a pytree.
            shapes: A pytree of the whole leaves of one layer.
            phase: See `layers`.
            weights: See `layers`.
            grads: See `layers`.

        Returns:
            The result of the last layer.

        Raises:
            CommplanError: see `layers`.
        """
        self.context.require_inside("run.scan_layers")
        stages = self._weights.stages(self._phase(phase).name, weights, grads)
        return self._weights.scan_layers(stages, body, shards, x, shapes)

    def shards(
        self, tree: Any, *, stacked: bool = False, phase: str = "step", weights: str | None = None
    ) -> Any:
        """This rank's shards of whole weights, with the placement of the split input of phase `phase`.

        A leaf is flattened, padded with zeros and cut; a scalar is not cut.

        Args:
            tree: A pytree of whole weights.
            stacked: Whether the leading dimension of each leaf counts layers, each of which is cut.
            phase: The phase that gathers the weights.
            weights: Its split input, if it has several.

        Raises:
            CommplanError: CP0816 outside a shard_map; CP0826 if the phase does not gather the weights.
        """
        self.context.require_inside("run.shards")
        return self._weights.shards(self._phase(phase).name, weights, tree, stacked=stacked)

    def member(self, place: int) -> Member:
        """Member `place` of the plan's ensemble, with its devices and its part of the plan.

        Returns:
            The same object for the same member.

        Raises:
            CommplanError: CP0818 if there is no such member.
        """
        from commplan.runtime.member import Member  # noqa: PLC0415  a subclass of `Run`

        if place not in self._members:
            self._members.setdefault(place, Member(self.program, self.context, self.input, place))
        return self._members[place]

    def batches(
        self, phase: str = "step", *, member: int | None = None, state: Mapping[str, int] | None = None,
        group: Group | None = None, timeout: float | None = None, workers: str = "threads",
    ) -> Batches:  # fmt: skip
        """Iterate over the values of `phase` that depend only on sources, as sharded arrays; see `Batches`.

        Args:
            phase: The name of a phase.
            member: If set, only this member's part, on its part of the mesh. Members that share data read it
                from one stream. Every process of a job requests the batches of its own members.
            state: The result of `.state()` of earlier batches.
            group: The processes of this host that share loaded values. If None, all processes exchange it.
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
        return self.input.batches(
            self.context, self.context.schedule.phase(phase), state, group, timeout, workers
        )

    def _phase(self, name: str) -> PhaseCall:
        return self.phases[self.context.schedule.phase(name).name]

    def failure(self, error: BaseException) -> CommplanError | None:
        """The error CP0834 of a phase that failed over MPI, with the plan's line; None for other errors.

        Args:
            error: A `RuntimeError` or `ValueError` from a compiled function or from waiting for its results.
        """
        spans = [op.span for phase in self.context.schedule.phases for op in phase.ops]
        diagnostic = reason(error, spans, self.context.schedule.file)
        return None if diagnostic is None else CommplanError(diagnostic)

    @property
    def place(self) -> dict[str, int]:
        """The index of this rank along each axis and ensemble under MPI; `{}` for a mesh of devices."""
        local = self.context.machine.input.local() if self.context.machine.layout == "local" else {}
        return {axis: indices[0] for axis, indices in local.items()}

    @property
    def role(self) -> Literal["worker", "server"]:
        """The role of this process: under MPI the ranks after the workers are the plan's servers."""
        return self.context.machine.role

    def serve(self, **options: Any) -> Any:
        """Serve on a server until every worker has left; return None on a worker.

        Args:
            options: The fields of `commplan.runtime.param_server.serve.ServeOptions`.

        Returns:
            On a server, the result of `commplan.runtime.param_server.serve.serve`.
        """
        return self.context.machine.serve(self.context, **options)

    def close(self, why: str = "") -> None:
        """Report to the plan's servers that this worker is done, after its pending requests.

        Phases that send requests to servers fail afterwards (CP0832). A run without servers does nothing.
        The run is also closed at the interpreter's exit and when it is collected.

        Args:
            why: The reason if the worker fails, or "".
        """
        if self.role == "worker" and self.context.backend.service is not None:
            self.context.backend.service.close(why)

    @contextlib.contextmanager
    def late(self) -> Generator[None]:
        """Announce that this process will be late, for example because it evaluates or writes.

        Without this, processes that wait for this one print a notice after `watchdog_s` of `Program.bind`,
        and end the job with CP0834 after `busy_s`.
        """
        with expected_late():
            yield

    def metrics(
        self, path: str | os.PathLike[str] | None = None, *, period_s: float = PERIOD_S,
        address: str | None = None,
    ) -> Metrics:  # fmt: skip
        """Export the costs of this run's input in Prometheus text format, to a file, over HTTP, or both.

        The metrics cover all batches that this process requests from the run, those of members included.
        Samples have the labels `plan`, `phase`, `line`, `stage` and `rank`, the number of this process. The
        file is written now, every `period_s` seconds, and at the end. The end is `close` of the result (which
        is a context manager), the collection of the run, or the interpreter's exit.

        Args:
            path: A file in an existing folder. In a job with several processes `costs.prom` becomes
                `costs.rank3.prom` unless the path contains `{rank}`.
            period_s: Seconds between two writes.
            address: `9464` on the loopback interface, or `host:9464`; rank r serves port 9464 + r.


        Raises:
            CommplanError: CP0960 if the file or port cannot be used; CP0961 for an invalid period; CP0962
                without prometheus-client; CP0963 for an invalid address.
        """
        process = self.context.machine.process()
        metrics = start_metrics(self.input.ledger.summaries, process, path, period_s, address)
        weakref.finalize(self, close_quietly, metrics)
        return metrics

    def join(self, name: str, parts: Mapping[int, Any]) -> Any:
        """Join the parts of members to arrays of the value `name`, the inverse of `Member.take`.

        Args:
            name: A value of the plan.
            parts: A pytree by member, for every member with devices of this process.

        Raises:
            CommplanError: CP0811 for an unknown name; CP0818 if the value does not differ between members,
                or if a part is missing; CP0842 under MPI for the part of another rank's member.
        """
        axis = ensemble(self.context.schedule, next(iter(parts), 0))
        return self.context.machine.join(parts, self.context.placement(name, axis), axis)


@public_face
class Run(TypedRun):
    """A program on a mesh, made by `Program.bind`; see `TypedRun`."""

    if TYPE_CHECKING:  # Every other attribute is a phase.
        every: Every

        def __getattr__(self, name: str) -> PhaseCall: ...
