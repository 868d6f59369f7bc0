"""Plans and optax: a reduction as a transformation, and an optimiser as the update of an exchange.

optimizer = optax.chain(commplan.optax.reduce(run, "grads"), optax.adam(1e-3))

run = program.bind(mesh, functions={"begin": commplan.optax.init(optimizer),
                                    "adam": commplan.optax.update(optimizer)})
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import optax  # pyright: ignore[reportMissingTypeStubs]

from commplan.diagnostics import fail
from commplan.ir.plan import name_of
from commplan.ir.schedule import Elastic
from commplan.lowering.jax.typing_shim import jax, jnp
from commplan.runtime.optimisers import Difference, difference
from commplan.tracebacks import ends_at_caller

if TYPE_CHECKING:
    from commplan.runtime.run import Run


@ends_at_caller
def reduce(run: Run, name: str, *, phase: str = "step") -> optax.GradientTransformationExtraArgs:
    """The gradients of each rank -> what phase `phase` of the plan makes of them.

    name: the input that takes the gradients; the output of the same name are the updates. Other inputs of
    the phase are keyword arguments of `update` (`update(grads, state, params, count=n)`). Use it inside
    `run.spmd` or a shard_map of your own. Raises `CommplanError` CP0820 where the phase has no such input
    and output or the plan has states (call the phase yourself then), and what the phase raises.
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
    if run.init_names:
        message = f"the plan has states ({', '.join(run.init_names)}), which optax cannot pass on"
        note = f"call run.{phase}(state, {name}=...) yourself, before the optimiser"
        fail("CP0820", message, note, file=file)
    others = [argument for argument in call.lowered.arguments if argument != name]

    def init(params: Any) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        del params
        given = {argument: extra[argument] for argument in others if argument in extra}
        out, _ = call({}, **{name: updates}, **given)
        return out[name], state

    return optax.GradientTransformationExtraArgs(init, update)


class ElasticState(NamedTuple):
    """count: updates so far, i32[]. plan: the state of the plan, with the centre where workers keep it."""

    count: Any
    plan: Any


@ends_at_caller
def elastic(run: Run, name: str) -> optax.GradientTransformationExtraArgs:
    """Elastic averaging, to stand behind the member's own optimiser:

        optimizer = optax.chain(optax.sgd(0.1, momentum=0.9), commplan.optax.elastic(run, "params"))

    At every tau-th update, the first one included, the phase of the plan that holds the `elastic` of input
    `name` is called with the parameters before the update, and its pull eta * rho * (W - C) is taken off the
    updates (Zhang et al. 2015); tau is the period of the phase. `init` calls the plan's `at start`, on all
    workers. Further inputs of the phase are keyword arguments of `update` (`update(grads, state, params,
    eta=0.1)`). Raises `CommplanError` CP0823 where the plan has no such phase, or the run is not bound to a
    communicator.
    """
    call, period, pull = _meeting(run, name)
    others = [argument for argument in call.lowered.arguments if argument != name]

    def init(params: Any) -> ElasticState:
        _, state = run.phases["start"](run.init(), **{name: params})
        return ElasticState(jnp.zeros((), jnp.int32), state)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        if params is None:
            fail("CP0823", "elastic averaging needs the parameters", "call update(grads, state, params)")
        given = {argument: extra[argument] for argument in others if argument in extra}

        def meet(plan: Any) -> tuple[Any, Any]:
            out, after = call(plan, **{name: params}, **given)
            return out[pull], dict(after)

        def apart(plan: Any) -> tuple[Any, Any]:
            return jax.tree_util.tree_map(jnp.zeros_like, params), dict(plan)

        if period == 1:
            handler, plan = meet(state.plan)
        else:
            handler, plan = jax.lax.cond(state.count % period == 0, meet, apart, state.plan)
        moved = jax.tree_util.tree_map(operator.sub, updates, handler)
        return moved, ElasticState(state.count + 1, plan)

    return optax.GradientTransformationExtraArgs(init, update)


def _meeting(run: Run, name: str) -> tuple[Any, int, str]:
    """The phase in which `name` meets its centre, its period, and what its output of the pull is called."""
    schedule = run.program.schedule
    file = schedule.file
    for phase in schedule.phases:
        for op in phase.ops:
            if not isinstance(op, Elastic) or name_of(op.operand) != name:
                continue
            called = next((binding.name for binding in phase.outputs if binding.value == op.pull), None)
            if called is None or phase.kind not in ("every", "step"):
                why = f"phase `{phase.name}` does not put out the pull of `{name}` every so many steps"
                fail("CP0823", why, "write `output` with it", span=op.span, file=file)
            if run.context.machine.layout != "local":
                why = "the run is bound to a mesh, where an optimiser's state has no place for a centre"
                fail("CP0823", why, f"call run.{phase.name} in the step, and take the pull off", file=file)
            start = run.phases.get("start")
            if start is None or set(start.lowered.arguments) != {name}:
                fail("CP0823", f"the plan's `at start` does not take `{name}` alone", file=file)
            return run.phases[phase.name], phase.period, called
    return fail("CP0823", f"no phase of the plan averages `{name}` with a centre", file=file)


@ends_at_caller
def init(optimizer: optax.GradientTransformation) -> Callable[[Any], Any]:
    """`optimizer.init` as a plan's function: weights -> state, whole trees or shards.

    Declare it `fn begin(tree) -> tree on device elementwise`, and call it `at start`: `moment = map
    begin(weights)`. Give the state's shapes when the plan is compiled: `shapes={"moment":
    jax.eval_shape(optimizer.init, weights)}`.
    """

    def begin(weights: Any) -> Any:
        return cast("Any", optimizer).init(weights)

    return begin


@ends_at_caller
def update(optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """`optimizer` as the update of an exchange: (weights, state, gradients) -> (weights, state).

    Declare it `fn adam(tree, tree, tree) -> tree, tree on device elementwise`; for an optimiser that keeps no
    state (weights, gradients) -> weights does as well, which others refuse when they are called. Owners
    update their part of the weights alone, so it must work element by element, whatever its name: a small
    random tree is updated whole and in parts, and must come out the same. Raises `CommplanError` CP0822 where
    it does not (a norm of the tree or of a leaf, factored moments, rules that go by a leaf's shape), and
    where the optimiser itself fails.
    """
    own = cast("Any", optimizer)

    def applied(weights: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
        changes, new = own.update(gradients, state, weights)
        return cast("Any", optax).apply_updates(weights, changes), new

    def step(weights: Any, *rest: Any) -> Any:
        if len(rest) == 1:
            state = own.init(weights)
            _keeps_nothing(state)
            return applied(weights, state, rest[0])[0]
        return applied(weights, *rest)

    try:
        mismatch = difference(own.init, applied)
    except Exception as error:  # noqa: BLE001  an optimiser may raise anything
        fail(
            "CP0822",
            f"the optimiser cannot update a tree: {type(error).__name__}: {error}",
            "it is called as update(gradients, state, weights), with nothing else, on a tree of its own: the"
            " leaves `matrix`, `vector` and `small`; masks and labels may not name leaves",
        )
    if mismatch is not None:
        _refuse(mismatch)
    return step


def _keeps_nothing(state: Any) -> None:
    """Where the plan has no place for a state, one would begin anew at every step."""
    kept = jax.tree_util.tree_leaves_with_path(state)
    if kept:
        fail(
            "CP0822",
            f"the optimiser keeps a state beside the weights (`{jax.tree_util.keystr(kept[0][0])}`), and the"
            " exchange has none: it would begin anew at every step",
            "declare `state moment : tree` and `fn NAME(tree, tree, tree) -> tree, tree on device"
            " elementwise`, set it at start by commplan.optax.init, and exchange into both",
        )


def _refuse(mismatch: Difference) -> None:
    size = "one gradient that is not a number"
    if mismatch.size is not None:
        size = f"gradients of size {mismatch.size:g}"
    fail(
        "CP0822",
        "the optimiser needs a whole-tree view: a part of the weights is not updated as it is in the whole",
        f"with {size}, an element of `{mismatch.leaf}` moves by {mismatch.whole:.6g} in the whole tree and by"
        f" {mismatch.part:.6g} in a third of it",
        "owners have a part of every leaf: norms of trees and leaves, factored moments and rules that go by a"
        " leaf's shape come out differently there",
        "leave that rule out, or reduce the gradients in the plan and call the optimiser on whole trees",
    )
