"""A phase as a callable, `(state, **inputs) -> (outputs, state)`, inside and outside a shard_map."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from commplan.diagnostics import Span, near_note, type_of
from commplan.ir import schedule as ir
from commplan.ir.plan import name_of
from commplan.lowering.jax import _compat, _jit, check
from commplan.lowering.jax.execution import ONCE, CallContext, PhaseInFlight
from commplan.lowering.jax.functions import RngContext, short_seed
from commplan.lowering.jax.gradient_times import mark
from commplan.lowering.jax.layout import leaf_specs
from commplan.lowering.jax.phase import Lowered
from commplan.lowering.jax.primitives import terms
from commplan.lowering.jax.pytree import Tree, flatten
from commplan.lowering.mpi.job.engine_errors import as_diagnostics
from commplan.runtime import reduced_values
from commplan.runtime.context import CALLS, Carried, Context
from commplan.runtime.machines.explicit import unreduced_over
from commplan.runtime.outputs import Outputs, build_outputs
from commplan.runtime.state_check import check_count, check_state, list_names
from commplan.tracebacks import public_face


@public_face
class PhaseCall:
    """One phase of a bound program.

    Call it as `outputs, state = phase(state, **inputs)`. Inside a `jax.shard_map` over the plan's axes (that
    of `run.spmd`, or your own) arrays are those of one rank: `per` values lack the leading dimension of their
    axes, and `split` values are this rank's shard. Outside they are global arrays: one leading dimension per
    `per` axis, and whole `split` leaves. The call then wraps itself in shard_map and jit.

    The state contains the states that the phase reads, by name. Other states pass through, and states that
    the phase sets are replaced or added.

    Raises:
        CommplanError: CP0804 for missing or unknown inputs; CP0805 for a wrong structure, shape or dtype;
            CP0806 for `partial` inputs outside a shard_map; CP0807 for gradients that JAX has already summed;
            CP0808 for stages that JAX does not run; CP0812 for a state without an entry that the phase reads;
            CP0813 for values that should be the same; CP0814 in a shard_map over other axes; CP0824 for a
            state that `at start` has not set yet; CP0834 if another rank fails under MPI.

    Attributes:
        context: The context of the run.
        name: The name of the phase: `start`, `step`, `every_N` or that in the plan.
        lowered: The phase as a function of one rank's arrays.
    """

    def __init__(self, context: Context, phase: ir.Phase) -> None:
        self.context = context
        self.name = phase.name
        self.lowered: Lowered = context.lower(phase)
        self._phase = phase
        self._jitted_global = _jit.jit(
            _jit.renamed(self._call_shard_mapped, phase.name), context.compiler_options
        )
        if calls := context.machine.calls:
            self._jitted_global, index = calls.counted(self._jitted_global, phase.name)
            lines = [op.span.line for op in phase.ops if isinstance(op, ir.Collective)]
            calls.locate(index, lines, context.schedule.file)
        self._jitted_local = jax.jit(_jit.renamed(self._inline, phase.name))

    @property
    def interval(self) -> int:
        """The number of steps from one call to the next: N, or N / F for `every N steps in F fragments`."""
        return self._phase.interval

    def __repr__(self) -> str:
        inputs = "".join(f", {name}" for name in self.lowered.arguments)
        outputs = ", ".join(binding.name for binding in self.lowered.outputs)
        return f"<phase {self.name}(state{inputs}) -> ({outputs or 'nothing'}), state>"

    def __call__(
        self, state: Any = None, /, *positional: Any, **inputs: Any
    ) -> tuple[Outputs, dict[str, Any]]:
        arguments = self.lowered.arguments
        self.check_names(arguments, positional, inputs)
        self._check_no_open_call("is called")
        checked = self._entries(state)
        array_inputs = {name: check.numbers(arguments[name], value) for name, value in inputs.items()}
        if self.context.around(f"phase `{self.name}` is called", self._phase.span):
            return self._inside(checked, inputs, array_inputs)
        partial = [name for name, value in arguments.items() if value.placement.partial]
        partial = [name for name in partial if not unreduced_over(inputs[name], self._partial_axes(name))]
        if partial:
            self._fail(
                "CP0806",
                f"phase `{self.name}` takes `{partial[0]}`, which is partial, but is called"
                " outside a shard_map",
                f"a partial value is a different term on each rank ({arguments[partial[0]].placement}),"
                " which a global array cannot represent",
                "call the phase in a function decorated with @run.spmd(...), where the value is this rank's"
                " term; or, on Explicit axes, with arrays whose type is unreduced over"
                f" {', '.join(self._partial_axes(partial[0]))}, as jax.grad returns for run.varying(params)",
            )
        with self.context.machine.context():
            return self._call_jitted(self._jitted_global, "global", checked, array_inputs)

    def begin(self, state: Any = None, /, *positional: Any, **inputs: Any) -> PhaseRun:
        """Begin a call whose exchanges run under the following steps; `finish` of the result ends it.

        Call `begin` and `finish` in one function that is decorated with `run.spmd` and runs under jit. Call
        `advance` before each of the steps. It begins the exchanges that are due, and returns the values that
        the step computes with.

            call = run.every[36].begin(state, params=params)
            for batch in batches:
                params, opt = inner(call.advance(params), opt, batch)
            out, state = call.finish(state, params=params)

        Raises:
            CommplanError: CP0862 for a phase that is not `hidden`, outside of such a function, and before the
                call that `begin` started before has ended; otherwise as for a call of the phase.
        """
        if not self._phase.hidden:
            note = "write `every N steps hidden under V steps`; call other phases at once"
            self._fail("CP0862", f"phase `{self.name}` is not hidden, and has no beginning and end", note)
        self.check_names(self.lowered.arguments, positional, inputs)
        checked = self._entries(state)
        if not self.context.hidden_calls or not _compat.tracing():
            message = f"phase `{self.name}` begins outside of a function with @run.spmd under jit"
            self._fail("CP0862", message, "begin and end it in one function with @run.jit and @run.spmd(..)")
        self._check_no_open_call("begins")
        self._check_terms(inputs)
        trees, states = self._local(self._read(checked), inputs)
        call, counts = self._call_context(checked.get(CALLS))
        run = PhaseRun(self, self.lowered.begin(trees, states, call), counts)
        self.context.hidden_calls[-1][self.name] = run
        return run

    def _inside(self, state: dict[str, Any], inputs: Mapping[str, Any], array_inputs: dict[str, Any]) -> Any:
        """Call the phase with one rank's arrays: inside a shard_map, or under MPI.

        Args:
            state: The states by name, those that the phase does not read included.
            inputs: The inputs by name, as the caller passed them.
            array_inputs: The same inputs, with numbers as arrays.
        """
        self._check_terms(inputs)
        if _compat.tracing():
            outputs, new = self.merge_state(state, *self._inline(self._read(state), inputs))
        else:
            with as_diagnostics(self._spans, self.context.schedule.file):
                outputs, new = self._call_jitted(self._jitted_local, "local", state, array_inputs)
        self.record_reduced(outputs)
        return outputs, new

    def _check_terms(self, inputs: Mapping[str, Any]) -> None:
        """Raise CP0807 for partial inputs that are reduced already, on a backend without such types."""
        if not self.context.backend.typed:
            span, file = self._phase.span, self.context.schedule.file
            reduced_values.check_terms(inputs, self.lowered.arguments, self._axes, span, file)

    def record_reduced(self, outputs: Outputs) -> None:
        """Record which outputs are reduced, for `_check_terms` of later phases."""
        for binding in () if self.context.backend.typed else self.lowered.outputs:
            value = self.lowered.values[binding.value]
            reduced_values.record(value, outputs[binding.name], self._axes, self._phase)

    @property
    def _axes(self) -> list[str]:
        """The plan's axes of more than one rank."""
        return [axis for axis, size in self.context.sizes.items() if size > 1]

    def _put_on_devices(self, trees: Mapping[str, Any], values: Mapping[str, ir.Value]) -> dict[str, Any]:
        """Put the trees of `values` on the devices; see `Context.placed`."""
        return {
            name: self.context.placed(tree, values[name].placement) if name in values else tree
            for name, tree in trees.items()
        }

    def _partial_axes(self, name: str) -> tuple[str, ...]:
        """The axes over which a partial argument is summed."""
        return self.lowered.arguments[name].placement.partial

    @property
    def _spans(self) -> list[Span]:
        return [op.span for op in self._phase.ops]

    def _call_jitted(
        self, call: Any, layout: check.Layout, state: dict[str, Any], inputs: dict[str, Any]
    ) -> tuple[Outputs, dict[str, Any]]:
        """Call a jitted function with the states that the phase reads; other states are returned unchanged.

        Args:
            call: A function like `_inline`, under jit.
            layout: The layout of `state` and `inputs`, for errors about them.
            state: All states by name.
            inputs: The inputs by name, with numbers as arrays if they fit the plan.
        """
        read = self._read(state)
        if not _compat.tracing():
            read = self._put_on_devices(read, self._reads)
            inputs = self._put_on_devices(inputs, self.lowered.arguments)
        if check.has_numbers(jax.tree_util.tree_leaves(inputs)):
            # Numbers are left only if they do not fit the plan. jit would convert them, so report them here.
            self._check_arguments(read, inputs, layout)
        try:
            outputs, new = call(read, inputs)
        except TypeError:  # JAX cannot take one of the values: report its leaf if that is the reason.
            self._check_arguments(read, inputs, layout)
            raise
        return self.merge_state(state, outputs, new)

    def _read(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The part of the state that the phase reads, and its own count of calls."""
        counts = {CALLS: {self.name: state[CALLS][self.name]}} if self.lowered.is_counted else {}
        return {name: state[name] for name in self._reads} | counts

    def merge_state(
        self, state: dict[str, Any], outputs: Outputs, new: dict[str, Any]
    ) -> tuple[Outputs, dict[str, Any]]:
        """The outputs, and `state` with the entries `new` of the phase, counts of calls included."""
        counts = {CALLS: dict(state[CALLS]) | new[CALLS]} if CALLS in new else {}
        return outputs, state | new | counts

    def _fail(self, code: str, message: str, *notes: str) -> NoReturn:
        self.context.fail(code, message, *notes, span=self._phase.span)

    def _entries(self, state: Any) -> dict[str, Any]:
        """The entries of the state that the caller passed, after their checks."""
        subject, span = f"phase `{self.name}` was given", self._phase.span
        entries = check_state(self.context, state, subject, self._read_names, span)
        if self.lowered.is_counted:
            check_count(self.context, entries[CALLS], self.name, subject, span)
        self.context.unset.check(self._phase, entries)
        return entries

    def _check_no_open_call(self, event: str) -> None:
        """Raise CP0862 if a hidden call has begun whose end would overwrite the states that this call sets.

        Args:
            event: `begins` or `is called`, for the message.
        """
        open_calls = self.context.hidden_calls[-1] if self.context.hidden_calls else {}
        for name in open_calls:
            if name == self.name or self._phase.kind == "start":
                message = f"phase `{self.name}` {event} before the call of phase `{name}` has ended"
                self._fail("CP0862", message, "call `finish` of the result of `begin` first")

    def check_names(
        self, arguments: Mapping[str, Any], positional: Sequence[Any], inputs: Mapping[str, Any]
    ) -> None:
        """Raise CP0804 unless `inputs` have exactly the names of `arguments`, and `positional` is empty."""
        if positional:
            names = [name for name in arguments if name not in inputs] or ["name"]
            by_name = ", ".join(f"{name}=.." for name in names)
            takes = f"phase `{self.name}` takes its inputs by name"
            message = f"{takes}, but was passed {1 + len(positional)} values"
            self._fail("CP0804", message, f"write (state, {by_name})")
        takes = f"it takes: {', '.join(arguments) or 'only the state'}"
        missing = [name for name in arguments if name not in inputs]
        unknown = [name for name in inputs if name not in arguments]
        near = [note for name in unknown for note in near_note(name, missing or arguments)]
        if missing:
            passed = f", but was passed {list_names(unknown)}" if unknown else ""
            self._fail("CP0804", f"phase `{self.name}` needs {list_names(missing)}{passed}", *near, takes)
        if unknown:
            self._fail("CP0804", f"phase `{self.name}` does not take {list_names(unknown)}", *near, takes)

    def _inline(self, state: dict[str, Any], inputs: Mapping[str, Any]) -> tuple[Outputs, dict[str, Any]]:
        """Run the phase on one rank's arrays. Returns its outputs and the new entries of the state."""
        results, updates, calls = self._run(*self._local(state, inputs), state.get(CALLS))
        return build_outputs(results, updates, calls)

    def _local(
        self, state: Mapping[str, Any], inputs: Mapping[str, Any]
    ) -> tuple[dict[str, Tree], dict[str, Tree]]:
        """One rank's inputs and states after their checks, as leaves with structures."""
        span, backend = self._phase.span, self.context.backend
        trees, states = self._check_arguments(state, inputs, "local")
        arguments, entry = self.lowered.arguments, self.context.entry
        trees = {n: check.types(n, arguments[n], tree, backend, span) for n, tree in trees.items()}
        states = {n: check.types(n, entry(n), tree, backend, span) for n, tree in states.items()}
        return dict(mark(trees, arguments)), states

    def late(self, positional: Sequence[Any], inputs: Mapping[str, Any]) -> dict[str, Tree]:
        """The inputs that a hidden phase reads at its end, after their checks; see `PhaseRun.finish`."""
        arguments = {name: self.lowered.arguments[name] for name in self.lowered.late_arguments}
        self.check_names(arguments, positional, inputs)
        checker = check.Check("local", self.context.sizes, self._phase.span, self.context.schedule.file)
        return {
            name: check.types(
                name, value, checker.value(f"input `{name}`", value, inputs[name]), self.context.backend,
                self._phase.span,
            )
            for name, value in arguments.items()
        }  # fmt: skip

    def _run(
        self, inputs: Mapping[str, Tree], states: Mapping[str, Tree], calls: Any
    ) -> tuple[dict[str, Tree], dict[str, Tree], dict[str, Any]]:
        call, counts = self._call_context(calls)
        return *self.lowered.run(inputs, states, call), counts

    def _call_context(self, calls: Any) -> tuple[CallContext, dict[str, Any]]:
        """The context of a call, and the count of calls after it.

        Args:
            calls: The numbers of earlier calls by phase, an entry of the state; unused if the phase does not
                depend on its number.

        Returns:
            The context, and the new count as an entry of the state, or {}.
        """
        if not self.lowered.is_counted:
            return ONCE, {}
        number, rng = jnp.asarray(calls[self.name]), None
        if self.lowered.is_random:
            rng = RngContext.from_seed(short_seed(self.context.seed), number, members=self.context.members)
        return CallContext(number, rng), {CALLS: {self.name: number + 1}}

    def _check_arguments(
        self, state: Mapping[str, Any], inputs: Mapping[str, Any], layout: check.Layout
    ) -> tuple[dict[str, Tree], dict[str, Tree]]:
        """The inputs and states after their checks in a layout."""
        checker = check.Check(layout, self.context.sizes, self._phase.span, self.context.schedule.file)
        arguments = self.lowered.arguments.items()
        states = self._reads.items()
        trees = {name: checker.value(f"input `{name}`", value, inputs[name]) for name, value in arguments}
        return trees, {name: checker.value(f"state `{name}`", value, state[name]) for name, value in states}

    @functools.cached_property
    def _read_names(self) -> tuple[str, ...]:
        """The names of the states that the phase reads, and the count of calls if the phase needs it."""
        return (*self._reads, *([CALLS] if self.lowered.is_counted else []))

    @functools.cached_property
    def _reads(self) -> dict[str, ir.Value]:
        """The states that the phase reads, without those on servers."""
        states = self.context.states
        return {name: states[name] for name in map(name_of, self._phase.states) if name in states}

    def _call_shard_mapped(
        self, state: dict[str, Any], inputs: dict[str, Any]
    ) -> tuple[Outputs, dict[str, Any]]:
        """Run the phase on global arrays, in a shard_map with specs from the plan."""
        lowered, context = self.lowered, self.context
        arguments = lowered.arguments
        reads = self._reads
        trees, states = self._check_arguments(state, inputs, "global")
        value_of = lowered.values
        results, updates = (
            Carried.for_values(context, {binding.name: value_of[binding.value] for binding in bindings})
            for bindings in (lowered.outputs, self._phase.updates)
        )

        def body(input_leaves: dict[str, list[Any]], state_leaves: dict[str, list[Any]], calls: Any) -> Any:
            local = {
                name: context.strip(
                    trees[name].like(_as_terms(x, arguments[name])), arguments[name].placement
                )
                for name, x in input_leaves.items()
            }
            local_states = {
                name: context.strip(states[name].like(x), reads[name].placement)
                for name, x in state_leaves.items()
            }
            out, new, count = self._run(local, local_states, calls)
            return results.leave(out), updates.leave(new), count

        counts = {CALLS: PartitionSpec()} if lowered.is_counted else {}
        call = context.machine.spread(
            body, (_specs(arguments), _specs(reads), PartitionSpec()), (results.specs, updates.specs, counts)
        )
        leaves = ({n: list(t.leaves) for n, t in values.items()} for values in (trees, states))
        out, new, count = call(*leaves, state.get(CALLS, {}))
        return Outputs(results.build(out)), updates.build(new) | count


@public_face
class PhaseRun:
    """A call of a hidden phase between its beginning and its end; see `PhaseCall.begin`."""

    def __init__(self, phase: PhaseCall, in_flight: PhaseInFlight, counts: dict[str, Any]) -> None:
        self._phase, self._in_flight, self._counts = phase, in_flight, counts
        self._trace = _compat.recording()

    def advance(self, values: Any) -> Any:
        """Begin the exchanges that are due before the next step.

        Args:
            values: An array or pytree of arrays that the step before computed and the next one computes with,
                such as the weights.

        Returns:
            `values`, ordered after the beginning of the exchanges.

        Raises:
            CommplanError: CP0862 if the call is not open in this function; CP0805 for leaves that are not
                arrays.
        """
        self._check_open("advance")
        paths, tree = flatten(values)
        leaves = [self._array(*pair) for pair in zip(paths, tree.leaves, strict=True)]
        return tree.like(self._in_flight.advance(leaves)).build()

    def finish(self, state: Any = None, /, *positional: Any, **inputs: Any) -> tuple[Outputs, dict[str, Any]]:
        """End the call.

        Args:
            state: The state of the plan, after the steps.
            positional: Refused: inputs have names.
            inputs: The present values of the inputs that the phase reads at its end, by name.

        Returns:
            The outputs and the state, as a call of the phase returns them.

        Raises:
            CommplanError: CP0862 if the call is not open in this function; CP0804, CP0805 or CP0812 for
                inputs or a state that do not fit.
        """
        phase = self._phase
        subject = f"the end of phase `{phase.name}` was given"
        checked = check_state(phase.context, state, subject, tuple(self._counts))
        if self._counts:
            check_count(phase.context, checked[CALLS], phase.name, subject)
        self._check_open("finish")
        late = phase.late(positional, inputs)
        del phase.context.hidden_calls[-1][phase.name]
        outputs, new = build_outputs(*self._in_flight.finish(late), self._counts)
        phase.record_reduced(outputs)
        return phase.merge_state(checked, outputs, new)

    def _array(self, path: str, leaf: Any) -> jax.Array:
        """A leaf of the values of `advance` as an array. Raises CP0805 if it is something else."""
        try:
            return jnp.asarray(leaf)
        except (TypeError, ValueError, OverflowError):
            phase, where = self._phase, f" at `{path}`" if path else ""
            message = f"`advance` of phase `{phase.name}` was given {type_of(leaf)}{where}, not an array"
            phase.context.fail("CP0805", message, "pass the arrays that the next step computes with")

    def _check_open(self, method: str) -> None:
        """Raise CP0862 if the call has ended, or if `method` is not called in the function of `begin`."""
        phase = self._phase
        open_calls, fail = phase.context.hidden_calls[-1:], phase.context.fail
        if not open_calls or open_calls[0].get(phase.name) is not self:
            message = f"`{method}` of phase `{phase.name}` belongs to no open call"
            fail("CP0862", message, "`finish` ends a call, once, in the function that began it")
        if _compat.recording() is not self._trace:
            message = f"`{method}` of phase `{phase.name}` is traced apart from its `begin`"
            reason = "JAX traces functions under jax.jit and bodies of jax.lax.scan and other loops apart"
            note = "write the steps that hide the exchange as a Python loop; a step may contain loops of JAX"
            fail("CP0862", message, reason, note)


def _specs(values: Mapping[str, ir.Value]) -> dict[str, list[PartitionSpec]]:
    return {name: leaf_specs(value) for name, value in values.items()}


def _as_terms(leaves: list[Any], value: ir.Value) -> list[Any]:
    """The leaves of a partial value as this rank's terms, also if they are unreduced arrays."""
    return [terms(x, value.placement.partial) for x in leaves]
