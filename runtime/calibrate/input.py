"""Measure input work on this host: the costs of reading a record, of host functions, and of a step.

Everything is called as in training, in this process: sources by index in a random order, functions record by
record in plan order. The result is the `[input]` part of a calibration.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, cast

import numpy as np

from commplan.diagnostics import Span, fail, type_of
from commplan.input.measured_costs import ConsumerCost, FnCost, InputCosts, SourceCost
from commplan.ir import schedule as ir
from commplan.ir.assemble import assemble
from commplan.ir.plan import Load, MapStage, Phase, Plan, Ref, name_of, operands, results
from commplan.ir.types import SAME, ArrayType, BytesType, DType, Element, RecordsType
from commplan.runtime.calibrate.lock import Calls, lock_shares_of
from commplan.runtime.input.iterator import PhaseBatches
from commplan.runtime.input.observe.accounting import Meter
from commplan.runtime.input.sources.files import as_source, nbytes
from commplan.runtime.input.sources.record_convert import numpy_dtype
from commplan.runtime.input.stages.records import BlockPosition, Stage

_BLOCK = 16  # Records that go through one stage together, as in training.
_LEAST = 3  # Blocks that are measured even if no time remains.
_ROUNDS = 5  # Measurements of a cost that does not depend on the plan. The best one counts.
_MOST_CALLS = 64  # Calls of each function and phase that `lock_shares_of` gets.
_WARM_UP_STEPS = 2  # The first calls of the consumer, which may compile; they do not count.
_FEWEST_STEPS = 7  # Calls of the consumer even if they take longer than `_STEPS_S`.
_MOST_STEPS = 200  # The most calls of the consumer.
_STEPS_S = 2.0  # About the seconds for all calls of the consumer.
_BUFFER = 2**26  # Bytes of the copies' buffer, which exceeds the caches.
_ROW = 150_528  # Bytes of one copy: an image of 224 x 224 x 3.
_HERE = Span(1, 1, 1, 1)  # Ops of `_plain` have no line in a plan.
_POSITION = BlockPosition(0, 0, -1)  # For errors: measured records have no position in an epoch.

# A step. It gets the outputs of a phase by name.
Consumer = Callable[[dict[str, Any]], Any]


@dataclass
class _Total:
    """The measurements of one source or function.

    Attributes:
        cpu: CPU seconds.
        records: The number of records.
        before: Bytes of operands; 0 for a source.
        after: Bytes of results.
        waits: For each block, the mean seconds per record without CPU time.
    """

    cpu: float = 0.0
    records: int = 0
    before: int = 0
    after: int = 0
    waits: list[float] = field(default_factory=list[float])


@dataclass(frozen=True)
class PlanInput:
    """A plan with its sources and host functions by name.

    Phases without any of these sources are not measured.

    Attributes:
        plan: The plan.
        sources: The sources by name.
        functions: The host functions by name; others are ignored.
        sizes: The sizes of axes that the plan leaves open, by name. Axes without a size count as 1.
    """

    plan: Plan
    sources: Mapping[str, Any]
    functions: Mapping[str, Callable[..., Any]]
    sizes: Mapping[str, int] = field(default_factory=dict[str, int])

    def phases(self) -> list[Phase]:
        """The phases that read one of the sources."""
        return [
            phase
            for phase in self.plan.phases
            if any(isinstance(stage, Load) and stage.source in self.sources for stage in phase.stages)
        ]

    def stages(self, phase: Phase) -> list[Load | MapStage]:
        """The loads and host maps of `phase` in plan order."""
        return [
            stage
            for stage in phase.stages
            if isinstance(stage, Load)
            or (isinstance(stage, MapStage) and self.plan.fn(stage.fn).where == "host")
        ]


def needed(plan_input: PlanInput) -> tuple[list[str], list[str]]:
    """The names of the sources and of the host functions that the measured phases need, in plan order."""
    stages = [stage for phase in plan_input.phases() for stage in plan_input.stages(phase)]
    sources = dict.fromkeys(stage.source for stage in stages if isinstance(stage, Load))
    fns = dict.fromkeys(stage.fn for stage in stages if isinstance(stage, MapStage))
    return list(sources), list(fns)


def calibrate_input(
    plan_input: PlanInput,
    *,
    seconds: float = 20.0,
    consumer: Consumer | None = None,
    step_seconds: float | None = None,
) -> InputCosts:
    """Measure input work on this host.

    Args:
        plan_input: The plan, its sources and its functions.
        seconds: About how long to measure. The copies, the pipeline and the consumer take a few more seconds.
        consumer: A jitted step, whose result is waited for; None to measure none. It is called with the
            outputs of the phase `each step` (else the first measured phase) for one member, {name: array
            [rows, ...]}, with random content.
        step_seconds: The seconds of a step, if there is no `consumer`; None if they are unknown.

    Returns:
        The measured costs.

    Raises:
        CommplanError: CP0770 if no phase reads one of the sources; CP0902 to CP0908 for sources, records and
            functions that do not fit the plan; CP0771 if the consumer fails.
    """
    phases = plan_input.phases()
    if not phases:
        declared = ", ".join(source.name for source in plan_input.plan.sources) or "none"
        fail("CP0770", "no phase of the plan reads one of the passed sources", f"its sources: {declared}")
    cores = len(os.sched_getaffinity(0))
    sources, fns = needed(plan_input)
    # Of the time, 60% are for stages and 30% for their shares of the interpreter's lock.
    phase_s = seconds * 0.6 / len(phases)
    totals = {name: _Total() for name in (*sources, *fns)}
    calls_of: dict[str, Calls] = {}
    for phase in phases:
        for name, calls in _sample(plan_input, phase, totals, phase_s).items():
            calls_of.setdefault(name, []).extend(calls)
    lock_shares = lock_shares_of(calls_of, seconds * 0.3)
    record, batch = pipeline_cost()
    chosen = next((phase for phase in phases if phase.kind == "step"), phases[0])
    return InputCosts(
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        cores=cores,
        copy=copy_cost(),
        record=record,
        batch=batch,
        host=socket.gethostname(),
        source=tuple(_source(name, totals[name]) for name in sources),
        fn=tuple(_fn(name, totals[name], lock_shares.get(name)) for name in fns),
        consumer=_consumer(plan_input, chosen, consumer, step_seconds),
    )


def _source(name: str, total: _Total) -> SourceCost:
    """The costs of a source per record."""
    records = max(1, total.records)
    wait = float(np.median(total.waits)) if total.waits else 0.0
    return SourceCost(name, total.cpu / records, max(0.0, wait), total.after / records, total.records)


def _fn(name: str, total: _Total, lock_share: float | None) -> FnCost:
    """The costs of a host function per record; see `lock_shares_of` for the share of the lock."""
    records = max(1, total.records)
    return FnCost(
        name, total.cpu / records, lock_share, total.before / records, total.after / records, total.records
    )


def _sample(
    plan_input: PlanInput, phase: Phase, totals: Mapping[str, _Total], seconds: float
) -> dict[str, Calls]:
    """Run blocks of records through the stages of `phase` for about `seconds`; the first block warms up.

    Adds the costs to `totals`, by source or function. Returns some calls of each host function.
    """
    opened_sources = {
        stage.source: _open_source(plan_input, stage)
        for stage in plan_input.stages(phase)
        if isinstance(stage, Load)
    }
    bound = [_BoundStage(_stage(plan_input, stage, opened_sources)) for stage in plan_input.stages(phase)]
    orders = {name: _order(len(source)) for name, source in opened_sources.items()}
    calls_of: dict[str, Calls] = {}
    end = time.perf_counter() + seconds
    blocks = 0
    while blocks <= _LEAST or time.perf_counter() < end:
        arrays: dict[Ref, Sequence[Any]] = {}
        records = list(range(_BLOCK))
        for bound_stage in bound:
            stage = bound_stage.stage
            op, rows = stage.op, list[tuple[Any, ...]]([()] * _BLOCK)
            name = op.source if isinstance(op, ir.Read) else op.fn
            if isinstance(op, ir.Read):
                records = [next(orders[name]) for _ in records]
            else:
                rows = list(zip(*(arrays[ref] for ref in op.operands), strict=True))
                calls = calls_of.setdefault(name, [])
                missing_count = max(0, _MOST_CALLS - len(calls))
                calls += [(stage.call, row, op.random) for row in rows[:missing_count]]
            columns = bound_stage.run(records, rows, totals[name] if blocks else _Total())
            results_with_columns = ir.results(op)[: len(columns)]  # Without the number of records of a load.
            arrays.update(zip(results_with_columns, columns, strict=True))
        blocks += 1
    return calls_of


def _order(length: int) -> Iterator[int]:
    """Record indices in a random order, repeatedly, so that disks and caches behave as in training."""
    while True:
        yield from np.random.default_rng(17).permutation(length).tolist()


def _open_source(plan_input: PlanInput, load: Load) -> Any:
    """The source of `load`. Raises CP0902 if it has no access by index, and CP0903 if it is empty."""
    element = next(source.type for source in plan_input.plan.sources if source.name == load.source)
    source = as_source(plan_input.sources[load.source], isinstance(element, BytesType))
    file = plan_input.plan.file
    if source is None:
        kind = type_of(plan_input.sources[load.source])
        fail(
            "CP0902", f"source `{load.source}` is {kind}, without access by index", span=load.span, file=file
        )
    if len(source) == 0:
        fail("CP0903", f"source `{load.source}` is empty", span=load.span, file=file)
    return source


def _stage(plan_input: PlanInput, op: Load | MapStage, opened_sources: Mapping[str, Any]) -> Stage:
    """The stage of training that runs `op`. Raises CP0908 for a host function that was not passed."""
    plan, meter = plan_input.plan, Meter("", "")
    if isinstance(op, Load):
        element = next(source.type for source in plan.sources if source.name == op.source)
        call, elements, lowered = opened_sources[op.source].__getitem__, (element,), assemble(ir.Read, op)
    else:
        fn = plan.fn(op.fn)
        call = plan_input.functions.get(op.fn)
        if not callable(call):
            fail("CP0908", f"host function `{op.fn}` is not bound", span=op.span, file=plan.file)
        elements = cast("tuple[Element, ...]", fn.results)  # Host functions declare their types.
        lowered = assemble(ir.Map, op, random=fn.random)
    dtypes = tuple(numpy_dtype(e.dtype) if isinstance(e, ArrayType) else None for e in elements)
    # Any number and seed: they only choose the random streams of random functions.
    return Stage(
        lowered, number=0, elements=elements, dtypes=dtypes, call=call, seed=5, file=plan.file, meter=meter,
        skip=False,
    )  # fmt: skip


@dataclass(frozen=True)
class _BoundStage:
    """A stage, and the memory that its results are written to.

    Attributes:
        stage: The stage.
        buffers: For each column of results, an array of several blocks of records; made at first use.
    """

    stage: Stage
    buffers: dict[int, Any] = field(default_factory=dict[int, Any])

    def run(
        self, records: Sequence[int], rows: Sequence[tuple[Any, ...]], total: _Total
    ) -> list[Sequence[Any]]:
        """Run the stage on each record, and add the costs to `total`.

        Args:
            records: The numbers of the records.
            rows: The operands for each record; empty tuples for a source.
            total: The measurements of the source or function.

        Returns:
            The results by column.
        """
        wall, cpu = time.perf_counter(), time.process_time()
        out = [
            self.stage.one(_POSITION, record, list(row)) for record, row in zip(records, rows, strict=True)
        ]
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        columns = (
            [list(column) for column in zip(*out, strict=True)] if len(self.stage.elements) > 1 else [out]
        )
        total.cpu += cpu
        total.waits.append((wall - cpu) / len(rows))
        total.records += len(rows)
        total.before += sum(nbytes(value) for row in rows for value in row)
        total.after += sum(nbytes(value) for column in columns for value in column)
        return [self._written(column, index, total) for index, column in enumerate(columns)]

    def _written(self, column: list[Any], index: int, total: _Total) -> Sequence[Any]:
        """Write results to memory that was not used recently; bytes are not moved.

        This is part of their cost: a function may return a view that is slow to copy.
        """
        element = self.stage.elements[index]
        if not isinstance(element, ArrayType):
            return column
        buffer = self.buffers.get(index)
        if buffer is None:
            dtype = numpy_dtype(element.dtype)
            # Enough blocks to exceed the caches; large records need only two, and small ones 64.
            blocks = max(2, min(64, _BUFFER // max(1, _BLOCK * element.size * dtype.itemsize)))
            buffer = self.buffers[index] = np.ones((blocks, _BLOCK, *element.shape), dtype)
        target = buffer[total.records // _BLOCK % len(buffer)]
        start = time.process_time()
        for row, value in enumerate(column):
            target[row] = value
        total.cpu += time.process_time() - start
        return target


# --- costs that do not depend on the plan ---


def copy_cost() -> float:
    """The CPU seconds per byte of a copy from recently written memory to memory not used recently."""
    slots = np.zeros(_BUFFER // _ROW * _ROW, np.uint8).reshape(-1, _ROW)
    row = np.ones(_ROW, np.uint8)
    slots[:] = 1  # Maps the pages.
    durations: list[float] = []
    for _ in range(_ROUNDS):
        start = time.process_time()
        for slot in slots:
            slot[:] = row
        durations.append(time.process_time() - start)
    return min(durations) / slots.nbytes


def pipeline_cost() -> tuple[float, float]:
    """The CPU seconds of the pipeline per record and per batch, from batches of two sizes without work."""
    few, many = 8, 512
    small, large = _per_batch(few), _per_batch(many)
    record = max(0.0, (large - small) / (many - few))
    return record, max(0.0, small - few * record)


def _per_batch(rows: int) -> float:
    """The CPU seconds of the pipeline per batch of `rows` records, without work: the least of `_ROUNDS`."""
    batches = 60
    data = np.zeros((rows * batches, 1), np.uint8)
    schedule = _plain(rows)
    durations: list[float] = []
    with PhaseBatches(schedule, "step", {"rows": data}, {}) as iterated:
        for _ in range(_ROUNDS):
            start = time.process_time()
            for _ in iterated:
                pass
            durations.append((time.process_time() - start) / batches)
    return min(durations)


def _plain(rows: int) -> ir.Schedule:
    """A schedule that only reads batches of `rows` records of one byte."""
    element = ArrayType(DType.U8, (1,))
    read = ir.Read("x.0", "rows", (rows,), "exactly_once", 1, _HERE)
    value = ir.Value("x.0", "records", (ir.Leaf("", (rows, 1), DType.U8),), SAME)
    binding = ir.Binding("x", "x.0", source_only=True)
    phase = ir.Phase("step", "step", _HERE, 1, (read,), (), (), (binding,), (), (value,))
    return ir.Schedule("calibration", "", (), (ir.SourceType("rows", element),), (), (), (), (), (phase,))


# --- the consumer ---


def _consumer(
    plan_input: PlanInput, phase: Phase, consumer: Consumer | None, seconds: float | None
) -> tuple[ConsumerCost, ...]:
    """The cost of a step: measured with `consumer`, else `seconds`, else none."""
    if consumer is not None:
        duration, cpu = _step(consumer, _item(plan_input, phase))
        return (ConsumerCost(plan_input.plan.name, phase.name, duration, cpu),)
    if seconds is not None:
        return (ConsumerCost(plan_input.plan.name, phase.name, seconds),)
    return ()


def _item(plan_input: PlanInput, phase: Phase) -> dict[str, Any]:
    """The outputs of the phase from its sources for one member, with random content.

    Arrays are JAX arrays if the consumer has imported JAX. Raises CP0771 if the phase has no such arrays.
    """
    sourced: set[Ref] = set()
    for stage in phase.stages:
        ahead = isinstance(stage, Load) or (isinstance(stage, MapStage) and set(operands(stage)) <= sourced)
        sourced.update(results(stage) if ahead else ())
    sizes = {axis.name: plan_input.sizes.get(axis.name, axis.size or 1) for axis in plan_input.plan.axes}
    rng = np.random.default_rng(3)
    item: dict[str, Any] = {}
    for binding in phase.outputs:
        value = plan_input.plan.value(binding.value)
        shards = int(np.prod([sizes[axis] for axis in value.placement.split]))
        match value.type:
            case RecordsType(batch, ArrayType(dtype, shape)) if binding.value in sourced:
                item[binding.name] = _random(rng, (max(batch) // shards, *shape), dtype)
            # The result of a device function.
            case ArrayType(dtype, (rows, *shape)) if binding.value in sourced:
                item[binding.name] = _random(rng, (rows // shards, *shape), dtype)
            case _:
                pass
    if not item:
        outputs = ", ".join(name_of(binding.value) for binding in phase.outputs) or "none"
        message = f"phase `{phase.name}` has no array from its sources for a consumer"
        fail("CP0771", message, f"its outputs: {outputs}", span=phase.span, file=plan_input.plan.file)
    if "jax" in sys.modules:
        import jax.numpy as jnp  # noqa: PLC0415  only if the consumer has imported JAX

        return {name: jnp.asarray(array) for name, array in item.items()}
    return item


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> Any:
    """A random array; integers are 0 or 1, which are valid as labels and as booleans."""
    if dtype.is_float:
        return rng.standard_normal(shape, np.float32).astype(numpy_dtype(dtype))
    return rng.integers(0, 2, shape).astype(numpy_dtype(dtype))


def _step(consumer: Consumer, item: dict[str, Any]) -> tuple[float, float]:
    """The wall and CPU seconds of a step: medians after a warm-up. Raises CP0771 if it fails."""
    try:
        walls: list[float] = []
        cpus: list[float] = []
        started = time.perf_counter()
        while len(walls) < _FEWEST_STEPS or (
            time.perf_counter() - started < _STEPS_S and len(walls) < _MOST_STEPS
        ):
            wall, cpu = time.perf_counter(), time.process_time()
            _wait_for_devices(consumer(item))
            cpus.append(time.process_time() - cpu)
            walls.append(time.perf_counter() - wall)
    except Exception as error:  # noqa: BLE001  The user's function may raise anything.
        shapes = ", ".join(f"{name}: {array.dtype}{list(array.shape)}" for name, array in item.items())
        fail(
            "CP0771",
            f"the consumer raised {type(error).__name__}: {error}",
            f"it was called with {{{shapes}}}",
        )
    return float(np.median(walls[_WARM_UP_STEPS:])), float(np.median(cpus[_WARM_UP_STEPS:]))


def _wait_for_devices(result: Any) -> None:
    """Wait until JAX has computed the arrays of `result`, a pytree."""
    if "jax" in sys.modules:
        import jax  # noqa: PLC0415  only if the consumer has imported JAX

        jax.block_until_ready(result)
