"""Rehearse every phase of a plan with real data and random inputs.

It runs on the devices of one process or on the ranks of a communicator, which all call it.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import jax
import msgspec
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from commplan.diagnostics import fail
from commplan.ir import schedule as ir
from commplan.ir.types import DType, Placement
from commplan.lowering.jax import _compat
from commplan.lowering.jax.layout import global_shape, leaf_specs, varying
from commplan.lowering.jax.pytree import build
from commplan.lowering.mpi.job.engine_errors import as_diagnostics
from commplan.runtime.context import CALLS
from commplan.runtime.input.device.clocked_phases import batches_of
from commplan.runtime.input.multirate.schedule import clocked

if TYPE_CHECKING:
    from commplan.runtime.input.observe.accounting import Summary
    from commplan.runtime.phases import PhaseCall
    from commplan.runtime.run import Run

Progress = Callable[[str, int, int], None]
"""Called with the name of a phase, the number of calls or steps so far, and the number of all of them."""


class PhaseTimes(msgspec.Struct, frozen=True):
    """The times of one phase.

    Attributes:
        name: The name of the phase.
        calls: The number of calls; of batches, for a phase that computes nothing.
        first_s: Seconds of the first call, compilation included; None if it was not called or computes
            nothing.
        call_s: Mean seconds of the other calls, or None if there are none.
        input: The costs of its batches, or None if it loads nothing.
    """

    name: str
    calls: int
    first_s: float | None
    call_s: float | None
    input: Summary | None


class ServerWork(msgspec.Struct, frozen=True):
    """The work of one server.

    Attributes:
        rank: The rank of the server.
        name: The name of the server in errors.
        requests: The number of requests in messages of workers.
        shared: The number of requests that workers served themselves in the server's memory.
        nbytes: Bytes of the requests in messages.
        answered: Bytes of answers.
        updates: The number of updates of units.
        busy_s: Wall seconds with work.
        wait_s: Wall seconds without work.
        cpu_s: CPU seconds.
        lost: The ranks of workers that died.
    """

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


class ProcessRehearsal(msgspec.Struct, frozen=True):
    """The rehearsal of one process, a worker or a server.

    Attributes:
        rank: The rank or the process index.
        phases: The phases of a worker; empty for a server.
        server: The work of a server; None for a worker.
        broken_off: For a server, whether a worker ended with an error.
        device: The platform of the worker's devices, such as "cpu" or "gpu".
    """

    rank: int
    phases: tuple[PhaseTimes, ...] = ()
    server: ServerWork | None = None
    broken_off: bool = False
    device: str = "cpu"


def mesh_for(sizes: Mapping[str, int], device: str | None = "cpu") -> Any:
    """A mesh of this process's devices, with Auto axes.

    Args:
        sizes: The sizes of the axes, by name. Without axes the mesh has one device.
        device: `cpu`, `gpu`, or None for JAX's default devices if there are enough of them, else CPU devices.

    Raises:
        CommplanError: CP1107 if there are too few devices.
    """
    ranks = math.prod(sizes.values())
    devices = _devices(ranks, device)
    if len(devices) < ranks:
        kind, fix = "CPU", f"set JAX_NUM_CPU_DEVICES={ranks} before JAX is imported"
        if device == "gpu":
            kind, fix = "GPU", "give `?` axes smaller sizes with --axis NAME=N, or --device cpu"
        fail("CP1107", f"the plan has {ranks} ranks, but this process has {len(devices)} {kind} devices", fix)
    shape = tuple(sizes.values()) or (1,)
    names = tuple(sizes) or ("alone",)
    array = np.array(devices[:ranks]).reshape(shape)
    return Mesh(array, names, axis_types=(AxisType.Auto,) * len(names))


def _devices(ranks: int, device: str | None) -> list[Any]:
    """The devices of `mesh_for`, which may be too few."""
    if device == "gpu":
        try:
            return list(jax.devices("gpu"))
        except RuntimeError:
            return []
    devices: list[Any] = list(jax.devices()) if device is None else []
    return devices if len(devices) >= ranks else _compat.cpu_devices()


def rehearse(run: Run, *, steps: int, seed: int = 0, progress: Progress | None = None) -> list[PhaseTimes]:
    """Run `at start`, then `steps` steps with the phases of `every N steps`, then each named phase.

    A phase in F fragments runs every N / F steps. The exchanges of a hidden phase end in the same step.

    Phases with loads get their own batches. A named phase runs once for each batch, for at most `steps` of
    them, or once if it loads nothing.

    Args:
        run: The bound program.
        steps: The number of steps.
        seed: The seed of the random inputs, which are the same in every call.
        progress: Called after each call of a phase; None to report nothing.

    Returns:
        The times of each phase, in the plan's order.

    Raises:
        CommplanError: the errors of the phases.
    """
    stages = {name: _Stage(run, name, seed) for name in run.phases}
    state = run.init()

    def call(name: str, done: int, total: int) -> None:
        nonlocal state
        state = stages[name].call(state)
        if progress is not None:
            progress(name, done, total)

    try:
        for stage in stages.values():
            if stage.phase.kind == "start":
                call(stage.name, 1, 1)
        for step in range(1, steps + 1):
            for stage in stages.values():
                kind, interval = stage.phase.kind, stage.phase.interval
                if kind == "step" or (kind == "every" and step % interval == 0):
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


def rehearse_process(
    run: Run, *, steps: int, seed: int = 0, progress: Progress | None = None
) -> ProcessRehearsal:
    """Rehearse this process: a worker runs its phases, and a server serves until all workers have left.

    The arguments are those of `rehearse`. Raises the errors of the phases and of the server; servers receive
    the first line of a worker's error.
    """
    rank, _ = run.context.machine.process()
    if run.role == "worker":
        try:
            times = rehearse(run, steps=steps, seed=seed, progress=progress)
        except Exception as error:
            run.close(str(error).partition("\n")[0])
            raise
        run.close()
        is_local = run.context.machine.layout == "local"
        platform = "cpu" if is_local else run.mesh.devices.flat[0].platform
        return ProcessRehearsal(rank, tuple(times), device=platform)
    served = run.serve()
    work = ServerWork(
        rank, served.name, sum(served.requests.values()), served.shared, sum(served.nbytes.values()),
        served.answered, served.updates, served.busy_s, served.waiting_s, served.cpu_s, served.lost,
    )  # fmt: skip
    return ProcessRehearsal(rank, (), work, bool(served.broken_off))


def program_text(run: Run, kind: Literal["jaxpr", "hlo"]) -> str:
    """The text of every phase that computes something, as JAX traces it or XLA compiles it for the mesh."""
    pieces: list[str] = []
    for name, function, arguments in phase_steps(run):
        if kind == "jaxpr":
            text = str(jax.make_jaxpr(function)(*arguments))
        else:
            text = function.lower(*arguments).compile().as_text()
        pieces.append(f"// phase {name}\n{text.rstrip()}\n")
    return "\n".join(pieces)


def phase_steps(run: Run, only: Sequence[str] = ()) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """The phases that compute something.

    Args:
        run: The bound program; the devices of its mesh need not exist.
        only: The names of the phases, by default all.

    Yields:
        For each phase its name, a jitted function of it alone, and the shapes of the function's arguments.
    """
    for name in only or run.phases:
        stage = _Stage(run, name, 0, batches=False)
        if stage.calls_anything:
            yield name, stage.function, stage.abstract()


class _Stage:
    """One phase with its inputs, batches and times.

    Attributes:
        takes: The names of the values that the phase takes from batches.
        outputs: The outputs that the phase returns: those that do not depend on sources alone.
        calls_anything: Whether the phase is called. A phase that only loads is not.
        function: The phase under `run.spmd` and jit: maps (state, inputs, values of batches), by position, to
            the state, or to the state and the outputs.
        batches: The batches of the phase, or None if it loads nothing.
        items: The iterator over the batches of the current epoch.
        seconds: The seconds of each call; 0 if the phase is not called.
        input: The costs of the batches, set by `close`.
    """

    def __init__(self, run: Run, name: str, seed: int, *, batches: bool = True) -> None:
        self.run, self.name = run, name
        self.phase = run.context.schedule.phase(name)
        self.phase_call: PhaseCall = run.phases[name]
        self.takes = {binding.name for binding in self.phase.takes}
        self.seed = seed
        self.outputs = [binding for binding in self.phase.outputs if not binding.source_only]
        # Members call a phase that takes values of their clocks, so it is never called as a whole.
        apart = bool(clocked(self.phase) and self.takes)
        self.calls_anything = bool(self.outputs or self.phase.updates) and not apart
        self.function = self._function()
        reads = any(isinstance(op, ir.Read) for op in self.phase.ops)
        self.batches = batches_of(run, name) if reads and batches else None
        self.items: Iterator[Any] = iter(())
        self.seconds: list[float] = []
        self.input: Summary | None = None

    @cached_property
    def random_inputs(self) -> dict[str, Any]:
        """The inputs with random numbers."""
        return {
            argument: _random(self.run, value, (self.seed, number))
            for number, (argument, value) in enumerate(self._arguments(from_batches=False).items())
        }

    def _arguments(self, *, from_batches: bool) -> dict[str, ir.Value]:
        """The arguments of the phase that come from batches, or else those that do not."""
        return {
            n: v for n, v in self.phase_call.lowered.arguments.items() if (n in self.takes) is from_batches
        }

    def _function(self) -> Any:
        """See `function`. Outside, partial inputs have one term per rank, in a leading dimension per axis."""
        values = {**self._arguments(from_batches=False), **self._arguments(from_batches=True)}
        where = {name: str(_outside(self.run, value.placement)) for name, value in values.items()}
        placements = {
            value.id: value.placement for value in (*self.phase.values, *self.run.context.schedule.entry)
        }
        listed = tuple(str(_on_workers(placements[binding.value])) for binding in self.outputs)

        def body(state: Any, **inputs: Any) -> Any:
            outputs, state = self.phase_call(state, **inputs)
            return (state, *(outputs[binding.name] for binding in self.outputs)) if listed else state

        # `run.spmd` reads the parameters of a function from its signature.
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(parameter, kind) for parameter in ("state", *values)]
        body.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
        spmd: Any = self.run.spmd
        return jax.jit(spmd(returns=listed or None, **where)(body))

    def abstract(self) -> tuple[Any, ...]:
        """The shapes of the state and of all arguments of the phase."""
        state = {name: _abstract(self.run, value) for name, value in self.run.context.states.items()}
        if self.run.context.counted:
            counts = jax.ShapeDtypeStruct((), "int32")
            state[CALLS] = dict.fromkeys(self.run.context.counted, counts)
        values = {**self._arguments(from_batches=False), **self._arguments(from_batches=True)}
        return (state, *(_abstract(self.run, value) for value in values.values()))

    def call(self, state: Any) -> Any:
        """Call the phase with the next batch, measure it, and return the new state."""
        item: dict[str, Any] = self._next() if self.batches else {}
        if not self.calls_anything:
            jax.block_until_ready(list(item.values()))
            self.seconds.append(0.0)
            return state
        values = self.random_inputs.values()
        started = time.perf_counter()
        from_sources = [item[name] for name in self._arguments(from_batches=True)]
        with as_diagnostics([op.span for op in self.phase.ops], self.run.context.schedule.file):
            answer = jax.block_until_ready(self.function(state, *values, *from_sources))
        self.seconds.append(time.perf_counter() - started)
        return answer[0] if self.outputs else answer

    def _next(self) -> dict[str, Any]:
        """The next batch; begins another epoch after the last one."""
        item = next(self.items, None)
        if item is None:  # The first epoch, or the next one.
            self.items = iter(self.batches) if self.batches else self.items
            item = next(self.items)
        return item

    def times(self) -> PhaseTimes:
        """The times so far."""
        seconds = self.seconds if self.calls_anything else []
        first, later = seconds[0] if seconds else None, seconds[1:]
        mean = sum(later) / len(later) if later else None
        return PhaseTimes(self.name, len(self.seconds), first, mean, self.input)

    def close(self) -> None:
        """Keep the costs of the batches, and close them."""
        if self.batches:
            self.input = self.batches.summary()
            self.batches.close()


def _on_workers(placement: Placement) -> Placement:
    """The placement of a value on the workers, also if the value is stored on servers."""
    return Placement(placement.per, placement.partial, placement.split)


def _outside(run: Run, placement: Placement) -> Placement:
    """The placement of an input outside `run.spmd`. The terms of a partial input are `per` rank there."""
    order = list(run.context.sizes)
    per = tuple(sorted((*placement.per, *placement.partial), key=order.index))
    return Placement(per, (), placement.split)


def _layout(run: Run, value: ir.Value) -> Iterator[tuple[ir.Leaf, tuple[int, ...], Any]]:
    """The leaves of `value`, each with its shape and its sharding outside `run.spmd`.

    Under MPI these are the shape on one rank and None.
    """
    if run.context.machine.layout == "local":
        yield from ((leaf, leaf.shape, None) for leaf in value.leaves)
        return
    outside = msgspec.structs.replace(value, placement=_outside(run, value.placement))
    for leaf, spec in zip(outside.leaves, leaf_specs(outside), strict=True):
        shape = global_shape(outside, leaf, run.context.sizes)
        yield leaf, shape, NamedSharding(run.mesh, spec)


def _random(run: Run, value: ir.Value, seed: tuple[int, ...]) -> Any:
    """Random numbers for `value`, equal on ranks that hold the same value.

    Under MPI the seed therefore contains this rank's index along the axes over which a leaf varies.
    """
    leaves: list[Any] = []
    for number, (leaf, shape, sharding) in enumerate(_layout(run, value)):
        indices = [run.place[axis] for axis in varying(value, leaf)] if sharding is None else []
        rng = np.random.default_rng([*seed, number, *indices])
        leaves.append(jax.device_put(_numbers(rng, shape, leaf.dtype), sharding))
    return _tree(run, value, leaves)


def _abstract(run: Run, value: ir.Value) -> Any:
    """The shapes, dtypes and shardings of `value` outside `run.spmd`, as a pytree."""
    leaves = [
        jax.ShapeDtypeStruct(shape, leaf.dtype.numpy_name, sharding=sharding)
        for leaf, shape, sharding in _layout(run, value)
    ]
    return _tree(run, value, leaves)


def _tree(run: Run, value: ir.Value, leaves: list[Any]) -> Any:
    return build([leaf.path for leaf in value.leaves], leaves, run.context.structures)


def _numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> Any:
    """An array of normal floats, of booleans, or of integers from 0 to 9."""
    if dtype.is_float:
        return jax.numpy.asarray(rng.standard_normal(shape, np.float32), dtype.numpy_name)
    if dtype is DType.BOOL:
        return rng.integers(0, 2, shape).astype(np.bool_)
    return rng.integers(0, 10, shape).astype(dtype.numpy_name)
