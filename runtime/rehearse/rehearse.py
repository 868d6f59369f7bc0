"""A rehearsal: every phase of a plan with real data and random inputs, on the devices of one process or on
the ranks of a communicator, which all call it alike."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from commplan.diagnostics import fail
from commplan.ir import schedule as ir
from commplan.ir.types import DType, Placement
from commplan.lowering.jax import _compat
from commplan.lowering.jax.layout import global_shape, leaf_specs, varying
from commplan.lowering.jax.pytree import build
from commplan.lowering.jax.typing_shim import jax
from commplan.lowering.mpi.job.engine_errors import as_diagnostics
from commplan.runtime.context import CALLS
from commplan.runtime.input.multirate.run_batches import batches_of
from commplan.runtime.input.multirate.schedule import clocked

if TYPE_CHECKING:
    from commplan.runtime.input.observe.accounting import Summary
    from commplan.runtime.phases import PhaseCall
    from commplan.runtime.run import Run

Progress = Callable[[str, int, int], None]
"""Called with the name of a phase, the calls made and the calls to make."""


class PhaseTimes(msgspec.Struct, frozen=True):
    """What one phase took. `first_s` is the first call, compilation included; `call_s` the mean of the
    others (None where there were none). `input` is what its batches cost, None where it loads nothing."""

    name: str
    calls: int
    first_s: float | None
    call_s: float | None
    input: Summary | None


class ServerWork(msgspec.Struct, frozen=True):
    """What one server has done. requests, nbytes: what workers asked it in messages; answered: bytes that
    went out; shared: requests that workers served themselves in its memory; updates: of units; busy_s and
    wait_s: wall seconds with and without something to do; lost: workers that died."""

    rank: int
    name: str
    requests: int
    shared: int
    nbytes: int
    answered: int
    updates: int
    busy_s: float
    wait_s: float
    cpu_s: float
    lost: tuple[int, ...] = ()


class ProcessResult(msgspec.Struct, frozen=True):
    """The phases of a worker or the work of a server: one process.

    broken_off: whether workers gave up. device: the platform of the worker's devices, `cpu` or `gpu`.
    """

    rank: int
    phases: tuple[PhaseTimes, ...] = ()
    server: ServerWork | None = None
    broken_off: bool = False
    device: str = "cpu"


def mesh_for(sizes: Mapping[str, int], device: str | None = "cpu") -> Any:
    """A mesh of this process's devices, with axes of `sizes`. Raises CP1107 if there are too few.

    device: `cpu`, `gpu`, or None: those that JAX finds by itself if there are enough, else CPU devices.
    """
    ranks = math.prod(sizes.values())
    devices = _devices(ranks, device)
    if len(devices) < ranks:
        kind, fix = "CPU", f"set JAX_NUM_CPU_DEVICES={ranks} before JAX is imported"
        if device == "gpu":
            kind, fix = "GPU", "give `?` axes smaller sizes with --axis NAME=N, or --device cpu"
        fail("CP1107", f"the plan has {ranks} ranks, and this process has {len(devices)} {kind} devices", fix)
    shape, names = tuple(sizes.values()) or (1,), tuple(sizes) or ("alone",)
    array = np.array(devices[:ranks]).reshape(shape)
    return Mesh(array, names, axis_types=(AxisType.Auto,) * len(names))


def _devices(ranks: int, device: str | None) -> list[Any]:
    if device == "gpu":
        try:
            return list(jax.devices("gpu"))
        except RuntimeError:
            return []
    devices: list[Any] = list(jax.devices()) if device is None else []
    return devices if len(devices) >= ranks else _compat.cpu_devices()


def rehearse(run: Run, *, steps: int, seed: int = 0, progress: Progress | None = None) -> list[PhaseTimes]:
    """`at start`, then `steps` steps with what comes every N of them, then each named phase once.

    Inputs are random (seeded), the same numbers in every call. Phases with loads get batches of their own;
    a named one runs over at most `steps` of them. Raises what the phases raise.
    """
    stages = {name: _Stage(run, name, seed) for name in run.phases}
    state = run.init()

    def call(name: str, done: int, of: int) -> None:
        nonlocal state
        state = stages[name].call(state)
        if progress is not None:
            progress(name, done, of)

    try:
        for stage in stages.values():
            if stage.phase.kind == "start":
                call(stage.name, 1, 1)
        for step in range(1, steps + 1):
            for stage in stages.values():
                kind, period = stage.phase.kind, stage.phase.period
                if kind == "step" or (kind == "every" and step % period == 0):
                    call(stage.name, step, steps)
        for stage in stages.values():
            if stage.phase.kind == "named":
                calls = min(steps, stage.batches.steps) if stage.batches else 1
                for done in range(1, calls + 1):
                    call(stage.name, done, calls)
    finally:
        for stage in stages.values():
            stage.close()
    return [stage.times() for stage in stages.values()]


def part(run: Run, *, steps: int, seed: int = 0, progress: Progress | None = None) -> ProcessResult:
    """This process's part: a worker rehearses and leaves its servers, a server serves until all have left.

    Raises what the phases and the server raise.
    """
    rank, _ = run.context.machine.process()
    if run.role == "worker":
        try:
            times = rehearse(run, steps=steps, seed=seed, progress=progress)
        except Exception as error:
            run.close(str(error).partition("\n")[0])
            raise
        run.close()
        return ProcessResult(rank, tuple(times), device=_platform(run))
    served = run.serve()
    work = ServerWork(
        rank, served.name, sum(served.requests.values()), served.shared, sum(served.nbytes.values()),
        served.answered, served.updates, served.busy_s, served.waiting_s, served.cpu_s, served.lost,
    )  # fmt: skip
    return ProcessResult(rank, (), work, bool(served.broken_off))


def _platform(run: Run) -> str:
    return "cpu" if run.context.machine.layout == "local" else run.mesh.devices.flat[0].platform


def program_text(run: Run, kind: Literal["jaxpr", "hlo"]) -> str:
    """Every phase as JAX traces it, or as XLA compiles it for the run's mesh."""
    pieces: list[str] = []
    for name, function, arguments in phase_steps(run):
        if kind == "jaxpr":
            text = str(jax.make_jaxpr(function)(*arguments))
        else:
            text = function.lower(*arguments).compile().as_text()
        pieces.append(f"// phase {name}\n{text.rstrip()}\n")
    return "\n".join(pieces)


def phase_steps(run: Run, only: Sequence[str] = ()) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Each phase that computes something: its name, a jitted function of it alone, and the shapes of its
    arguments on the run's mesh, whose devices need not be there. only: those phases, by default all."""
    for name in only or run.phases:
        stage = _Stage(run, name, 0, batches=False)
        if stage.calls_anything:
            yield name, stage.function, stage.abstract()


class _Stage:
    """One phase with its inputs, its batches and its clock."""

    def __init__(self, run: Run, name: str, seed: int, *, batches: bool = True) -> None:
        self.run, self.name = run, name
        self.phase = run.context.schedule.phase(name)
        self.call_: PhaseCall = run.phases[name]
        self.takes = {binding.name for binding in self.phase.takes}
        self.seed = seed
        self.outputs = [binding for binding in self.phase.outputs if not binding.source_only]
        # A phase that takes what members read by their own clocks is called by each member: never as a whole.
        apart = bool(clocked(self.phase) and self.takes)
        self.calls_anything = bool(self.outputs or self.phase.updates) and not apart
        self.function = self._function()
        reads = any(isinstance(op, ir.Read) for op in self.phase.ops)
        self.batches = batches_of(run, name) if reads and batches else None
        self.items: Iterator[Any] = iter(())
        self.seconds: list[float] = []
        self.input: Summary | None = None

    @cached_property
    def made(self) -> dict[str, Any]:
        """The inputs, of random numbers."""
        return {
            argument: _random(self.run, value, (self.seed, number))
            for number, (argument, value) in enumerate(self._arguments(taken=False).items())
        }

    def _arguments(self, *, taken: bool) -> dict[str, ir.Value]:
        return {n: v for n, v in self.call_.lowered.arguments.items() if (n in self.takes) is taken}

    def _function(self) -> Any:
        """The phase under shard_map and jit. Partial inputs come in as one term per rank."""
        values = {**self._arguments(taken=False), **self._arguments(taken=True)}
        where = {name: str(_outside(self.run, value.placement)) for name, value in values.items()}
        own = {value.id: value.placement for value in (*self.phase.values, *self.run.context.schedule.entry)}
        listed = tuple(str(_held(own[binding.value])) for binding in self.outputs)

        def body(state: Any, **given: Any) -> Any:
            outputs, state = self.call_(state, **given)
            return (state, *(outputs[binding.name] for binding in self.outputs)) if listed else state

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(parameter, kind) for parameter in ("state", *values)]
        body.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
        spmd: Any = self.run.spmd
        return jax.jit(spmd(returns=listed or None, **where)(body))

    def abstract(self) -> tuple[Any, ...]:
        """The state and all that the phase takes, as shapes."""
        state = {name: _abstract(self.run, value) for name, value in self.run.context.states.items()}
        if self.run.context.counted:
            counts = jax.ShapeDtypeStruct((), "int32")
            state[CALLS] = dict.fromkeys(self.run.context.counted, counts)
        values = {**self._arguments(taken=False), **self._arguments(taken=True)}
        return (state, *(_abstract(self.run, value) for value in values.values()))

    def call(self, state: Any) -> Any:
        item: dict[str, Any] = self._next() if self.batches else {}
        if not self.calls_anything:
            jax.block_until_ready(list(item.values()))
            self.seconds.append(0.0)
            return state
        values = self.made.values()
        begun = time.perf_counter()
        taken = [item[name] for name in self._arguments(taken=True)]
        with as_diagnostics([op.span for op in self.phase.ops], self.run.context.schedule.file):
            answer = jax.block_until_ready(self.function(state, *values, *taken))
        self.seconds.append(time.perf_counter() - begun)
        return answer[0] if self.outputs else answer

    def _next(self) -> dict[str, Any]:
        item = next(self.items, None)
        if item is None:  # the first epoch, or the next one
            self.items = iter(self.batches) if self.batches else self.items
            item = next(self.items)
        return item

    def times(self) -> PhaseTimes:
        taken = self.seconds if self.calls_anything else []
        first, later = taken[0] if taken else None, taken[1:]
        mean = sum(later) / len(later) if later else None
        return PhaseTimes(self.name, len(self.seconds), first, mean, self.input)

    def close(self) -> None:
        if self.batches:
            self.input = self.batches.summary()
            self.batches.close()


def _held(placement: Placement) -> Placement:
    """How workers hold a value, wherever it lives."""
    return Placement(placement.per, placement.partial, placement.split)


def _outside(run: Run, placement: Placement) -> Placement:
    """How a value comes in from outside: a partial one as a different term on each rank."""
    order = list(run.context.sizes)
    per = tuple(sorted((*placement.per, *placement.partial), key=order.index))
    return Placement(per, (), placement.split)


def _layout(run: Run, value: ir.Value) -> Iterator[tuple[ir.Leaf, tuple[int, ...], Any]]:
    """Leaf, shape and sharding as it lies outside of `run.spmd`, leaf by leaf; a rank's own has none."""
    if run.context.machine.layout == "local":
        yield from ((leaf, leaf.shape, None) for leaf in value.leaves)
        return
    outside = msgspec.structs.replace(value, placement=_outside(run, value.placement))
    for leaf, spec in zip(outside.leaves, leaf_specs(outside), strict=True):
        shape = global_shape(outside, leaf, run.context.sizes)
        yield leaf, shape, NamedSharding(run.mesh, spec)


def _random(run: Run, value: ir.Value, seed: tuple[int, ...]) -> Any:
    """Random numbers for `value`: where ranks have their own, the same on those that must agree."""
    leaves: list[Any] = []
    for number, (leaf, shape, sharding) in enumerate(_layout(run, value)):
        own = [run.place[axis] for axis in varying(value, leaf)] if sharding is None else []
        rng = np.random.default_rng([*seed, number, *own])
        leaves.append(jax.device_put(_numbers(rng, shape, leaf.dtype), sharding))
    return _tree(run, value, leaves)


def _abstract(run: Run, value: ir.Value) -> Any:
    leaves = [
        jax.ShapeDtypeStruct(shape, leaf.dtype.numpy_name, sharding=sharding)
        for leaf, shape, sharding in _layout(run, value)
    ]
    return _tree(run, value, leaves)


def _tree(run: Run, value: ir.Value, leaves: list[Any]) -> Any:
    return build([leaf.path for leaf in value.leaves], leaves, run.context.structures)


def _numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> Any:
    if dtype.is_float:
        return jax.numpy.asarray(rng.standard_normal(shape, np.float32), dtype.numpy_name)
    if dtype is DType.BOOL:
        return rng.integers(0, 2, shape).astype(np.bool_)
    return rng.integers(0, 10, shape).astype(dtype.numpy_name)
