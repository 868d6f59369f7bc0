"""`run.spmd` and `run.varying`: a training step under `jax.shard_map`, with specs from the plan.

`decorate` checks the declared placements and wraps the user's function. `_Step` traces and runs it.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn, cast, get_args

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from commplan.diagnostics import fail, listed, near_note, type_of
from commplan.ir.types import Placement, Status
from commplan.lowering.jax import _compat, _jit
from commplan.lowering.jax.layout import spec
from commplan.lowering.jax.pytree import Tree, flatten
from commplan.runtime.context import CALLS, Carried, Context, as_tree
from commplan.runtime.machines.explicit import has_reduced, reduced_over
from commplan.runtime.observe.same_values import Declared
from commplan.runtime.state_check import check_state
from commplan.tracebacks import ends_at_caller

_STATUSES = get_args(Status)


def decorate(
    context: Context, names: Mapping[str, str], returns: Sequence[str] | None, *, check_vma: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the decorator for `run.spmd(...)`, whose errors `TypedRun.spmd` lists.

    Args:
        names: For each parameter after the state, a value of the plan or a placement.
        returns: The same for each result after the state; None if the function returns its arguments.
        check_vma: See `jax.shard_map`.
    """
    _check_texts(context, names, returns)
    placements = {name: placement_of(context, text, f"argument `{name}`") for name, text in names.items()}
    results, texts = None, None
    if returns is not None:
        texts = (returns,) if isinstance(returns, str) else tuple(returns)
        # A name means a value of the plan before it means an argument.
        unnamed = {n: p for n, p in placements.items() if n not in context.schedule.named}
        results = [
            unnamed[text] if text in unnamed else placement_of(context, text, f"returns[{i}]", names)
            for i, text in enumerate(texts)
        ]

    @ends_at_caller
    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        first, order = _parameters(context, function, placements)
        ordered = {name: placements[name] for name in order}
        named = [names[name] for name in order] if texts is None else texts
        step = _Step(context, function, first, ordered, results, named, check_vma)
        signature = inspect.signature(function)

        @ends_at_caller
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                arguments = dict(signature.bind(*args, **kwargs).arguments)
            except TypeError as error:
                step.refuse(f"is called with the wrong arguments: {error}")
            state = arguments.pop(first)
            if list(arguments) != order:  # All declared parameters and no others are required.
                step.refuse(f"is called with {', '.join(arguments) or 'nothing'} after the state")
            return step(state, arguments)

        states = {name: value.placement for name, value in context.states.items()}
        # `run.jit` reads it to compare arguments that should be the same in several processes.
        setattr(call, "declared", Declared(signature, first, ordered, states))  # noqa: B010  functions lack it
        return call

    return wrap


def refuse_unnamed(context: Context, values: Sequence[object]) -> NoReturn:
    """Raise CP0811: `run.spmd` has positional arguments, at least one.

    The first is the function if `@run.spmd` was written without parentheses.
    """
    if callable(values[0]):
        message = "run.spmd is written without parentheses"
    else:
        message = f"run.spmd has {values[0]!r} without the name of a parameter"
    notes = (
        "declare each parameter after the state with a value of the plan that has its placement",
        'such as @run.spmd(params="params", batch="batch"); @run.spmd() if the state is the only parameter',
    )
    context.fail("CP0811", message, *notes)


def _check_texts(context: Context, names: Mapping[str, object], returns: object) -> None:
    """Raise CP0811 for values and placements that are not strings."""
    file = context.schedule.file
    for name, value in names.items():
        if not isinstance(value, str):
            message = f"argument `{name}` is declared with {type_of(value)}: expected a string"
            fail("CP0811", message, f'such as @run.spmd({name}="params") or {name}="per data"', file=file)
    many = isinstance(returns, list | tuple)
    texts = list(cast("Sequence[object]", returns)) if many else [] if returns is None else [returns]
    wrong = [type_of(text) for text in texts if not isinstance(text, str)]
    if wrong:
        message = f"`returns` has {wrong[0]}: expected a string or a list of strings"
        fail("CP0811", message, 'such as returns=["loss", "same"]', file=file)


def placement_of(context: Context, text: str, subject: str, arguments: Collection[str] = ()) -> Placement:
    """The placement of the value `text`, or the placement that `text` spells out.

    Args:
        text: A name of a value of the plan, or a placement such as "per member, data".
        subject: The beginning of messages, such as "argument `params`".
        arguments: The names of arguments that are also allowed here, for the message only.

    Raises:
        CommplanError: CP0811 if `text` is neither; CP0806 for a partial value outside a shard_map.
    """
    value = context.schedule.named.get(text)
    placement = value.placement if value else parse(context, text)
    if placement is None:
        also = [f"results may also have the name of an argument: {listed(arguments)}"] if arguments else []
        context.fail(
            "CP0811",
            f"{subject}: the plan has no output, state or input `{text}`",
            *_near_words(context, text),
            *near_note(text, (*context.schedule.named, *arguments)),
            f"it has {listed(context.schedule.named)}",
            *also,
            'a placement is written as in the plan: "same", "per member, data", "split data"',
        )
    if placement.partial and context.machine.layout == "global":
        message = f"{subject}: `{text}` is {placement}, which cannot cross the boundary of run.spmd"
        context.fail(
            "CP0806", message, "compute it inside the function, and reduce it by calling the phase there"
        )
    return placement


def _near_words(context: Context, text: str) -> list[str]:
    """Notes on the words of `text` that are no axes of the plan; none if `text` names no placement first."""
    words = re.findall(r"\w+", text)
    if not words or words[0] not in _STATUSES:
        return []
    unknown = [word for word in words if word not in _STATUSES and word not in context.sizes]
    near = {word: near_note(word, context.sizes) for word in unknown}
    return ["; ".join((f"the plan has no axis `{word}`", *near[word])) for word in unknown]


def parse(context: Context, text: str) -> Placement | None:
    """A written placement ("per member split data"), or None if `text` is not a placement.

    `per` and `partial` axes get the plan's order. `split` axes keep the written order, which is major first.
    """
    clauses: dict[str, list[str]] = {}
    status = ""
    for token in re.findall(r"\w+", text):
        if token in _STATUSES:
            status = token
            clauses.setdefault(status, [])
        elif status not in ("", "same") and token in context.sizes:
            clauses[status].append(token)
        else:
            return None
    axes = [axis for named in clauses.values() for axis in named]
    if not clauses or len({*axes}) < len(axes):
        return None
    if any(status != "same" and not named for status, named in clauses.items()):
        return None
    plan_order = list(context.sizes)
    return Placement(
        tuple(sorted(clauses.get("per", ()), key=plan_order.index)),
        tuple(sorted(clauses.get("partial", ()), key=plan_order.index)),
        tuple(clauses.get("split", ())),
    )


def _parameters(
    context: Context, function: Callable[..., Any], placements: Mapping[str, Placement]
) -> tuple[str, list[str]]:
    """The name of the state parameter, and the names of the declared parameters in the function's order.

    Raises CP0811 if function and declaration disagree. Undeclared parameters must have defaults.
    """
    name = getattr(function, "__name__", "function")
    parameters = list(inspect.signature(function).parameters.values())
    rest_parameters = parameters[1:]
    order = [p.name for p in rest_parameters if p.name in placements]
    wrong = [] if parameters else ["the first parameter is the state"]
    wrong += [
        f"run.spmd does not declare the placement of `{p.name}`"
        for p in rest_parameters
        if p.name not in placements and p.default is p.empty
    ]
    for argument in (argument for argument in placements if argument not in order):
        near = near_note(argument, (p.name for p in rest_parameters))
        wrong.append("; ".join((f"`{name}` has no parameter `{argument}`", *near)))
    if wrong:
        context.fail("CP0811", f"run.spmd and the parameters of `{name}` do not agree", *wrong)
    return parameters[0].name, order


class _Step:
    """A user's function, which is called with arrays in the machine's layout and runs on one rank's arrays.

    Attributes:
        first: The name of the function's state parameter.
        placements: The placement of each other parameter, in the function's order.
        listed: The placements of the results after the state; None without `returns`, for those of arguments.
        named: The texts that declared `listed`, or the arguments if it is None.
        name: The function's name in errors.
        outside: Whether callers pass global arrays; under MPI they pass one rank's arrays.
    """

    def __init__(
        self, context: Context, function: Callable[..., Any], first: str, placements: dict[str, Placement],
        results: list[Placement] | None, named: Sequence[str], check_vma: bool,
    ) -> None:  # fmt: skip
        self.context, self.function, self.first, self.placements = context, function, first, placements
        self.listed, self.named, self.check_vma = results, named, check_vma
        self.name = getattr(function, "__name__", "function")
        self.outside = context.machine.layout == "global"
        self._jitted = _jit.jit(_jit.renamed(self._trace, self.name), context.compiler_options)
        # The states that are used before the function sets them, and the first phase that uses each.
        self._used: dict[str, str] = {}
        self._unset: set[str] = set()  # States of this call that `at start` has not set.

    def __call__(self, state: Any, arguments: Mapping[str, Any]) -> Any:
        """Compile once for equal argument types, and call."""
        self._unset = self.context.unset.among(state)
        for name in sorted(self._unset.intersection(self._used)):
            self.context.unset.refuse(name, self._used[name])
        if not self.outside or _compat.tracing():
            return self._trace(state, arguments)
        context = self.context
        placed = {name: context.placed(tree, self.placements[name]) for name, tree in arguments.items()}
        with context.machine.context():
            return self._jitted(self._placed_state(state), placed)

    def _placed_state(self, state: Any) -> Any:
        """`state` with its arrays on the devices."""
        states, context = self.context.states, self.context
        if not isinstance(state, Mapping):
            return state
        return {
            name: context.placed(tree, states[name].placement) if name in states else tree
            for name, tree in cast("Mapping[str, Any]", state).items()
        }

    def _trace(self, state: Any, arguments: Mapping[str, Any]) -> Any:
        """Call the function inside a shard_map, on this rank's parts of the state and the arguments.

        Split results leave the shard_map as lists of leaves, because its specs are needed before `body` is
        traced. `structures` gets their structures.
        """
        context = self.context
        self._check_outside_shard_map()
        entries = check_state(context, state, f"`{self.name}` was given")
        states = {name: as_tree(tree) for name, tree in entries.items() if name != CALLS}
        trees = {name: as_tree(tree) for name, tree in arguments.items()}
        for name, placement in self.placements.items():
            self._check(name, placement, arguments[name])
        new = Carried.for_values(context, context.states)
        self._check_states(states, new)
        results = list(self.placements.values()) if self.listed is None else self.listed
        structures: list[Any] = []  # For each result its structure, and whether each leaf is a scalar.

        def body(
            state_leaves: dict[str, list[Any]], calls: Any, argument_leaves: dict[str, list[Any]]
        ) -> Any:
            local_state = {
                name: context.strip(states[name].like(leaves), context.states[name].placement).build()
                for name, leaves in state_leaves.items()
            }
            if CALLS in entries:
                local_state[CALLS] = calls
            local_arguments = {
                name: context.strip(trees[name].like(leaves), self.placements[name]).build()
                for name, leaves in argument_leaves.items()
            }
            with context.unset.entered(local_state, self._unset, self._used):
                answer = self._call(local_state, local_arguments)

            state_out, values = self._split_answer(answer, len(results), tuple(entries))
            after = {name: as_tree(tree) for name, tree in state_out.items() if name != CALLS}
            for name in after:
                self._check_same(f"state `{name}`", state_out[name], context.states[name].placement)
            structures.extend(
                (tree.structure, [jnp.ndim(x) == 0 for x in tree.leaves]) for tree in map(as_tree, values)
            )
            out = self._result_leaves(values, results)
            # The specs have all states: None stands for those that the function did not return.
            absent = {name: [None] * len(specs) for name, specs in new.specs.items() if name not in after}
            return new.leave(after) | absent, state_out.get(CALLS, {}), out

        # A split result is a pair: the leaves that are cut, and the scalars, which are not.
        out_specs = [spec(r) if not r.split else (spec(r), spec(r, scalar=True)) for r in results]
        call = context.machine.spread(
            body,
            (
                {name: new.specs[name] for name in states},
                PartitionSpec(),
                {name: _leaf_specs(trees[name], p) for name, p in self.placements.items()},
            ),
            (new.specs, PartitionSpec(), out_specs),
            check_vma=self.check_vma,
        )
        state_leaves, calls, result_leaves = call(
            {name: list(tree.leaves) for name, tree in states.items()},
            entries.get(CALLS, {}),
            {name: list(tree.leaves) for name, tree in trees.items()},
        )

        returned = {name: leaves for name, leaves in state_leaves.items() if name in new.structures}
        new_state = new.build(returned) | ({CALLS: calls} if CALLS in entries else {})
        if not structures and not self.listed:
            return new_state
        outputs = [  # Not strict: without `returns` the function may return fewer results.
            x if not result.split else _join_leaves(x, *structure)
            for x, structure, result in zip(result_leaves, structures, results, strict=False)
        ]
        return (new_state, *outputs)

    def _check_outside_shard_map(self) -> None:
        """Raise CP0810 if the step is called inside a shard_map of the user."""
        around = [axis for axis in self.context.sizes if axis in _compat.manual_axes()]
        if around and self.outside:
            shard_map = f"a shard_map over {', '.join(around)}"
            message = f"`{self.name}` is decorated with run.spmd, but called inside {shard_map}"
            note = "call it outside the shard_map; inside your own shard_map call the phases directly"
            self.context.fail("CP0810", message, note)

    def _result_leaves(self, values: Sequence[Any], results: Sequence[Placement]) -> list[Any]:
        """The results of the function as they leave the shard_map, by their declared placements."""
        out: list[Any] = []
        for index, result in enumerate(results):
            if index < len(values):
                subject = f"result {index + 1}"
                self._check_same(subject, values[index], result, self.context.origin(self.named[index]))
                tree = self.context.unstrip(as_tree(values[index]), result)
                out.append(_split_leaves(tree.leaves, result) if result.split else tree.build())
            else:  # The function did not return this argument.
                out.append(([], []) if result.split else None)
        return out

    def _call(self, state: Any, arguments: Mapping[str, Any]) -> Any:
        """Call the function: the state and positional-only parameters by position, all others by name.

        Raises CP0862 if the function returns before the end of a hidden phase that it began.
        """
        kinds = {name: each.kind for name, each in inspect.signature(self.function).parameters.items()}
        values = {self.first: state, **arguments}
        positional = {name for name, kind in kinds.items() if kind is inspect.Parameter.POSITIONAL_ONLY}
        if kinds[self.first] is not inspect.Parameter.KEYWORD_ONLY:
            positional.add(self.first)
        by_position = [name for name in kinds if name in values and name in positional]
        by_name = {name: value for name, value in values.items() if name not in by_position}
        calls = self.context.hidden_calls
        calls.append({})
        try:
            answer = self.function(*(values[name] for name in by_position), **by_name)
        finally:
            open_calls = calls.pop()
        for name in open_calls:
            message = f"`{self.name}` returns before the call of phase `{name}` has ended"
            self.context.fail("CP0862", message, "call `finish` of the result of `begin`")
        return answer

    def _check_same(self, subject: str, tree: Any, placement: Placement, origin: str = "") -> None:
        """Raise CP0813 for leaves that vary over an axis along which the placement is the same.

        Args:
            origin: A note about the source of the placement.
        """
        sizes = self.context.sizes
        paths, flat_tree = flatten(tree)
        for path, leaf in zip(paths, flat_tree.leaves, strict=True):
            may_vary = placement.per + (placement.split if jnp.ndim(leaf) else ())
            wrong = [axis for axis in sizes if axis in _compat.varying_axes(leaf) and axis not in may_vary]
            if not wrong:
                continue
            over = ", ".join(wrong)
            where = f" at `{path}`" if path else ""
            label = f"{subject} of `{self.name}`{where}"
            message = f"{label} should be the same over {over}, but JAX types it as varying"
            note = f"its placement is `{placement}`"
            if set(wrong) <= set(placement.split):  # A scalar is not cut.
                message = f"{label} is a scalar that differs over {over}, and a scalar cannot be cut"
                note = f"its placement is `{placement}`: a leaf without dimensions is the same on all ranks"
            fix = f'reduce it in a phase of the plan, or declare that it differs: returns=("per {over}", ...)'
            self.context.fail("CP0813", message, note, *([origin] if origin else []), fix)

    def refuse(self, message: str) -> NoReturn:
        """Raise CP0811 about a call; `message` continues after the function's name."""
        note = f"it takes the state, then {', '.join(self.placements) or 'nothing'}"
        self.context.fail("CP0811", f"`{self.name}` {message}", note)

    def _check(self, name: str, placement: Placement, tree: Any) -> None:
        """Raise CP0805 if a global argument does not have the leading dimensions of its placement.

        Those are one dimension per `per` axis, and then rows that can be cut along the `split` axes.
        """
        if not self.outside:  # Phases check the shapes of one rank's arrays.
            return
        sizes = self.context.sizes
        lead = tuple(sizes[axis] for axis in placement.per)
        paths, flat_tree = flatten(tree)
        for path, leaf in zip(paths, flat_tree.leaves, strict=True):
            shape = tuple(getattr(leaf, "shape", ()))
            where = f" at `{path}`" if path else ""
            label, note = f"argument `{name}` of `{self.name}`{where}", f"its placement is `{placement}`"
            if shape[: len(lead)] != lead:
                message = f"{label} has the shape {list(shape)}, which should begin with {list(lead)}"
                note += ": one leading dimension per axis over which it differs"
                self.context.fail("CP0805", message, note)
            ways = self.context.schedule.size(placement.split)
            if len(shape) > len(lead) and shape[len(lead)] % ways:
                rows = shape[len(lead)]
                message = f"{label} has {rows} rows, which cannot be cut into {ways} equal parts"
                self.context.fail("CP0805", message, note)

    def _check_states(self, states: Mapping[str, Tree], carried: Carried) -> None:
        """Raise CP0805 for a state with another number of leaves than its specs in `carried`."""
        for name, tree in states.items():
            expected = len(carried.specs[name])
            if len(tree.leaves) != expected:
                message = f"state `{name}` has {len(tree.leaves)} leaves, expected {expected}"
                self.context.fail("CP0805", message)

    def _split_answer(
        self, answer: Any, expected_count: int, names: Sequence[str]
    ) -> tuple[dict[str, Any], list[Any]]:
        """Split the result of the user's function into the state and the other results.

        Args:
            answer: The state alone, or a tuple of the state and the other results.
            expected_count: The number of other results; without `returns` there may be fewer.
            names: The entries of the state that the caller passed, which must be returned.

        Raises:
            CommplanError: CP0812 for a wrong state; CP0811 for a wrong number of results; CP0805 for a state
                with another number of leaves.
        """
        state: Any = answer
        values: list[Any] = []
        if isinstance(answer, tuple) and answer:
            state, *values = cast("tuple[Any, ...]", answer)
        checked = check_state(self.context, state, f"`{self.name}` returned first", names)
        expected = "the state, then its named arguments in order (or fewer of them)"
        returned = f"`{self.name}` returned {len(values)} values after the state"
        if self.listed is not None and len(values) != expected_count:
            self.context.fail("CP0811", f"{returned}, but returns= lists {expected_count}")
        if len(values) > expected_count:
            self.context.fail(
                "CP0811",
                f"{returned}, but has {expected_count} named arguments",
                f"without returns= it returns {expected}",
                'declare the placements of the others: run.spmd(..., returns=("params", "per member, data"))',
            )

        for name, tree in checked.items():
            if name != CALLS and len(as_tree(tree).leaves) != len(self.context.states[name].leaves):
                self.context.fail("CP0805", f"`{self.name}` returned state `{name}` with another structure")
        return checked, values


def _leaf_specs(tree: Tree, placement: Placement) -> list[PartitionSpec]:
    """One spec per leaf; a scalar leaf of a split tree is not cut."""
    lead = len(placement.per)
    return [spec(placement, scalar=len(jnp.shape(leaf)) == lead) for leaf in tree.leaves]


def _split_leaves(leaves: Sequence[Any], placement: Placement) -> tuple[list[Any], list[Any]]:
    """The leaves of a split tree that are cut, and its scalars, which are not."""
    lead = len(placement.per)
    cut = [leaf for leaf in leaves if jnp.ndim(leaf) > lead]
    return cut, [leaf for leaf in leaves if jnp.ndim(leaf) == lead]


def _join_leaves(parts: tuple[Sequence[Any], Sequence[Any]], structure: Any, scalars: Sequence[bool]) -> Any:
    """The tree of the leaves that `_split_leaves` separated. scalars: whether each leaf is one, in order."""
    cut, same = map(iter, parts)
    return Tree(tuple(next(same if scalar else cut) for scalar in scalars), structure).build()


def varying(context: Context, tree: Any) -> Any:
    """See `run.varying`, also for errors."""
    axes, backend, mesh = tuple(context.sizes), context.backend, context.machine.mesh
    if has_reduced(mesh, axes) and not context.around("run.varying is called"):
        with context.machine.context():
            return jax.tree_util.tree_map(functools.partial(reduced_over, mesh, axes), tree)
    context.require_inside("run.varying")

    return jax.tree_util.tree_map(lambda leaf: backend.varying(jnp.asarray(leaf), axes), tree)
