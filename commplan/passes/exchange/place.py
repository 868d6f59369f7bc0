"""place: chooses which workers store and update the states of a parameter exchange."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from msgspec.structs import replace

from commplan.diagnostics import fail
from commplan.ir.plan import Ref, name_of
from commplan.ir.schedule import Exchange, Ownership, Phase, Schedule
from commplan.passes.base import Pass, PassContext
from commplan.passes.exchange.lower_exchange import StateSharding, colocated, shard_entry
from commplan.passes.exchange.owner_selection import (
    Owners,
    describe_choice,
    inner_first,
    levels,
    predict,
    spread_out,
    unshardable_reason,
)
from commplan.passes.rewrite import Editor
from commplan.select.algorithm_search import Chooser


class PlacePass(Pass, frozen=True):
    """Parameter exchanges between workers become scatters, updates by owners, and gathers.

    Attributes:
        how: The owners of updates if the plan has no `via parameter_server`. `auto` uses owners unless an
            all-reduce is predicted to save more than a fifth of the time. `sharded` and `replicated` force
            one of the two. States that cannot be sharded are always replicated.
    """

    name: ClassVar[str] = "place"
    after: ClassVar[tuple[str, ...]] = ("share",)
    how: Literal["auto", "sharded", "replicated"] = "auto"

    def run(self, schedule: Schedule, context: PassContext) -> Schedule:
        exchanges = colocated(schedule, (op for phase in schedule.phases for op in phase.ops))
        if not exchanges:
            return schedule
        chooser = Chooser(schedule, context.costs, context.topology, context.candidates)
        owners = {op.results: self._owners(chooser, op) for op in exchanges}
        ownerships = _shardable_states(owners)
        for results, choice in owners.items():
            shards_state = any(name_of(ref) in ownerships for ref in results[1:])
            owners[results] = choice._replace(shards_state=shards_state)
        choices = tuple(describe_choice(chooser, op, owners[op.results]) for op in exchanges)
        whole_values = {name_of(value.id): value for value in schedule.entry[len(schedule.inputs) :]}
        schedule = shard_entry(schedule, ownerships)
        phases = tuple(
            _lower_exchanges(StateSharding(Editor(schedule, phase), ownerships, whole_values), owners)
            for phase in schedule.phases
        )
        return replace(schedule, phases=phases, choices=(*schedule.choices, *choices))

    def _owners(self, chooser: Chooser, op: Exchange) -> Owners:
        """Choose the owners of one exchange.

        Raises:
            CommplanError: CP0728 for `staleness`, CP0726 if the plan requests owners of states that cannot be
                sharded, CP0757 as `_owner_ranks`.
        """
        schedule, state = chooser.schedule, name_of(op.states[0])
        if op.hints.staleness:
            message = f"`staleness = {op.hints.staleness}` needs a server: `{state}` is on the workers"
            note = "all workers take part in every update, so that none can run ahead of another"
            remedy = f"leave `staleness` out, or declare `server hub = 1` and `state {state} : tree on hub`"
            fail("CP0728", message, note, remedy, span=op.span, file=schedule.file)
        within_option = op.algorithm.get("within") if op.algorithm is not None else None
        within = str(within_option) if within_option is not None else None
        axes = inner_first(op.axes, within)
        why = unshardable_reason(schedule, op)
        if op.algorithm is not None and why is not None:
            note = (
                "they divide leaves that have the shape of a weight and a path that ends with that"
                " weight's path; every worker stores scalars"
            )
            remedy = "leave `via parameter_server` out: then every worker updates all parts"
            fail("CP0726", f"owners cannot store {why}", note, remedy, span=op.span, file=schedule.file)
        if op.algorithm is not None:
            owner_ranks = self._owner_ranks(schedule, op, axes)
            return Owners("sharded", axes, levels(axes, within, few=bool(owner_ranks)), ranks=owner_ranks)
        if why is not None or self.how == "replicated":
            return Owners("replicated", op.axes)
        is_faster = predict(chooser, op, axes).without_owners
        return Owners("replicated", op.axes) if is_faster and self.how == "auto" else Owners("sharded", axes)

    def _owner_ranks(self, schedule: Schedule, op: Exchange, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The owners if the plan requests only some of the workers; empty otherwise.

        Raises:
            CommplanError: CP0757 if the plan also requests a wire or accumulation dtype.
        """
        count = op.algorithm.get("owners") if op.algorithm is not None else None
        if count is None:
            return ()
        ranks = spread_out(schedule.mesh_sizes, op.axes, axes, int(count))
        if ranks and (op.hints.wire is not None or op.hints.accumulate is not None):
            subject = f"gradients sent to only {count} of the workers"
            message = f"{subject} cannot be sent in a narrower type than their sums"
            note = "they are added on the way, so that sums would travel in the wire type too"
            remedy = "leave `wire` and `accumulate` out, or `owners`: then every worker owns a part"
            fail("CP0757", message, note, remedy, span=op.span, file=schedule.file)
        return ranks


def _shardable_states(owners: Mapping[tuple[Ref, ...], Owners]) -> dict[str, Ownership]:
    """The owners of each optimizer state that they can store, by name.

    These are the states that all exchanges shard equally, and that are not the weights of any exchange.
    `owners` has the results of each exchange as key.
    """
    weights = {name_of(results[0]) for results in owners}
    candidates: dict[str, set[Ownership | None]] = {}  # by state; None if an exchange does not shard it
    for results, choice in owners.items():
        for ref in results[1:]:
            ownership = choice.ownership if choice.how == "sharded" else None
            candidates.setdefault(name_of(ref), set()).add(ownership)
    unique = {name: next(iter(options)) for name, options in candidates.items() if len(options) == 1}
    return {
        name: ownership for name, ownership in unique.items() if ownership is not None and name not in weights
    }


def _lower_exchanges(sharding: StateSharding, owners: Mapping[tuple[Ref, ...], Owners]) -> Phase:
    """Lower the exchanges of a phase that are in `owners`, and return the rewritten phase."""
    for op in sharding.editor.phase.ops:
        if not isinstance(op, Exchange) or op.results not in owners:
            sharding.editor.ops.append(op)
        elif owners[op.results].how == "sharded":
            sharding.lower_sharded(op, owners[op.results])
        else:
            sharding.lower_replicated(op, owners[op.results])
    return sharding.finish()
