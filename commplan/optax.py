"""Plans and optax: reductions as gradient transformations, and optimizers as updates of exchanges.

optimizer = optax.chain(commplan.optax.reduce(run, "grads"), optax.adam(1e-3))

run = program.bind(mesh, functions={"begin": commplan.optax.init(optimizer),
                                    "adam": commplan.optax.update(optimizer)})
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax  # pyright: ignore[reportMissingTypeStubs]

from commplan.diagnostics import fail
from commplan.ir.plan import name_of
from commplan.ir.schedule import Elastic
from commplan.runtime.optimizers import Difference, difference
from commplan.tracebacks import ends_at_caller

if TYPE_CHECKING:
    from commplan.runtime.run import Run


@ends_at_caller
def reduce(run: Run, name: str, *, phase: str = "step") -> optax.GradientTransformationExtraArgs:
    """A gradient transformation that reduces the gradients of all ranks by a phase of the plan.

    Call its `update` inside `run.spmd` or a shard_map. Other inputs of the phase are keyword arguments of
    `update`, as in `update(grads, state, params, count=n)`. Its state is empty.

    Args:
        run: the bound program.
        name: the input of the phase for gradients; the updates are the output of the same name.
        phase: name of the phase.

    Raises:
        CommplanError: CP0820 if there is no such phase, if it has no such input and output, or if the plan
            has states (call the phase directly in this case). `update` raises the errors of the phase.
    """
    call = run.phases.get(phase)
    file = run.program.schedule.file
    if call is None:
        fail("CP0820", f"the plan has no phase `{phase}`", f"it has: {', '.join(run.phases)}", file=file)
    outputs = [binding.name for binding in call.lowered.outputs]
    if name not in call.lowered.arguments or name not in outputs:
        message = f"phase `{phase}` does not turn an input `{name}` into an output `{name}`"
        note = f"it takes: {', '.join(call.lowered.arguments) or 'nothing'}"
        fail("CP0820", message, note, f"it returns: {', '.join(outputs) or 'nothing'}", file=file)
    if run.context.states:
        message = f"the plan has states ({', '.join(run.context.states)}), which optax cannot carry"
        note = f"call run.{phase}(state, {name}=...) yourself, before the optimizer"
        fail("CP0820", message, note, file=file)
    extra_arguments = [argument for argument in call.lowered.arguments if argument != name]

    def init(params: Any) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        del params
        extra_inputs = {argument: extra[argument] for argument in extra_arguments if argument in extra}
        out, _ = call({}, **{name: updates}, **extra_inputs)
        return out[name], state

    return optax.GradientTransformationExtraArgs(init, update)


class ElasticState(NamedTuple):
    """State of `elastic`.

    Attributes:
        count: number of updates so far, i32[].
        plan: the states of the plan by name, including the center if workers store it.
    """

    count: Any
    plan: Any


@ends_at_caller
def elastic(run: Run, name: str) -> optax.GradientTransformationExtraArgs:
    """Elastic averaging (Zhang et al. 2015), to be chained after the member's optimizer.

        optimizer = optax.chain(optax.sgd(0.1, momentum=0.9), commplan.optax.elastic(run, "params"))

    Every tau-th update, including the first, calls the phase with the `elastic` stage of input `name`,
    passing the parameters before the update, and subtracts its pull eta * rho * (W - C) from the updates. tau
    is the period of the phase. `init` calls the plan's `at start` on all workers. Other inputs of the phase
    are keyword arguments of `update`, as in `update(grads, state, params, eta=0.1)`.

    Args:
        run: the bound program.
        name: the input of the phase for parameters.

    Raises:
        CommplanError: CP0823 if the plan has no such phase, if the phase does not output its pull every N
            steps, if `at start` has other inputs than `name`, or if the run is not bound to a communicator.
            `update` raises it if it is called without parameters.
    """
    call, period, pull = _elastic_phase(run, name)
    extra_arguments = [argument for argument in call.lowered.arguments if argument != name]

    def init(params: Any) -> ElasticState:
        _, state = run.phases["start"](run.init(), **{name: params})
        return ElasticState(jnp.zeros((), jnp.int32), state)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        """Exchange with the center in every `period`-th call, and subtract the pull from `updates`."""
        if params is None:
            fail("CP0823", "elastic averaging needs the parameters", "call update(grads, state, params)")
        extra_inputs = {argument: extra[argument] for argument in extra_arguments if argument in extra}

        def exchange(plan: Any) -> tuple[Any, Any]:
            out, after = call(plan, **{name: params}, **extra_inputs)
            return out[pull], dict(after)

        def skip(plan: Any) -> tuple[Any, Any]:
            return jax.tree_util.tree_map(jnp.zeros_like, params), dict(plan)

        if period == 1:
            center_pull, plan = exchange(state.plan)
        else:
            center_pull, plan = jax.lax.cond(state.count % period == 0, exchange, skip, state.plan)
        moved = jax.tree_util.tree_map(operator.sub, updates, center_pull)
        return moved, ElasticState(state.count + 1, plan)

    return optax.GradientTransformationExtraArgs(init, update)


def _elastic_phase(run: Run, name: str) -> tuple[Any, int, str]:
    """The phase with the elastic stage of `name`, its period in steps, and the name of its pull's output.

    Raises CP0823 as `elastic` does.
    """
    schedule = run.program.schedule
    file = schedule.file
    for phase in schedule.phases:
        for op in phase.ops:
            if not isinstance(op, Elastic) or name_of(op.operand) != name:
                continue
            output = next((binding.name for binding in phase.outputs if binding.value == op.pull), None)
            if output is None or phase.kind not in ("every", "step"):
                why = f"phase `{phase.name}` does not output the pull of `{name}` every N steps"
                fail("CP0823", why, "write `output` with it", span=op.span, file=file)
            if run.context.machine.layout != "local":
                why = "the run is bound to a mesh, and an optimizer's state on a mesh cannot hold a center"
                fail("CP0823", why, f"call run.{phase.name} in the step, and subtract the pull", file=file)
            start = run.phases.get("start")
            if start is None or set(start.lowered.arguments) != {name}:
                fail("CP0823", f"the plan's `at start` does not take `{name}` as its only input", file=file)
            return run.phases[phase.name], phase.period, output
    return fail("CP0823", f"no phase of the plan averages `{name}` with a center", file=file)


@ends_at_caller
def init(optimizer: optax.GradientTransformation) -> Callable[[Any], Any]:
    """Wrap `optimizer.init` as a function of the plan: weights -> state, for whole trees or shards.

    Declare it as `fn begin(tree) -> tree on device elementwise`, and call it `at start`: `moment = map
    begin(weights)`. Specify the shapes of the state when compiling the plan: `shapes={"moment":
    jax.eval_shape(optimizer.init, weights)}`.
    """

    def begin(weights: Any) -> Any:
        return cast("Any", optimizer).init(weights)

    return begin


@ends_at_caller
def update(optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """Wrap `optimizer` as the update of an exchange: (weights, state, gradients) -> (weights, state).

    Declare it as `fn adam(tree, tree, tree) -> tree, tree on device elementwise`. An optimizer without state
    may also be declared as (weights, gradients) -> weights. Owners only update their shard of the weights, so
    the optimizer must be elementwise. This is tested: a small random tree is updated as a whole and in parts,
    with equal results.

    Raises:
        CommplanError: CP0822 if the results differ (a norm of the tree or of a leaf, factored moments, rules
            that depend on the shape of a leaf), or if the optimizer raises an error. The returned function
            raises it if it is called without a state and the optimizer has one.
    """
    transformation = cast("Any", optimizer)

    def applied(weights: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
        changes, new = transformation.update(gradients, state, weights)
        return cast("Any", optax).apply_updates(weights, changes), new

    def step(weights: Any, *arguments: Any) -> Any:
        if len(arguments) == 1:
            state = transformation.init(weights)
            _check_stateless(state)
            return applied(weights, state, arguments[0])[0]
        return applied(weights, *arguments)

    try:
        mismatch = difference(transformation.init, applied)
    except Exception as error:  # noqa: BLE001  an optimizer may raise anything
        fail(
            "CP0822",
            f"the optimizer cannot update a tree: {type(error).__name__}: {error}",
            "it is called as update(gradients, state, weights) on a test tree with the"
            " leaves `matrix`, `vector` and `small`; masks and labels may not name leaves",
        )
    if mismatch is not None:
        _refuse(mismatch)
    return step


def _check_stateless(state: Any) -> None:
    """Raise CP0822 for a nonempty state, which would be reinitialized at every step."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    if leaves:
        path = jax.tree_util.keystr(leaves[0][0])
        fail(
            "CP0822",
            f"the optimizer has state (`{path}`), but the exchange has none: it would be reset at every step",
            "declare `state moment : tree` and `fn NAME(tree, tree, tree) -> tree, tree on device"
            " elementwise`, set it at start by commplan.optax.init, and exchange into both",
        )


def _refuse(mismatch: Difference) -> None:
    """Raise CP0822 for an element that moves differently in a part of the tree."""
    size = "one gradient that is not a number"
    if mismatch.size is not None:
        size = f"gradients of size {mismatch.size:g}"
    fail(
        "CP0822",
        "the optimizer needs the whole tree: it updates a part of the weights differently than the whole",
        f"with {size}, an element of `{mismatch.leaf}` moves by {mismatch.whole:.6g} in the whole tree and by"
        f" {mismatch.part:.6g} in a third of it",
        "owners have a part of every leaf: norms of trees and leaves, factored moments and rules that depend"
        " on a leaf's shape differ there",
        "remove that rule, or reduce the gradients in the plan and call the optimizer on whole trees",
    )
