"""Compare an accepted edit with the unedited schedule.

The comparisons, in this order: the fields that runtimes read (`obeyed`), the oracle, and a run under JAX on
CPU devices: batches, the traced program of every phase, and its results if no earlier edit had the same
program. Schedules for MPI run under JAX too. Inputs are numbers that lose bits when they are rounded; some
records are broken.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import msgspec
import numpy as np

from commplan.diagnostics import CommplanError
from commplan.ir import roles
from commplan.ir.refs import name_of
from commplan.ir.roles import Role
from commplan.ir.schedule import Collective, Map, Phase, Read, Schedule, Value
from commplan.pytree import flatten, nest
from tests.support.oracle import Oracle
from tests.support.oracle.layout import global_shape
from tests.support.oracle.numbers import storage

from .plans import RECORDS, Base

Tree = Any
ORDER = 1e-5  # by how much sums in f32 in another order may differ; a cast to 16 bits changes more
ORDER_16_BITS = 2**-6  # the same for sums in 16 bits of a few numbers up to 10
BATCHES = 9  # more than an epoch of `RECORDS`
CLOCK_TIMEOUT_S = 20.0  # of a member that waits for another one
SILENT = (Role.PRESENTATION, Role.COST)


def obeyed(node: Any) -> Any:
    """`node` without its fields of cost and presentation, which no runtime reads."""
    if isinstance(node, tuple):
        return tuple(map(obeyed, cast("tuple[Any, ...]", node)))
    if not isinstance(node, msgspec.Struct):
        return node
    kept = (field.name for field in roles.fields(type(node)) if field.role not in SILENT)
    return (type(node).__name__, *((name, obeyed(getattr(node, name))) for name in kept))


class Outcome(msgspec.Struct, frozen=True):
    """The results of a schedule, by name. failed: the error that ended the run, "" for none."""

    values: Mapping[str, Any]
    failed: str = ""

    def difference(self, other: Outcome, *, reordered: bool = False) -> str:
        """The first value that differs, and by how much; "" for none.

        Args:
            other: The outcome to compare with.
            reordered: Whether sums are added in another order, so that 16-bit results may differ by rounding.
        """
        if self.failed != other.failed:
            return f"fails: {other.failed or 'no longer'}"
        if self.values.keys() != other.values.keys():
            return f"only one of them gives {min(self.values.keys() ^ other.values.keys())}"
        for name, value in self.values.items():
            text = _difference(value, other.values[name], ORDER_16_BITS if reordered else 0.0)
            if text:
                return f"{name}: {text}"
        return ""


def _difference(left: Any, right: Any, of_16_bits: float) -> str:
    if isinstance(left, str) or isinstance(right, str):
        return "" if left == right else f"{left!r:.80} and {right!r:.80}"
    if left.shape != right.shape or left.dtype != right.dtype:
        return f"{left.dtype}{left.shape} and {right.dtype}{right.shape}"
    if left.tobytes() == right.tobytes():
        return ""
    wide = left.astype(np.float64), right.astype(np.float64)
    allowed = ORDER if left.dtype == np.float32 else of_16_bits if left.dtype.itemsize == 2 else 0.0
    if allowed and np.allclose(*wide, allowed, allowed, equal_nan=True):
        return ""
    off = np.abs(wide[0] - wide[1]) / np.maximum(np.abs(wide[0]), 1e-30)
    at = int(np.nanargmax(np.where(np.isnan(off), np.inf, off)))
    return f"off by {off.flat[at]:.2g}: {wide[0].flat[at]!r} and {wide[1].flat[at]!r}"


class Judge:
    """Compares edits of one base."""

    def __init__(self, base: Base) -> None:
        self.base, self.schedule = base, base.schedule
        self.obeyed = obeyed(self.schedule)
        phases = self.schedule.phases
        self.loads = any(isinstance(op, Read) for phase in phases for op in phase.ops)
        self.random = any(isinstance(op, Map) and op.random for phase in phases for op in phase.ops)
        self._under_jax: dict[str, Outcome] = {}
        self._answers: dict[Any, tuple[str, str]] = {}
        self._instances: dict[str, Judge] = {repr(self.base.shapes_of(self.schedule)): self}

    @property
    def programs(self) -> int:
        """How many different traced programs have run."""
        return len(self._under_jax)

    def __call__(self, schedule: Schedule) -> tuple[str, str]:
        """Which comparisons decided, and the difference that one of them found ("" for none).

        Edits with the same fields that a run reads have the same answer, unless random streams could differ.
        """
        key = obeyed(schedule)
        if self.random or key not in self._answers:
            self._answers[key] = self._compared(schedule, silent=key == self.obeyed)
        return self._answers[key]

    def _compared(self, schedule: Schedule, *, silent: bool) -> tuple[str, str]:
        if obeyed(schedule.origin) != obeyed(self.schedule.origin):
            return self._compared_to_instance(schedule)
        return self._compared_to_base(schedule, silent=silent)

    def instance(self, schedule: Schedule) -> Judge:
        """The judge of the plan compiled for the leaves that `schedule` has: this one if they are the same.

        Raises: CommplanError if the plan does not compile for these leaves.
        """
        shapes = self.base.shapes_of(schedule)
        if repr(shapes) not in self._instances:
            self._instances[repr(shapes)] = Judge(self.base.compiled_for(shapes))
        return self._instances[repr(shapes)]

    def _compared_to_instance(self, schedule: Schedule) -> tuple[str, str]:
        """Compare an edit of `origin` with the plan compiled for its leaves.

        Runtimes read the plan in `origin`, which its digest protects, and the whole shapes of states.
        """
        try:
            judge = self.instance(schedule)
        except CommplanError as error:
            return "origin", f"the plan does not compile for its leaves: {error.diagnostics[0].message}"
        if _leaf_paths(schedule) != _leaf_paths(judge.schedule):
            return "order", ""  # calls are refused (CP0805): JAX flattens a tree of these names otherwise
        if _whole_states(schedule) != _whole_states(judge.schedule):
            return "origin", "states have other whole shapes"
        way, difference = judge._compared_to_base(schedule, silent=False)
        return f"origin and {way}", difference

    def _compared_to_base(self, schedule: Schedule, *, silent: bool) -> tuple[str, str]:
        if silent and not self.random:
            return "fields", ""
        ways, reordered = ["JAX"], _algorithms(schedule) != _algorithms(self.schedule)
        with contextlib.suppress(NotImplementedError):
            difference = self.oracle.difference(self.by_oracle(schedule), reordered=reordered)
            if difference:
                return "oracle", difference
            ways.insert(0, "oracle")
        runner = self._runner(schedule)
        if isinstance(runner, str):  # a coded error when it is bound is a refusal, too
            return "bind", "" if runner.startswith("CommplanError") else f"fails: {runner}"
        if self.loads and not silent:
            difference = self.batches.difference(self.by_batches(schedule))
            if difference:
                return "batches", difference
            ways.append("batches")
        return " and ".join(ways), self.by_jax.difference(self._run(runner), reordered=reordered)

    @functools.cached_property
    def oracle(self) -> Outcome:
        return self.by_oracle(self.schedule)

    @functools.cached_property
    def batches(self) -> Outcome:
        return self.by_batches(self.schedule)

    @functools.cached_property
    def by_jax(self) -> Outcome:
        runner = self._runner(self.schedule)
        return Outcome({}, runner) if isinstance(runner, str) else self._run(runner)

    def inputs(self, schedule: Schedule, phase: str) -> dict[str, Tree]:
        """The inputs of a phase: numbers that depend only on names and shapes."""
        compiled = schedule.phase(phase)
        values = {value.id: value for value in (*schedule.entry, *compiled.values)}
        given = {name_of(ref): values[ref] for ref in compiled.inputs}
        given |= {binding.name: values[binding.value] for binding in compiled.takes}
        return {name: self._numbers(schedule, name, value) for name, value in given.items()}

    def _numbers(self, schedule: Schedule, name: str, value: Value) -> Tree:
        grid = Oracle(schedule).grid
        leaves: list[Any] = []
        for leaf in value.leaves:
            seed = [*leaf.path.encode(), 0, *name.encode()]  # not the leaf's place: it depends on other names
            shape, rng = global_shape(grid, value, leaf), np.random.default_rng(seed)
            array = 3 * rng.standard_normal(shape)
            if name == "n":
                array = np.abs(array) * (rng.random(shape) > 0.3)
            if not leaf.dtype.is_float:
                array = rng.integers(0, 2 if leaf.dtype == "bool" else 90, shape)
            leaves.append(np.asarray(array).astype(storage(leaf.dtype)))
        return nest(tuple(leaf.path for leaf in value.leaves), leaves)

    def by_oracle(self, schedule: Schedule) -> Outcome:
        """Two rounds through all phases.

        Raises NotImplementedError for stages that the oracle does not carry out, and for random functions:
        their numbers depend on the place of the op there.
        """
        if self.random:
            raise NotImplementedError
        try:
            oracle = Oracle(schedule, self.base.functions)
            state, values = oracle.init(), dict[str, Any]()
            for turn in range(2):
                for phase in schedule.phases:
                    outputs, state = oracle.phase(phase.name, state, self.inputs(schedule, phase.name))
                    kept: dict[str, Tree] = {} if schedule.state_shards else dict(state)
                    flat(f"{turn} {phase.name}", {**outputs, **kept}, values)
        except Exception as error:
            if "CP0808" in str(error):
                raise NotImplementedError from error
            return Outcome({}, _in_words(error))
        return Outcome(values)

    def by_batches(self, schedule: Schedule) -> Outcome:
        """The first batches of every phase that loads."""
        values: dict[str, Any] = {}
        for phase in schedule.phases:
            if not any(isinstance(op, Read) for op in phase.ops):
                continue
            try:
                for name, batch in _first_batches(self._bound(schedule), phase):
                    flat(f"{phase.name} {name}", dict(batch), values)
            except Exception as error:  # noqa: BLE001 - whatever it raises is the result
                values[phase.name] = _in_words(error)
        return Outcome(values)

    @functools.cached_property
    def mesh(self) -> Any:
        jax: Any = importlib.import_module("jax")  # after the settings that it reads
        kind = jax.sharding.AxisType.Auto

        sizes = {axis.name: axis.size for axis in self.schedule.mesh_axes}
        count = math.prod(sizes.values())
        devices = jax.devices()[:count]
        return jax.make_mesh(tuple(sizes.values()), tuple(sizes), (kind,) * len(sizes), devices=devices)

    def _bound(self, schedule: Schedule) -> Any:
        from commplan.api import Program  # noqa: PLC0415 - as above

        if (schedule.backend, self.schedule.backend) == ("mpi", "mpi"):
            schedule = msgspec.structs.replace(schedule, backend="jax")
        sources = {source.name: RECORDS for source in schedule.sources}
        return Program(schedule).bind(self.mesh, sources=sources or None, functions=self.base.functions)

    def _runner(self, schedule: Schedule) -> dict[str, Callable[..., Any]] | str:
        """Every phase as a function of states and inputs in the layout of the oracle."""
        from tests.support.under_jax import UnderJax  # noqa: PLC0415 - as above

        class Bound:
            def __init__(self, judge: Judge) -> None:
                self.schedule, self.judge = schedule, judge

            def bind(self, mesh: Any, functions: Any) -> Any:
                return self.judge._bound(self.schedule)

        try:
            sizes = {axis.name: axis.size for axis in self.schedule.mesh_axes}
            return {"under": UnderJax(Bound(self), sizes, self.base.functions)}  # type: ignore[dict-item]
        except Exception as error:  # noqa: BLE001 - whatever it raises is the result
            return _in_words(error)

    def _run(self, runner: Mapping[str, Any]) -> Outcome:
        """Run all phases twice. Schedules with equal traced programs run once."""
        jax: Any = importlib.import_module("jax")
        under = runner["under"]
        schedule: Schedule = under.schedule
        values: dict[str, Any] = {}
        try:
            state = under.init()
            inputs = {phase.name: self.inputs(schedule, phase.name) for phase in schedule.phases}
            text = ""
            for phase in schedule.phases:
                traced = jax.make_jaxpr(functools.partial(under.phase, phase.name))(state, inputs[phase.name])
                text += f"{phase.name}: {traced} {[np.asarray(x).tobytes() for x in traced.consts]}\n"
            known = self._under_jax.get(text)
            if known is not None:
                return known
            for turn in range(2):
                for phase in schedule.phases:
                    outputs, state = under.phase(phase.name, state, inputs[phase.name])
                    kept: dict[str, Tree] = {} if schedule.state_shards else dict(state)
                    flat(f"{turn} {phase.name}", {**outputs, **kept}, values)
        except Exception as error:  # noqa: BLE001 - whatever it raises is the result
            return Outcome({}, _in_words(error))
        self._under_jax[text] = Outcome(values)
        return self._under_jax[text]


def _first_batches(run: Any, phase: Phase) -> Iterator[tuple[str, Any]]:
    """The first batches of a phase, by name; if its members have independent clocks, an epoch of each."""
    clocked = next((op for op in phase.ops if isinstance(op, Read) and op.clock is not None), None)
    with contextlib.ExitStack() as stack:
        if clocked is None:
            batches = stack.enter_context(run.batches(phase.name))
            yield from ((f"{number}", batch) for number, batch in zip(range(BATCHES), batches, strict=False))
            return
        feeds = [
            stack.enter_context(run.batches(phase.name, member=member, timeout=CLOCK_TIMEOUT_S))
            for member in range(len(clocked.batch))
        ]
        taken = [0] * len(feeds)  # records
        live = dict(enumerate(feeds))
        while live:  # one thread drives all members: the one that has taken the fewest records goes on
            member = min(live, key=lambda member: (taken[member], member))
            batch = next(live[member], None)
            if batch is None:
                del live[member]
            else:
                yield f"member {member} at {taken[member]}", batch
                taken[member] += clocked.batch[member]


def _in_words(error: BaseException) -> str:
    """The type and first line of an error, without the file of the plan: that is presentation."""
    text = str(error)
    if isinstance(error, CommplanError):
        text = f"{error.diagnostics[0].code}: {error.diagnostics[0].message}"
    first_line = text.partition("\n")[0]
    return f"{type(error).__name__}: {first_line[:200]}"


def _algorithms(schedule: Schedule) -> list[object]:
    return [op.algorithm for phase in schedule.phases for op in phase.ops if isinstance(op, Collective)]


def _leaf_paths(schedule: Schedule) -> dict[str, list[str]]:
    return {value.id: [leaf.path for leaf in value.leaves] for value in schedule.entry}


def _whole_states(schedule: Schedule) -> dict[str, tuple[Any, ...]]:
    """The whole leaves of every state, before sharding, for laying out checkpoints."""
    assert schedule.origin is not None
    return {value.id: value.uncut for value in schedule.origin.values if value.id in schedule.states}


def flat(prefix: str, trees: Mapping[str, Tree], into: dict[str, Any]) -> None:
    """Put every leaf of `trees` into `into`, by its name and path."""
    for name, tree in trees.items():
        for path, array in flatten(tree)[0]:
            into[f"{prefix} {name} {path}"] = np.asarray(array)
