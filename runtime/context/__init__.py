"""The context of a bound program: its schedule, its machine, and the user's functions.

Phases, steps and layers of a run read it. `Carried` moves pytrees out of a shard_map.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from commplan.diagnostics import Span, fail, listed, near_note
from commplan.ir import schedule as ir
from commplan.ir.types import SAME, DType, Placement
from commplan.lowering.gpu.profile import LatencyProfile, ProfileChoice, latency_profile
from commplan.lowering.jax import _context
from commplan.lowering.jax import compiler_options as xla
from commplan.lowering.jax.backend import Backend
from commplan.lowering.jax.layout import leaf_specs, spec
from commplan.lowering.jax.phase import Lowered, name_of
from commplan.lowering.jax.pytree import Structure, Tree, build, flatten
from commplan.runtime.context.member_schedule import ensemble, without
from commplan.runtime.context.unset_states import UnsetStates
from commplan.runtime.machines.machine import Machine

# The key of the state for the numbers of calls by phase. Only phases that depend on that number are counted.
CALLS = "#calls"


@dataclasses.dataclass(frozen=True)
class Context:
    """A schedule, its machine, and the functions bound to it.

    Attributes:
        schedule: The schedule of the run, or of one member of its ensemble.
        machine: The machine for this schedule.
        functions: The functions by name, built-in ones included.
        seed: The seed of random functions.
        structures: Pytree structures by leaf paths, for values whose structure cannot be inferred from
            arguments.
        members: For a member, its index by the ensemble's axis, which its schedule lacks; empty for a run.
        whole: For a member, the schedule of all members; None for a run.
    """

    schedule: ir.Schedule
    machine: Machine
    functions: Mapping[str, Callable[..., Any]]
    seed: int
    structures: Mapping[tuple[str, ...], Structure]
    members: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])
    whole: ir.Schedule | None = None

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """The sizes of the mesh axes that the plan names, without servers."""
        return self.schedule.mesh_sizes

    @property
    def backend(self) -> Backend:
        """The operations of the machine that phases are lowered to."""
        return self.machine.backend

    @functools.cached_property
    def compiler_options(self) -> dict[str, xla.Value]:
        """The schedule's XLA options for these devices, without those that the installed XLA rejects."""
        return xla.accepted(xla.as_installed(self._options))

    @property
    def _options(self) -> tuple[xla.CompilerOption, ...]:
        return xla.compiler_options(self.schedule, "gpu") if self.backend.platform == "gpu" else ()

    def profile(self, choice: ProfileChoice) -> LatencyProfile | None:
        """The profile for `run.jit(.., pgle=choice)` on these devices; see `latency_profile`."""
        return latency_profile(choice, self.machine.mesh.devices.flat if self.backend.platform else ())

    def warn_about_flags(self) -> None:
        """Warn with CP0858 about flags in XLA_FLAGS that override the schedule's options."""
        for problem in xla.overriding_flags(
            self._options, os.environ.get("XLA_FLAGS", ""), self.schedule.file
        ):
            warnings.warn(str(problem), RuntimeWarning, 5)  # At the line that calls `program.bind`.

    def fail(self, code: str, message: str, *notes: str, span: Span | None = None) -> NoReturn:
        """Raise a `CommplanError` about the plan's file; see `diagnostics.fail`."""
        fail(code, message, *notes, span=span, file=self.schedule.file)

    def lower(self, phase: ir.Phase) -> Lowered:
        """Lower `phase` to a function of one rank's arrays; not cached."""
        return Lowered(self.schedule, phase, self.functions, self.backend, self.structures)

    def entry(self, name: str) -> ir.Value:
        """The input or state `name`, which must exist."""
        return next(value for value in self.schedule.entry if name_of(value.id) == name)

    @functools.cached_property
    def states(self) -> dict[str, ir.Value]:
        """The states of workers by name; phases neither take nor return states on servers."""
        states = {name_of(ref): self.entry(name_of(ref)) for ref in self.schedule.states}
        return {name: value for name, value in states.items() if value.placement.server is None}

    @functools.cached_property
    def unset(self) -> UnsetStates:
        """The initial values of states that `at start` sets."""
        return UnsetStates(self.schedule)

    @functools.cached_property
    def compiled(self) -> dict[str, Any]:
        """The compiled functions for the batches of each phase."""
        return {}

    @functools.cached_property
    def hidden_calls(self) -> list[dict[str, object]]:
        """For each function of `run.spmd` that is being called, the open calls of hidden phases by name."""
        return []

    @functools.cached_property
    def counted(self) -> tuple[str, ...]:
        """The phases that depend on the number of the call, which the state counts."""
        return tuple(phase.name for phase in self.schedule.phases if self.lower(phase).is_counted)

    def initial_state(self) -> dict[str, Any]:
        """The plan's states before `at start`; see `run.init`."""
        state: dict[str, Any] = {}
        for name, value in self.states.items():
            leaves = [self.machine.zeros(value, leaf) for leaf in value.leaves]
            self.unset.add(name, leaves)
            state[name] = build([leaf.path for leaf in value.leaves], leaves, self.structures)
        return state | ({CALLS: self.no_calls()} if self.counted else {})

    def no_calls(self) -> dict[str, Any]:
        """The initial counts of calls."""
        count = ir.Value("calls.0", "array", (ir.Leaf("", (), DType.I32),), SAME)
        return {name: self.machine.zeros(count, count.leaves[0]) for name in self.counted}

    def member(self, place: int) -> Context:
        """The context of member `place` of the plan's ensemble, on its devices; raises CP0818."""
        axis = ensemble(self.schedule, place)
        schedule = without(self.schedule, axis)
        machine = self.machine.member(schedule, axis, place)
        return dataclasses.replace(
            self, schedule=schedule, machine=machine, members={axis: place}, whole=self.schedule
        )

    def origin(self, name: str) -> str:
        """A note that `name` means an output, if an input or state of that name has another placement.

        Returns "" if there is no such input or state, or no value `name`.
        """
        value = self.schedule.named.get(name)
        entry = next((each for each in self.schedule.entry if name_of(each.id) == name), value)
        if value is None or entry is None or entry.placement == value.placement:
            return ""
        other = f"the input or state `{name}`, whose placement is `{entry.placement}`"
        return f"`{name}` means the output, not {other}"

    def named(self, name: str) -> ir.Value:
        """The value that a user calls `name`, see `Schedule.named`; raises CP0811 for an unknown name."""
        named = self.schedule.named
        if name not in named:
            message = f"the plan has no output, state or input `{name}`"
            self.fail("CP0811", message, *near_note(name, named), f"it has {listed(named)}")
        return named[name]

    def placement(self, name: str, axis: str | None = None) -> Placement:
        """The placement of the value `name`; raises CP0811, and CP0818 if it is not per `axis`."""
        placement = self.named(name).placement
        if axis is not None and axis not in placement.per:
            self.fail("CP0818", f"`{name}` is the same for all members: it is {placement}")
        return placement

    def sharding(self, name: str) -> Any:
        """One sharding, or a tree of them for a tree; see `run.sharding`, also for errors."""
        if self.machine.layout != "global":
            message = "a run on the ranks of a communicator has no shardings"
            self.fail(
                "CP0874",
                message,
                "each rank's arrays are on its own device; run.place has the rank's indices",
            )
        value = self.named(name)
        if value.placement.partial:
            message = f"`{name}` is {value.placement}, which a global array cannot represent"
            self.fail("CP0806", message, "use it inside run.spmd only, where a phase reduces it")
        shardings = [NamedSharding(self.machine.mesh, spec) for spec in leaf_specs(value)]
        if value.kind != "tree":
            return shardings[0]
        return build([leaf.path for leaf in value.leaves], shardings, self.structures)

    def around(self, caller: str, span: Span | None = None) -> bool:
        """Whether the calling code sees one rank's arrays: under MPI, or inside a shard_map.

        Always False for a plan without mesh axes.

        Args:
            caller: The beginning of messages, such as "run.tap is called".
            span: The line of the plan for errors, or None.

        Raises:
            CommplanError: CP0814 if the shard_map lacks axes of the plan, or has other sizes.
        """
        manual = self.machine.manual()
        present = [axis for axis in self.sizes if axis in manual]
        if not present:
            return False
        missing = [axis for axis in self.sizes if axis not in manual]
        if missing:
            self.fail(
                "CP0814",
                f"{caller} inside a shard_map that is manual over {', '.join(present)} only",
                f"the plan needs {', '.join(missing)} too: name every axis of the plan in axis_names",
                span=span,
            )
        wrong = [axis for axis, size in self.sizes.items() if manual[axis] != size]
        if wrong:
            sizes = ", ".join(f"{axis} = {manual[axis]}, expected {self.sizes[axis]}" for axis in wrong)
            self.fail("CP0814", f"{caller} inside a shard_map whose mesh has other sizes: {sizes}", span=span)
        return True

    def require_inside(self, caller: str) -> None:
        """Raise CP0816 unless the calling code sees one rank's arrays; see `around` for other errors.

        Without mesh axes one rank's arrays are the global ones, so calls are allowed everywhere.
        """
        if self.sizes and not self.around(f"{caller} is called"):
            note = "call it in run.spmd, or in your own shard_map over the plan's axes"
            self.fail("CP0816", f"{caller} is called outside a shard_map", note)

    def placed(self, tree: Any, placement: Placement) -> Any:
        """Put the arrays of `tree` that are on the host or uncommitted on the machine's devices.

        The transfers are explicit because a transfer guard may be on. Other leaves are returned unchanged.
        """
        mesh, lead = self.machine.mesh, len(placement.per)

        def sharding(x: Any) -> NamedSharding:
            return NamedSharding(mesh, spec(placement, scalar=np.ndim(x) == lead))

        on_mesh = self.machine.layout == "global"
        placed = functools.partial(_context.placed, sharding=sharding if on_mesh else None)
        return jax.tree_util.tree_map(placed, tree)

    def lead(self, placement: Placement) -> int:
        """The number of leading dimensions of an outside array for its `per` axes; 0 under MPI."""
        return len(placement.per) if self.machine.layout == "global" else 0

    def strip(self, tree: Tree, placement: Placement) -> Tree:
        """One rank's part without its `per` dimensions, which have the size 1 inside a shard_map."""
        count = self.lead(placement)
        return tree.like([x.reshape(x.shape[count:]) for x in tree.leaves]) if count else tree

    def unstrip(self, tree: Tree, placement: Placement) -> Tree:
        """The inverse of `strip`."""
        count = self.lead(placement)
        return tree.like([x.reshape((1,) * count + x.shape) for x in tree.leaves]) if count else tree


@dataclasses.dataclass
class Carried:
    """Trees that leave a shard_map as leaves with specs; their structures become known during tracing.

    Attributes:
        context: The context of the run.
        specs: The spec of each leaf, by the name of the value.
        placements: The placement of each value, by name.
        structures: The pytree structure of each value, by name; `leave` adds them.
    """

    context: Context
    specs: dict[str, list[PartitionSpec]]
    placements: dict[str, Placement]
    structures: dict[str, Structure] = dataclasses.field(default_factory=dict[str, Any])

    @classmethod
    def for_values(cls, context: Context, values: Mapping[str, ir.Value]) -> Carried:
        """Prepare for `values`, by name; a call of `leave` may pass fewer of them."""
        placements = {name: value.placement for name, value in values.items()}
        return cls(context, {name: leaf_specs(value) for name, value in values.items()}, placements)

    def leave(self, trees: Mapping[str, Tree]) -> dict[str, list[Any]]:
        """The leaves of each tree with `per` dimensions; records the structures for `build`."""
        self.structures.update({name: tree.structure for name, tree in trees.items()})
        unstrip = self.context.unstrip
        return {name: list(unstrip(tree, self.placements[name]).leaves) for name, tree in trees.items()}

    def build(self, leaves: Mapping[str, list[Any]]) -> dict[str, Any]:
        """The pytrees of `leaves`, which `leave` returned inside the shard_map, as global arrays."""
        return {name: Tree(tuple(parts), self.structures[name]).build() for name, parts in leaves.items()}


def as_tree(tree: Any) -> Tree:
    """The leaves and the structure of a pytree."""
    return flatten(tree)[1]
