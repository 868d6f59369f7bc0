"""A plan's reduction as an optax transformation: put it in front of the optimiser.

optimizer = optax.chain(commplan.optax.reduce(run, "grads"), optax.adam(1e-3))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import optax  # pyright: ignore[reportMissingTypeStubs]

from commplan.diagnostics import fail

if TYPE_CHECKING:
    from commplan.runtime.run import Run


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
        fail(
            "CP0820",
            f"phase `{phase}` does not turn an input `{name}` into an output `{name}`",
            f"it takes: {', '.join(call.lowered.arguments) or 'nothing'}",
            f"it returns: {', '.join(outputs) or 'nothing'}",
            file=file,
        )
    if run.init_names:
        fail(
            "CP0820",
            f"the plan has states ({', '.join(run.init_names)}), which optax cannot pass on",
            f"call run.{phase}(state, {name}=...) yourself, before the optimiser",
            file=file,
        )
    others = [one for one in call.lowered.arguments if one != name]

    def init(params: Any) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        del params
        given = {one: extra[one] for one in others if one in extra}
        out, _ = call({}, **{name: updates}, **given)
        return out[name], state

    return optax.GradientTransformationExtraArgs(init, update)
