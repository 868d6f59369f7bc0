"""A phase of a schedule as a function on one rank's arrays, to be called inside a shard_map."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, cast

from msgspec.structs import replace

from commplan.collectives.registry import scalar_algorithm
from commplan.diagnostics import fail
from commplan.ir import schedule as ir
from commplan.ir.analysis.def_use import DefUse
from commplan.ir.analysis.server_ops import ServerOp, server_op, worker_operands
from commplan.ir.plan import Gather, name_of
from commplan.lowering.jax import _compat, ops, packing, servers
from commplan.lowering.jax.backend import Backend
from commplan.lowering.jax.functions import RngContext, apply_function
from commplan.lowering.jax.layout import varying
from commplan.lowering.jax.primitives import warning_when_transposed
from commplan.lowering.jax.pytree import LEAF, Structure, Tree, structure_by
from commplan.lowering.jax.typing_shim import jax, jnp

_DERIVATIVE_OF_GATHER = (
    "the derivative of this `gather` is an all-reduce, of which each rank keeps a part: JAX sums the gradient"
    " of what is the same on all ranks. run.layers gathers weights and scatters their gradient"
)
Env = dict[str, Tree]
_watchers: list[list[ir.Schedule]] = []  # of `traced_schedules`


@contextlib.contextmanager
def traced_schedules() -> Generator[list[ir.Schedule]]:
    """The schedules of which phases are traced within this context, filled in as they are."""
    schedules: list[ir.Schedule] = []
    _watchers.append(schedules)
    try:
        yield schedules
    finally:
        _watchers[:] = [watcher for watcher in _watchers if watcher is not schedules]


@dataclass(frozen=True)
class Lowered:
    """Phase `phase` of `schedule`, lowered. Build it once, call `run` while tracing.

    `functions`: the device functions by name. `structures`: how to rebuild trees whose structure nothing
    that was passed tells, by the paths of their leaves. Raises `CommplanError` CP0808 at `run` for ops
    that JAX does not run yet.
    """

    schedule: ir.Schedule
    phase: ir.Phase
    functions: Mapping[str, Callable[..., Any]]
    backend: Backend
    structures: Mapping[tuple[str, ...], Structure] = field(default_factory=dict[tuple[str, ...], Any])

    @cached_property
    def outputs(self) -> tuple[ir.Binding, ...]:
        """The outputs that the phase returns: those that need more than sources."""
        return tuple(binding for binding in self.phase.outputs if not binding.source_only)

    @cached_property
    def values(self) -> Mapping[str, ir.Value]:
        """Every value that the phase knows, by id."""
        return {value.id: value for value in (*self.schedule.entry, *self.phase.values)}

    @cached_property
    def arguments(self) -> dict[str, ir.Value]:
        """What the phase is called with, by name: inputs of the plan, and source-only values."""
        values = self.values
        refs = {name_of(ref): ref for ref in self.phase.inputs}
        refs |= {binding.name: binding.value for binding in self.phase.takes}
        return {name: values[ref] for name, ref in refs.items()}

    @cached_property
    def elsewhere(self) -> frozenset[str]:
        """The states that live on servers, as on entry."""
        entry = self.schedule.entry
        return frozenset(value.id for value in entry if value.placement.server is not None)

    @cached_property
    def ops(self) -> tuple[ir.Op, ...]:
        """The ops that run on the device when the phase is called."""
        known = [*self.phase.inputs, *self.phase.states, *(binding.value for binding in self.phase.takes)]
        wanted = [binding.value for binding in (*self.outputs, *self.phase.updates)]
        return DefUse(self.phase.ops).ancestors(wanted, frozenset(known))

    @cached_property
    def counts(self) -> bool:
        """Whether its calls must be counted: a random function runs in it."""
        return any(isinstance(op, ir.Map) and op.random for op in self.ops)

    def run(
        self, inputs: Mapping[str, Tree], state: Mapping[str, Tree], rng: RngContext | None
    ) -> tuple[Env, Env]:
        """Outputs and new states by name, from inputs and states by name; one rank's arrays.

        `rng`: where random functions get their keys; None where nothing is random.
        """
        for watcher in _watchers:
            watcher.append(self.schedule)
        env: Env = {ref: inputs[name_of(ref)] for ref in self.phase.inputs}
        env |= {ref: state[name_of(ref)] for ref in self.phase.states if ref not in self.elsewhere}
        env |= {binding.value: inputs[binding.name] for binding in self.phase.takes}
        self.apply(self.ops, env, rng)
        results = {binding.name: self._leave(binding.value, env) for binding in self.outputs}
        on_servers = {name_of(ref) for ref in self.elsewhere}
        kept = [binding for binding in self.phase.updates if binding.name not in on_servers]
        return results, {binding.name: self._leave(binding.value, env) for binding in kept}

    def apply(self, chosen: Iterable[ir.Op], env: Env, rng: RngContext | None) -> None:
        """Run the ops `chosen`, in order; their results join `env`.

        Split collectives and requests to servers start at their place, and complete before the first op that
        reads their result. HLO and profiles name ops `commplan/PHASE/lineN` after their plan line.
        """
        chosen = tuple(chosen)
        elision = packing.pack_elision(chosen, self.values, self.backend)
        chained = {ref for op in chosen for ref in op.after}
        in_flight: list[tuple[ir.Op, Callable[[], Env]]] = []

        def complete(needed: Container[str] | None = None) -> None:
            for started in list(in_flight):
                op, finish = started
                if needed is None or any(ref in needed for ref in ir.results(op)):
                    in_flight.remove(started)
                    with self.scope(op):
                        env.update(finish())

        for op in chosen:
            if in_flight:
                complete(worker_operands(op))
            with self.scope(op):
                finish = elision.begin(op, env) or self._begin(op, env)
                if finish is None:
                    if not elision.defers(op, env):
                        self._run(op, env, chained, rng, elision)
                elif isinstance(op, ir.Collective) and op.form != "split":
                    env |= finish()
                else:
                    in_flight.append((op, finish))
        complete()

    def scope(self, op: ir.Op) -> Any:
        """The name of `op` in HLO and in profiles: its phase and plan line."""
        return jax.named_scope(f"commplan/{self.phase.name}/line{op.span.line}")

    def _begin(self, op: ir.Op, env: Env) -> Callable[[], Env] | None:
        """Start a split collective or a request to servers; None for every other op."""
        asking = server_op(op, self.values)
        if asking is not None:
            return self._ask(asking, env)
        if not isinstance(op, ir.Collective) or op.form != "split":
            return None
        leaves = env[op.operand].leaves
        if any(x.size == 0 or x.ndim == 0 for x in leaves):  # of which some are no collectives
            return None
        source, target = self.values[op.operand], self.values[op.result]
        parts: list[Callable[[], Any]] = []
        for x, leaf in zip(leaves, target.leaves, strict=True):
            begun = self.backend.start(self._operand(op, x, source.kind == "array"), op)
            if begun is None:  # the backend does it in one
                return None
            parts.append(partial(self._completed, op, begun, leaf))
        return lambda: {op.result: env[op.operand].like([part() for part in parts])}

    def _ask(self, op: ServerOp, env: Env) -> Callable[[], Env]:
        service = self.backend.service
        if service is None:
            servers.refuse(op.span, self.schedule.file)
        finish = servers.begin(service, self.phase.name, op, self.values, env, self.schedule.file)

        def finished() -> Env:
            return {ref: Tree(leaves, self._shaped(op, ref, env)) for ref, leaves in finish().items()}

        return finished

    def _shaped(self, op: ServerOp, ref: str, env: Env) -> Structure:
        """The structure of what a server gives: that of what it is met with, where it has the same leaves."""
        value = self.values[ref]
        if value.kind != "tree":
            return LEAF
        paths = [leaf.path for leaf in value.leaves]
        for met in worker_operands(op):
            if [leaf.path for leaf in self.values[met].leaves] == paths:
                return env[met].structure
        return structure_by(paths, self.structures)

    def _completed(self, op: ir.Collective, begun: Callable[[], Any], target: ir.Leaf) -> Any:
        moved = self._at_root(op, begun())
        return ops.unshard(moved, target) if op.kind == "all_gather" else moved

    def _at_root(self, op: ir.Collective, moved: Any) -> Any:
        """Only the root's result of a reduction to one rank is defined; the other ranks hold zeros."""
        if op.kind != "reduce":
            return moved
        return ops.mask_to_root(moved, self.backend.index(op.axes) == op.root)

    def _operand(self, op: ir.Collective, x: Any, array: bool) -> Any:
        """A leaf with the shape that the collective wants."""
        if op.kind != "reduce_scatter":
            return x
        return ops.pad(x if array else x.reshape(-1), self.backend.ways(op.axes))

    def _leave(self, ref: str, env: Env) -> Tree:
        value = self.values[ref]
        pairs = zip(env[ref].leaves, value.leaves, strict=True)
        return env[ref].like(
            [self.backend.varying(_compat.new_if_empty(x), varying(value, leaf)) for x, leaf in pairs]
        )

    def _run(
        self, op: ir.Op, env: Env, chained: set[str], rng: RngContext | None, elision: packing.PackElision
    ) -> None:
        values = self.values
        match op:
            case ir.Collective():
                env[op.result] = self._collective(op, env, op.result in chained, elision)
            case ir.Pack():
                env[op.result] = ops.pack(op, values, env)
            case ir.Unpack():
                # A scalar of a split tree travels beside cut leaves, and is still the same on all ranks.
                value = values[op.result]
                unpacked = ops.unpack(op, values, env, elision.arrived)
                leaves = tuple(
                    x if leaf.shape else self.backend.same(x, value.placement.split)
                    for x, leaf in zip(unpacked, value.leaves, strict=True)
                )
                env[op.result] = Tree(leaves, self._structure(op, env))
            case ir.Cast() | ir.LocalSum() | ir.Scale():
                factors = (op.by, op.over) if isinstance(op, ir.Scale) else ()
                by, over = [env[x].leaves[0] if isinstance(x, str) else x for x in factors] or (None, None)
                tree, file = env[op.operand], self.schedule.file
                pairs = enumerate(tree.leaves)
                env[op.result] = tree.like([ops.converted(op, x, file, by, over, n) for n, x in pairs])
            case ir.Slice():
                array = values[op.operand].kind == "array"
                ways = len(op.owners) or self.backend.ways(op.axes)
                place = self.backend.index(op.axes)
                if op.owners:
                    place = ops.number(place, op.owners)
                tree = env[op.operand]
                env[op.result] = tree.like([ops.shard(x, place, ways, array=array) for x in tree.leaves])
            case ir.Elastic() if op.mode == "sync":
                env[op.pull] = self._elastic(op, env)
            case ir.Update():
                pairs = zip(env[op.operand].leaves, env[op.delta].leaves, strict=True)
                env[op.result] = env[op.operand].like([x + delta for x, delta in pairs])
            case ir.Map():
                env |= apply_function(op, cast("Any", self), env, rng)
            case ir.Share():
                env[op.result] = env[op.operand]
            case ir.Put() | ir.Get():
                pass  # always begun, never run in one
            case ir.Read() | ir.Elastic() | ir.Exchange():
                self._refuse(op)

    def _refuse(self, op: ir.Read | ir.Elastic | ir.Exchange) -> None:
        match op:
            case ir.Elastic():
                stage = f"`elastic ... by {op.mode}`"
            case ir.Exchange():
                stage = "`exchange`"
            case ir.Read():
                stage = f"reading source `{op.source}` inside a compiled phase"
        message = f"{stage} is not lowered yet: phase `{self.phase.name}` cannot run"
        note = "use `reduce` and an optimiser of your own, or `elastic ... by sync`"
        fail("CP0808", message, note, span=op.span, file=self.schedule.file)

    def _elastic(self, op: ir.Elastic, env: Env) -> Tree:
        eta, rho = (env[x].leaves[0] if isinstance(x, str) else x for x in (op.eta, op.rho))
        pairs = zip(env[op.operand].leaves, env[op.center].leaves, strict=True)
        return env[op.operand].like([ops.pull(x, center, eta, rho) for x, center in pairs])

    def _structure(self, op: ir.Unpack, env: Env) -> Structure:
        if op.like in env:
            return env[op.like].structure
        value = self.values[op.result]
        if value.kind != "tree":
            return LEAF
        return structure_by([leaf.path for leaf in value.leaves], self.structures)

    def _collective(self, op: ir.Collective, env: Env, chained: bool, elision: packing.PackElision) -> Tree:
        """Leaf by leaf. Ordered after what `op.after` names, and leaf after leaf where order counts."""
        source, target = self.values[op.operand], self.values[op.result]
        results: list[Any] = []
        for number, leaf in enumerate(env[op.operand].leaves):
            own = self.backend.varying(leaf, op.axes)
            if number == 0:
                (own,) = elision.behind(op, [own], env)
            elif op.after or chained:
                (own,), results[-1:] = self.backend.behind([own], results[-1:], op.axes)
            results.append(self._exchange(op, own, target.leaves[number], source.kind == "array"))
        return env[op.operand].like(results)

    def _exchange(self, op: ir.Collective, x: Any, target: ir.Leaf, array: bool) -> Any:
        backend = self.backend
        if x.size == 0:  # nothing to move, and XLA refuses to scatter it
            empty = x.reshape(target.shape)
            placement = self.values[op.result].placement
            return backend.same(empty, tuple(axis for axis in op.axes if not placement.varies(axis)))
        if op.kind == "reduce_scatter" and x.ndim == 0:
            whole = scalar_algorithm(op.algorithm)
            return backend.move(x, replace(op, kind="all_reduce", algorithm=whole))
        if op.kind == "all_gather" and x.ndim == 0:  # a scalar of a split tree, never cut: the same already
            return backend.same(x, op.axes)
        moved = self._at_root(op, backend.move(self._operand(op, x, array), op))
        return ops.unshard(self._gathered(op, moved), target) if op.kind == "all_gather" else moved

    def _gathered(self, op: ir.Collective, moved: Any) -> Any:
        """What a `gather` of the plan makes; JAX warns where its derivative is taken."""
        origin = self.schedule.origin
        is_gather = origin and any(isinstance(origin.plan.stage(ref), Gather) for ref in op.stages)
        if not (is_gather and self.backend.typed and jnp.issubdtype(moved.dtype, jnp.inexact)):
            return moved
        text = f"{self.schedule.file}:{op.span.line}: {_DERIVATIVE_OF_GATHER}"
        return warning_when_transposed(moved, text)
