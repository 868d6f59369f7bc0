"""The stage `exchange`: gradients to the owners of states, updated states to the workers."""

import msgspec

from commplan.diagnostics import Span
from commplan.ir.hints import NO_HINTS, Algorithm, Hints, Reduction
from commplan.ir.refs import Ref, name_of
from commplan.ir.roles import Meaning, Presentation
from commplan.ir.stages.base import BaseStage, over
from commplan.ir.stages.rules import Ranks, Violation, reader_or_owner_count, result_per_state
from commplan.ir.symbolic.deferred import Interpretation, steps
from commplan.ir.types import Operator, Over, Refs


class ExchangeFields(msgspec.Struct, frozen=True):
    """The fields and semantics shared by `exchange` in a plan and in a schedule.

    Attributes:
        results: The new states, one for each of `states`.
        gradient: The gradient of each worker.
        states: The weights, then the states of the optimizer; all on one server declaration, or on workers.
        fn: The update function, which is elementwise.
        axes: The axes of the workers.
    """

    WRITES = ("results",)

    results: Meaning[Refs]
    gradient: Meaning[Ref]
    states: Meaning[Refs]
    fn: Meaning[str]
    axes: Meaning[Over]

    def exchanged(
        self, env: Interpretation, op: Operator, weight: Ref | None, hints: Hints, via: Algorithm | None
    ) -> None:
        """Define results = fn(states, reduced gradient).

        With states on servers, the results depend on the messages of other workers too, so they are an opaque
        function of all arguments.

        Args:
            env: The values of the phase.
            op: The operator of the reduction.
            weight: The weight of a mean; None if there are no weights.
            hints: The options.
            via: The algorithm in the plan; None if it has none.
        """
        gradient = env.get(self.gradient)
        if env.values[self.states[0]].placement.server is None:
            how = steps.ReductionSpec(op, self.axes, hints, weight, few_owners(via), sends_sum=False)
            total = steps.averaged(env, gradient, gradient.value, how)
            env.call(self.fn, [*env.each(self.states), total], self.results)
            return
        for state, result in zip(self.states, self.results, strict=True):
            env.check_current(state)
            env.set_current(result)
        # Everything that affects the answers distinguishes the call.
        algorithm = (f"via {via}",) if via is not None else ()
        marks = ("exchange over", *self.axes, op, *steps.server_hints(hints), *algorithm)
        scalars = (weight,) if weight else ()
        sent = [gradient, *env.each((*self.states, *scalars))]
        env.call(self.fn, sent, self.results, marks, on_server=True)


def few_owners(via: Algorithm | None) -> Algorithm | None:
    """`via` if it has an argument `owners`, else None.

    Owners among the workers add gradients in the type of the gradients, as `Hints.for_mean` assumes of an
    algorithm in the plan.
    """
    return via if via is not None and via.get("owners") is not None else None


class ExchangeStage(ExchangeFields, BaseStage, frozen=True, tag="exchange"):
    """A parameter server: results = fn(states, reduced gradient).

    Attributes:
        op: The operator of the reduction.
    """

    FORM = "w [, m] = exchange g into w [, m] with FN over AXES by OP [via ALGORITHM]"
    READS = ("gradient", "states", "op")
    SCALARS = ("op",)

    op: Meaning[Reduction]
    span: Presentation[Span]
    via: Meaning[Algorithm | None] = None
    hints: Meaning[Hints] = NO_HINTS

    def same_leaves(self) -> tuple[tuple[Ref, ...], ...]:
        return ((self.gradient, self.states[0]), *zip(self.states, self.results, strict=True))

    def sends(self) -> tuple[Ref, str | None]:
        return self.gradient, self.op.name

    def function_call(self) -> tuple[str, tuple[Ref, ...], tuple[Ref, ...]]:
        return self.fn, (*self.states, self.gradient), self.results

    def violation(self, ranks: Ranks) -> Violation | None:
        owners = self.via and self.via.get("owners")
        violation = result_per_state(self.states, self.results)
        return violation or reader_or_owner_count("owners", owners, self.axes, ranks)

    def meaning(self, env: Interpretation) -> None:
        self.exchanged(env, self.op.name, self.op.weight, self.hints, self.via)

    def source_parts(self) -> tuple[str, ...]:
        states = ", ".join(map(name_of, self.states))
        into = f"exchange {name_of(self.gradient)} into {states} with {self.fn}"
        return (into, over(self.axes), f"by {self.op.text()}")

    def summary(self) -> tuple[str, ...]:
        return (f"exchange with {self.fn} by {self.op.text()}", over(self.axes))
