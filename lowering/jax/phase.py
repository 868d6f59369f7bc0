"""Lowers a phase of a schedule to a function of one rank's arrays, which is called while a step is traced.

`Lowered` runs single ops; `execution` determines their order. Under JAX the function runs inside a shard_map,
under MPI on the arrays of a process.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp

from commplan.diagnostics import fail
from commplan.ir import schedule as ir
from commplan.ir.analysis.def_use import DefUse
from commplan.ir.analysis.rounds import is_late
from commplan.ir.analysis.server_ops import ServerOp, server_op, worker_operands
from commplan.ir.fragments import FragmentLayout
from commplan.ir.ops.fragment import layout_of
from commplan.ir.plan import Gather, name_of
from commplan.lowering.jax import _compat, ops, packing, servers
from commplan.lowering.jax.backend import Backend
from commplan.lowering.jax.execution import ONCE, CallContext, Execution, PhaseInFlight
from commplan.lowering.jax.functions import DeviceFunctions
from commplan.lowering.jax.layout import varying
from commplan.lowering.jax.packing import Env
from commplan.lowering.jax.primitives import warning_when_transposed
from commplan.lowering.jax.pytree import LEAF, Structure, Tree, structure_by
from commplan.lowering.programs import for_scalar

_DERIVATIVE_OF_GATHER = (
    "the derivative of this `gather` is an all-reduce, of which each rank keeps only a part, because JAX sums"
    " gradients of values that are the same on all ranks. run.layers gathers weights and scatters gradients"
)
_watchers: list[list[ir.Schedule]] = []  # the lists of all active contexts `traced_schedules`
# The schedules of `register_layers` by their owner.
_layers: weakref.WeakKeyDictionary[Any, tuple[ir.Schedule, ...]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def traced_schedules() -> Generator[list[ir.Schedule]]:
    """A context that yields a list of the schedules whose phases are traced within it, once for each call."""
    schedules: list[ir.Schedule] = []
    _watchers.append(schedules)
    try:
        yield schedules
    finally:
        _watchers[:] = [watcher for watcher in _watchers if watcher is not schedules]


def register_layers(owner: object, schedules: Iterable[ir.Schedule]) -> None:
    """Register schedules that gather and scatter a layer, as long as `owner` exists."""
    _layers[owner] = tuple(schedules)


def layer_schedules() -> tuple[ir.Schedule, ...]:
    """The schedules that gather and scatter layers in this process, as long as their runs exist."""
    return tuple(schedule for schedules in list(_layers.values()) for schedule in schedules)


@dataclass(frozen=True)
class Lowered:
    """A lowered phase. Build it once, and call `run` while tracing.

    Attributes:
        schedule: The schedule.
        phase: The phase of the schedule.
        functions: The device functions by name, including the built-in ones.
        backend: The backend.
        structures: Pytree structures by leaf paths, for values whose structure cannot be inferred from
            arguments.
    """

    schedule: ir.Schedule
    phase: ir.Phase
    functions: Mapping[str, Callable[..., Any]]
    backend: Backend
    structures: Mapping[tuple[str, ...], Structure] = field(default_factory=dict[tuple[str, ...], Any])

    @cached_property
    def outputs(self) -> tuple[ir.Binding, ...]:
        """The outputs that the phase returns: those that do not depend on sources alone."""
        return tuple(binding for binding in self.phase.outputs if not binding.source_only)

    @cached_property
    def values(self) -> Mapping[str, ir.Value]:
        """All values of the phase, by id."""
        return {value.id: value for value in (*self.schedule.entry, *self.phase.values)}

    @cached_property
    def arguments(self) -> dict[str, ir.Value]:
        """The arguments of the phase by name: inputs of the plan, and values computed from sources alone."""
        values = self.values
        refs = {name_of(ref): ref for ref in self.phase.inputs}
        refs |= {binding.name: binding.value for binding in self.phase.takes}
        return {name: values[ref] for name, ref in refs.items()}

    @cached_property
    def late_arguments(self) -> tuple[str, ...]:
        """The arguments that a hidden phase reads again at its end."""
        read = {ref for op in self.ops if is_late(op) for ref in ir.operands(op)}
        return tuple(name_of(ref) for ref in self.phase.inputs if ref in read)

    @cached_property
    def on_servers(self) -> frozenset[str]:
        """The ids of the states on entry that are stored on servers."""
        entry = self.schedule.entry
        return frozenset(value.id for value in entry if value.placement.server is not None)

    @cached_property
    def ops(self) -> tuple[ir.Op, ...]:
        """The ops that run on the device when the phase is called."""
        available = [*self.phase.inputs, *self.phase.states, *(binding.value for binding in self.phase.takes)]
        needed = [binding.value for binding in (*self.outputs, *self.phase.updates)]
        return DefUse(self.phase.ops).ancestors(needed, frozenset(available))

    @cached_property
    def _device_functions(self) -> DeviceFunctions:
        return DeviceFunctions(self.functions, self.phase, self.values, self.backend, self.schedule.file)

    @cached_property
    def is_random(self) -> bool:
        """Whether a random function runs in it."""
        return any(isinstance(op, ir.Map) and op.random for op in self.ops)

    @property
    def is_counted(self) -> bool:
        """Whether it depends on the number of its call, so that callers must count calls."""
        return self.is_random or self.phase.fragments > 1

    def run(
        self, inputs: Mapping[str, Tree], state: Mapping[str, Tree], call: CallContext = ONCE
    ) -> tuple[Env, Env]:
        """Run the phase.

        Args:
            inputs: One rank's arguments by name.
            state: One rank's states by name; those on servers are ignored.
            call: The parameters of the call.

        Returns:
            The outputs and the new states by name, without states on servers.

        Raises:
            CommplanError: CP0808 for ops that JAX does not run; CP0805 for a conversion to a 64-bit dtype
                that is disabled in JAX; CP0809 if a function does not match the plan; CP0851 for states on
                servers if the backend has none.
        """
        env = self.enter(inputs, state)
        self.apply(self.ops, env, call)
        return self.results(env)

    def begin(
        self, inputs: Mapping[str, Tree], state: Mapping[str, Tree], call: CallContext = ONCE
    ) -> PhaseInFlight:
        """Begin a hidden phase: run its ops up to the first round of exchanges. See `run`."""
        env = self.enter(inputs, state)
        return PhaseInFlight(Execution(self, self.values, self.ops, env, call), self.ops)

    def enter(self, inputs: Mapping[str, Tree], state: Mapping[str, Tree]) -> Env:
        """The values on entry by id. Records the schedule for `traced_schedules`."""
        for watcher in _watchers:
            watcher.append(self.schedule)
        env: Env = {ref: inputs[name_of(ref)] for ref in self.phase.inputs}
        env |= {ref: state[name_of(ref)] for ref in self.phase.states if ref not in self.on_servers}
        return env | {binding.value: inputs[binding.name] for binding in self.phase.takes}

    def results(self, env: Env) -> tuple[Env, Env]:
        """The outputs and the new states by name, from the values of the phase."""
        outputs = {binding.name: self._result(binding.value, env) for binding in self.outputs}
        server_states = {name_of(ref) for ref in self.on_servers}
        updates = [binding for binding in self.phase.updates if binding.name not in server_states]
        return outputs, {binding.name: self._result(binding.value, env) for binding in updates}

    def apply(self, sequence: Iterable[ir.Op], env: Env, call: CallContext = ONCE) -> None:
        """Run the ops of `sequence` in order and add their results to `env`.

        Split collectives and requests to servers begin at their position, and complete before the first op
        that reads their result. HLO and profiles show ops as `commplan/PHASE/lineN`.
        """
        sequence = tuple(sequence)
        execution = Execution(self, self.values, sequence, env, call)
        execution.run(sequence)
        execution.complete()

    def scope(self, op: ir.Op) -> Any:
        """The name scope of `op` in HLO and in profiles: its phase and the line of the plan."""
        return jax.named_scope(f"commplan/{self.phase.name}/line{op.span.line}")

    def start(self, op: ir.Op, env: Env) -> Callable[[], Env] | None:
        """Start a split collective or a request to servers; None for other ops."""
        request = server_op(op, self.values)
        if request is not None:
            return self._request(request, env)
        if not isinstance(op, ir.Collective) or op.form != "split":
            return None
        leaves = env[op.operand].leaves
        # `_exchange` runs some empty leaves and scalars without a collective.
        if any(x.size == 0 or x.ndim == 0 for x in leaves):
            return None
        source, target = self.values[op.operand], self.values[op.result]
        parts: list[Callable[[], Any]] = []
        for x, leaf in zip(leaves, target.leaves, strict=True):
            complete = self.backend.start(self._operand(op, x, source.kind == "array"), op)
            if complete is None:  # the backend cannot split it
                return None
            parts.append(partial(self._complete, op, complete, leaf))
        return lambda: {op.result: env[op.operand].like([part() for part in parts])}

    def _request(self, op: ServerOp, env: Env) -> Callable[[], Env]:
        """Start a request to servers. The returned function waits for its results. Raises CP0851."""
        service = self.backend.service
        if service is None:
            servers.refuse(op.span, self.schedule.file)
        finish = servers.begin(service, self.phase.name, op, self.values, env, self.schedule.file)

        def finish_tree() -> Env:
            return {
                ref: Tree(leaves, self._response_structure(op, ref, env)) for ref, leaves in finish().items()
            }

        return finish_tree

    def _response_structure(self, op: ServerOp, ref: str, env: Env) -> Structure:
        """The structure of result `ref` of a request.

        It is that of an operand with the same leaf paths, otherwise that of `structures` or nested dicts.
        """
        value = self.values[ref]
        if value.kind != "tree":
            return LEAF
        paths = [leaf.path for leaf in value.leaves]
        for operand in worker_operands(op, self.values):
            if [leaf.path for leaf in self.values[operand].leaves] == paths:
                return env[operand].structure
        return structure_by(paths, self.structures)

    def _complete(self, op: ir.Collective, complete: Callable[[], Any], target: ir.Leaf) -> Any:
        """Complete a split collective of one leaf, whose result is `target`."""
        moved = self._at_root(op, complete())
        return ops.unshard(moved, target) if op.kind == "all_gather" else moved

    def _at_root(self, op: ir.Collective, moved: Any) -> Any:
        """`moved`, the result of a collective; for a reduction to one rank, zeros on the other ranks.

        The plan leaves those undefined.
        """
        if op.kind != "reduce":
            return moved
        return ops.mask_to_root(moved, self.backend.index(op.axes) == op.root)

    def _operand(self, op: ir.Collective, x: Any, array: bool) -> Any:
        """A leaf as an operand of the collective: padded for a reduce-scatter, and flat if not an `array`."""
        if op.kind != "reduce_scatter":
            return x
        return ops.pad(x if array else x.reshape(-1), self.backend.ways(op.axes))

    def _result(self, ref: str, env: Env) -> Tree:
        """A value that the phase returns, typed as varying over the axes of its placement."""
        value = self.values[ref]
        pairs = zip(env[ref].leaves, value.leaves, strict=True)
        return env[ref].like(
            [self.backend.varying(_compat.new_if_empty(x), varying(value, leaf)) for x, leaf in pairs]
        )

    def run_op(
        self, op: ir.Op, env: Env, chained: set[str], call: CallContext, elision: packing.PackElision
    ) -> None:
        """Run one op on this rank's values, and add its results to `env`.

        Args:
            op: The op.
            env: The values so far, by id.
            chained: The results after which later ops are ordered.
            call: The parameters of the call.
            elision: The buffers that need not be created.
        """
        values = self.values
        match op:
            case ir.Collective():
                env[op.result] = self._collective(op, env, op.result in chained, elision)
            case ir.Pack():
                env[op.result] = ops.pack(op, values, env)
            case ir.Unpack():
                # A scalar of a split tree is not split, and the same on all ranks.
                value = values[op.result]
                unpacked = ops.unpack(op, values, env, elision.received)
                leaves = tuple(
                    x if leaf.shape else self.backend.same(x, value.placement.split)
                    for x, leaf in zip(unpacked, value.leaves, strict=True)
                )
                env[op.result] = Tree(leaves, self._structure(op, env))
            case ir.Cast() | ir.LocalSum() | ir.Scale() | ir.Encode() | ir.Decode():
                factors = (op.by, op.over) if isinstance(op, ir.Scale) else ()
                by, over = [env[x].leaves[0] if isinstance(x, str) else x for x in factors] or (None, None)
                tree, file = env[op.operand], self.schedule.file
                pairs = enumerate(tree.leaves)
                env[op.result] = tree.like([ops.converted(op, x, file, by, over, n) for n, x in pairs])
            case ir.Slice():
                array = values[op.operand].kind == "array"
                ways = len(op.owners) or self.backend.ways(op.axes)
                index = self.backend.index(op.axes)
                if op.owners:
                    index = ops.owner_index(index, op.owners)
                tree = env[op.operand]
                env[op.result] = tree.like([ops.shard(x, index, ways, array=array) for x in tree.leaves])
            case ir.Pick():
                layout, fragment = self._fragment(op, values[op.operand], call)
                tree = env[op.operand]
                env[op.result] = tree.like([ops.pick(x, fragment, layout) for x in tree.leaves])
            case ir.Merge():
                layout, fragment = self._fragment(op, values[op.whole], call)
                tree = env[op.whole]
                pairs = zip(tree.leaves, env[op.piece].leaves, strict=True)
                env[op.result] = tree.like([ops.merge(x, piece, fragment, layout) for x, piece in pairs])
            case ir.Elastic() if op.mode == "sync":
                env[op.pull] = self._elastic(op, env)
            case ir.Update():
                pairs = zip(env[op.operand].leaves, env[op.delta].leaves, strict=True)
                env[op.result] = env[op.operand].like([x + delta for x, delta in pairs])
            case ir.Map():
                env |= self._device_functions.apply(op, env, call.rng)
            case ir.Share():
                env[op.result] = env[op.operand]
            case ir.Put() | ir.Get():
                pass  # always started by `start`
            case ir.Read() | ir.Elastic() | ir.Exchange():
                self._refuse(op)

    def _fragment(
        self, op: ir.Pick | ir.Merge, value: ir.Value, call: CallContext
    ) -> tuple[FragmentLayout, jax.Array]:
        """The layout of the fragments of `value` on this rank, and the index of the current one."""
        number = jnp.zeros((), jnp.int32) if call.number is None else call.number  # None: one fragment
        return layout_of(op, value, self.schedule.size), number % op.fragments

    def _refuse(self, op: ir.Read | ir.Elastic | ir.Exchange) -> None:
        """Raise CP0808 for an op that JAX does not run."""
        match op:
            case ir.Elastic():
                stage, note = f"`elastic ... by {op.mode}`", "`by sync` runs here; other modes run under MPI"
            case ir.Exchange():
                stage, note = "`exchange`", "the pass `place` replaces it: add `place` to the passes"
            case ir.Read():
                stage, note = f"the load of source `{op.source}`", "`run.batches` loads records"
        message = f"JAX does not run {stage}: phase `{self.phase.name}` cannot run"
        fail("CP0808", message, note, span=op.span, file=self.schedule.file)

    def _elastic(self, op: ir.Elastic, env: Env) -> Tree:
        """The force of a synchronous elastic average; see `ops.pull`."""
        eta, rho = (env[x].leaves[0] if isinstance(x, str) else x for x in (op.eta, op.rho))
        pairs = zip(env[op.operand].leaves, env[op.center].leaves, strict=True)
        return env[op.operand].like([ops.pull(x, center, eta, rho) for x, center in pairs])

    def _structure(self, op: ir.Unpack, env: Env) -> Structure:
        """The structure of an unpacked value: that of `op.like` if it is in `env`, otherwise as compiled."""
        if op.like in env:
            return env[op.like].structure
        value = self.values[op.result]
        if value.kind != "tree":
            return LEAF
        return structure_by([leaf.path for leaf in value.leaves], self.structures)

    def _collective(self, op: ir.Collective, env: Env, chained: bool, elision: packing.PackElision) -> Tree:
        """Run a collective leaf by leaf, ordered after `op.after`.

        If it is ordered after others, or others after it (`chained`), its leaves are ordered too.
        """
        source, target = self.values[op.operand], self.values[op.result]
        results: list[Any] = []
        for number, leaf in enumerate(env[op.operand].leaves):
            operand = self.backend.varying(leaf, op.axes)
            if number == 0:
                (operand,) = elision.ordered_after(op, [operand], env)
            elif op.after or chained:
                (operand,), results[-1:] = self.backend.ordered_after([operand], results[-1:], op.axes)
            results.append(self._exchange(op, operand, target.leaves[number], source.kind == "array"))
        return env[op.operand].like(results)

    def _exchange(self, op: ir.Collective, x: Any, target: ir.Leaf, array: bool) -> Any:
        """Run a collective on one leaf `x`, whose result is `target`; see `_operand` for `array`."""
        backend = self.backend
        if x.size == 0:  # XLA rejects a reduce-scatter of an empty array
            empty = x.reshape(target.shape)
            placement = self.values[op.result].placement
            return backend.same(empty, tuple(axis for axis in op.axes if not placement.varies(axis)))
        if x.ndim == 0:
            scalar = for_scalar(op)
            return backend.same(x, op.axes) if scalar is None else self._at_root(op, backend.move(x, scalar))
        moved = self._at_root(op, backend.move(self._operand(op, x, array), op))
        return ops.unshard(self._all_gather(op, moved), target) if op.kind == "all_gather" else moved

    def _all_gather(self, op: ir.Collective, moved: Any) -> Any:
        """`moved`, the result of an all-gather. If it is a `gather` of the plan, its derivative warns."""
        origin = self.schedule.origin
        is_gather = origin and any(isinstance(origin.plan.stage(ref), Gather) for ref in op.stages)
        if not (is_gather and self.backend.typed and jnp.issubdtype(moved.dtype, jnp.inexact)):
            return moved
        text = f"{self.schedule.file}:{op.span.line}: {_DERIVATIVE_OF_GATHER}"
        return warning_when_transposed(moved, text)
