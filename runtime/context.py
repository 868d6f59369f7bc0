"""What a bound program knows: its schedule on a machine with the user's functions."""

from __future__ import annotations

import dataclasses
import functools
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from commplan.diagnostics import Span, fail, listed, near_note
from commplan.ir import schedule as ir
from commplan.ir.types import SAME, DType, Placement
from commplan.lowering import compiler_options as xla
from commplan.lowering.audit.profile import LatencyProfile, ProfileChoice, latency_profile
from commplan.lowering.jax import _context
from commplan.lowering.jax.backend import Backend
from commplan.lowering.jax.collectives.lax_backend import LaxBackend
from commplan.lowering.jax.layout import leaf_specs, spec
from commplan.lowering.jax.phase import Lowered, name_of
from commplan.lowering.jax.pytree import Structure, Tree, build, flatten
from commplan.lowering.jax.typing_shim import jax
from commplan.runtime.machines.machine import Machine
from commplan.runtime.unset_states import UnsetStates

CALLS = "#calls"  # in the state: how often each phase with random device functions was called


@dataclasses.dataclass(frozen=True)
class Context:
    """A schedule, the machine that it runs on, and the functions bound to it."""

    schedule: ir.Schedule
    machine: Machine
    functions: Mapping[str, Callable[..., Any]]
    seed: int
    structures: Mapping[tuple[str, ...], Structure]
    # For one member's part of an ensemble: the place of the axes that are left out, and the whole schedule.
    members: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])
    whole: ir.Schedule | None = None

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """The axes of the mesh that the plan names, with their sizes; servers are no part of it."""
        return self.schedule.mesh_sizes

    @property
    def backend(self) -> Backend:
        return self.machine.backend

    @functools.cached_property
    def compiler_options(self) -> dict[str, xla.Value]:
        """The options with which XLA compiles the schedule for these devices, of those that it knows."""
        return xla.accepted(xla.as_installed(self._options))

    @property
    def _options(self) -> tuple[xla.CompilerOption, ...]:
        on_gpus = isinstance(self.backend, LaxBackend) and self.backend.platform == "gpu"
        return xla.compiler_options(self.schedule, "gpu") if on_gpus else ()

    def profile(self, choice: ProfileChoice) -> LatencyProfile | None:
        """The profile for `run.jit(.., pgle=choice)` on these devices: see `latency_profile`."""
        jax_devices = isinstance(self.backend, LaxBackend)
        return latency_profile(choice, self.machine.mesh.devices.flat if jax_devices else ())

    def warn_of_flags(self) -> None:
        """Warn of what XLA_FLAGS would undo of the schedule (CP0858)."""
        for problem in xla.undone(self._options, os.environ.get("XLA_FLAGS", ""), self.schedule.file):
            warnings.warn(str(problem), RuntimeWarning, 4)

    def fail(self, code: str, message: str, *notes: str, span: Span | None = None) -> NoReturn:
        """Raise a `CommplanError` about the plan's file; see `diagnostics.fail`."""
        fail(code, message, *notes, span=span, file=self.schedule.file)

    def lower(self, phase: ir.Phase) -> Lowered:
        return Lowered(self.schedule, phase, self.functions, self.backend, self.structures)

    def entry(self, name: str) -> ir.Value:
        """The input or state called `name`."""
        return next(value for value in self.schedule.entry if name_of(value.id) == name)

    @functools.cached_property
    def states(self) -> dict[str, ir.Value]:
        """The states that workers hold, by name: a phase neither takes nor gives those on servers."""
        states = {name_of(ref): self.entry(name_of(ref)) for ref in self.schedule.states}
        return {name: value for name, value in states.items() if value.placement.server is None}

    @functools.cached_property
    def unset(self) -> UnsetStates:
        """What `init` made of the states that `at start` sets."""
        return UnsetStates(self.schedule)

    @functools.cached_property
    def compiled(self) -> dict[str, Any]:
        """By phase, what was compiled for its batches: once, however often they are asked for."""
        return {}

    @functools.cached_property
    def counted(self) -> tuple[str, ...]:
        """The phases whose calls the state counts, because random functions run in them."""
        return tuple(phase.name for phase in self.schedule.phases if self.lower(phase).counts)

    def no_calls(self) -> dict[str, Any]:
        """The counts of calls with which a run begins."""
        count = ir.Value("calls.0", "array", (ir.Leaf("", (), DType.I32),), SAME)
        return {name: self.machine.zeros(count, count.leaves[0]) for name in self.counted}

    def origin(self, name: str) -> str:
        """Which value a name means, in words, where an input or state of that name lies otherwise."""
        value = self.schedule.named.get(name)
        entry = next((each for each in self.schedule.entry if name_of(each.id) == name), value)
        if value is None or entry is None or entry.placement == value.placement:
            return ""
        other = f"what goes in by that name, which is `{entry.placement}`"
        return f"`{name}` is the output `{name}`, and not {other}"

    def named(self, name: str) -> ir.Value:
        """See `Schedule.named`. Raises CP0811 where `name` means nothing."""
        named = self.schedule.named
        if name not in named:
            message = f"the plan has no output, state or input `{name}`"
            self.fail("CP0811", message, *near_note(name, named), f"it has {listed(named)}")
        return named[name]

    def sharding(self, name: str) -> Any:
        """The sharding of a value, or of a value of type tree a tree of them: see `run.sharding`."""
        if self.machine.layout != "global":
            message = "a run on the ranks of a communicator has no shardings"
            self.fail(
                "CP0874", message, "each rank's arrays are on its own device: run.place says which it is"
            )
        value = self.named(name)
        if value.placement.partial:
            message = f"`{name}` is {value.placement}, and a global array has no place for that"
            self.fail("CP0806", message, "it is there inside run.spmd alone, where a phase reduces it")
        shardings = [NamedSharding(self.machine.mesh, spec) for spec in leaf_specs(value)]
        if value.kind != "tree":
            return shardings[0]
        return build([leaf.path for leaf in value.leaves], shardings, self.structures)

    def around(self, caller: str, span: Span | None = None) -> bool:
        """Whether the code around us sees one rank's arrays: under MPI always, else in a shard_map.

        Raises CP0814 where it has only some of them, or of other sizes.
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

    def placed(self, tree: Any, placement: Placement) -> Any:
        """`tree` with its host arrays put onto the devices, explicitly: a transfer guard may be on."""
        mesh, lead = self.machine.mesh, len(placement.per)

        def sharding(x: Any) -> NamedSharding:
            return NamedSharding(mesh, spec(placement, scalar=np.ndim(x) == lead))

        on_mesh = self.machine.layout == "global"
        placed = functools.partial(_context.placed, sharding=sharding if on_mesh else None)
        return jax.tree_util.tree_map(placed, tree)

    def lead(self, placement: Placement) -> int:
        """How many leading dimensions an array outside has for `per` axes; under MPI none."""
        return len(placement.per) if self.machine.layout == "global" else 0

    def strip(self, tree: Tree, placement: Placement) -> Tree:
        """One rank's part without the leading dimensions, all 1 here, of its `per` axes."""
        count = self.lead(placement)
        return tree.like([x.reshape(x.shape[count:]) for x in tree.leaves]) if count else tree

    def unstrip(self, tree: Tree, placement: Placement) -> Tree:
        """The leading dimensions back again."""
        count = self.lead(placement)
        return tree.like([x.reshape((1,) * count + x.shape) for x in tree.leaves]) if count else tree


@dataclasses.dataclass
class Carried:
    """Trees on their way out of a shard_map: leaves with their specs; structures are learnt while tracing."""

    context: Context
    specs: dict[str, list[PartitionSpec]]
    placements: dict[str, Placement]
    structures: dict[str, Structure] = dataclasses.field(default_factory=dict[str, Any])

    @classmethod
    def of(cls, context: Context, values: Mapping[str, ir.Value]) -> Carried:
        placements = {name: value.placement for name, value in values.items()}
        return cls(context, {name: leaf_specs(value) for name, value in values.items()}, placements)

    def leave(self, trees: Mapping[str, Tree]) -> dict[str, list[Any]]:
        """Leaves by name, `per` dimensions added; structures are kept here."""
        self.structures.update({name: tree.structure for name, tree in trees.items()})
        unstrip = self.context.unstrip
        return {name: list(unstrip(tree, self.placements[name]).leaves) for name, tree in trees.items()}

    def build(self, leaves: Mapping[str, list[Any]]) -> dict[str, Any]:
        return {name: Tree(tuple(own), self.structures[name]).build() for name, own in leaves.items()}


def flat(tree: Any) -> Tree:
    return flatten(tree)[1]
