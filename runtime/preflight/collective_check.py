"""Test each distinct collective of a bound program at its real size, on data with a known result.

The expected result is computed element by element from the kind of the collective, without code that
collectives use. `run.check_collectives` and the first step under `run.jit` call `check_collectives`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
from jax import Array
from jax.sharding import PartitionSpec
from msgspec.structs import replace

from commplan.diagnostics import Span, fail
from commplan.ir import schedule as ir
from commplan.ir.axes import group
from commplan.ir.types import DType
from commplan.lowering.jax.backend import Backend
from commplan.lowering.programs import on_leaf
from commplan.runtime.context import Context
from commplan.runtime.machines.machine import place_of
from commplan.runtime.preflight.preflight import Preflight

BUDGET_S = 5.0  # Seconds for all collectives, by default.
# The number of elements until the data repeats. It is a prime, so that it divides few blocks and messages.
_PERIOD = 7
_MOST = 2**31 - 1  # The largest index of an element: indices are i32.
_SHOWN = 4  # The most ranks in a message.
_NOWHERE = Span(0, 0, 0, 0)


class Checked(NamedTuple):
    """A collective that returned the expected result.

    Attributes:
        text: The operation, with its type, axes and algorithm.
        place: The line of the plan, with its phase.
        seconds: The duration of the second of two runs, including waits for other ranks.
    """

    text: str
    place: str
    seconds: float


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """The message of a process with the result of one collective on its ranks.

    Attributes:
        left_s: The remaining seconds of the process's budget; negative if it is exceeded.
        wrong: A description of each rank with a wrong result; empty if all results are right.
    """

    left_s: float
    wrong: tuple[str, ...] = ()


class CheckedCollective(NamedTuple):
    """A collective on a flat array, as the phase issues it for one leaf.

    Attributes:
        op: The collective.
        phase: The name of the phase.
        dtype: The dtype of the array.
        size: The number of elements of the operand on one rank.
    """

    op: ir.Collective
    phase: str
    dtype: DType
    size: int

    @property
    def text(self) -> str:
        """See `Checked.text`."""
        op = self.op
        kind = f"{op.kind}({op.op})" if op.op else op.kind
        return f"{kind} {self.dtype}[{self.size}] over {', '.join(op.axes)} by {op.algorithm}"

    @property
    def scope(self) -> str:
        """The scope of the collective in JAX's trace. `place_of` finds the line in it."""
        return f"commplan/{self.phase}/line{self.op.span.line}"


def check_collectives(context: Context, budget_s: float, preflight: Preflight) -> list[Checked]:
    """Test the collectives of `context`, the largest first, until the budget of a process is exceeded.

    All processes of the run must call this.

    Args:
        context: The bound program.
        budget_s: The budget of this process in seconds. At least one collective is tested.
        preflight: Exchanges results between the processes.

    Returns:
        The tested collectives, in order.

    Raises:
        CommplanError: CP0856 on all processes if a rank receives a wrong result; CP0855 if a process does not
            answer.
    """
    begun, checked = time.perf_counter(), list[Checked]()
    for candidate in candidates(context):
        seconds, wrong = _run(context, candidate)
        answers = preflight.exchange(Answer(budget_s - (time.perf_counter() - begun), wrong)).values()
        mistakes = [text for each in answers for text in each.wrong]
        if mistakes:
            _refuse(candidate, mistakes, context.schedule.file)
        checked.append(Checked(candidate.text, place_of(candidate.scope), seconds))
        if min(each.left_s for each in answers) < 0:
            break
    return checked


def candidates(context: Context) -> list[CheckedCollective]:
    """The distinct collectives of all phases over more than one rank, those with the most bytes first.

    Collectives are equal if they differ only in their place in the plan and in the names of values.
    """
    distinct: dict[Any, CheckedCollective] = {}
    for phase in context.schedule.phases:
        lowered = context.lower(phase)
        for op in lowered.ops:
            if isinstance(op, ir.Collective) and context.backend.ways(op.axes) > 1:
                for candidate in _leaves(op, phase.name, lowered.values[op.operand], context.backend):
                    key = replace(
                        candidate.op, result="", operand="", stages=(), span=_NOWHERE, nbytes=0, after=()
                    )
                    distinct.setdefault((key, *candidate[2:]), candidate)
    return sorted(distinct.values(), key=lambda each: -each.size * each.dtype.nbytes)


def _leaves(
    op: ir.Collective, phase: str, operand: ir.Value, backend: Backend
) -> Iterator[CheckedCollective]:
    """The collective of each leaf of `operand` that can be tested.

    Three kinds are left out: leaves that need no collective, dtypes that JAX lacks in its present
    configuration, and arrays with more elements than `_MOST`.
    """
    ways = backend.ways(op.axes)
    for leaf in operand.leaves:
        collective = on_leaf(op, leaf, ways, is_array=operand.kind == "array")
        if collective is None:
            continue
        leaf_op, size = collective
        is_native = str(jax.dtypes.canonicalize_dtype(leaf.dtype.numpy_name)) == leaf.dtype.numpy_name
        if is_native and size * (ways if op.kind == "all_gather" else 1) <= _MOST:
            yield CheckedCollective(leaf_op, phase, leaf.dtype, size)


def _run(context: Context, candidate: CheckedCollective) -> tuple[float, tuple[str, ...]]:
    """Run a collective twice. Returns the seconds of the second run, and the wrong results of local ranks."""
    backend, machine, axes = context.backend, context.machine, tuple(context.sizes)

    def body() -> tuple[Array, Array]:
        with jax.named_scope(candidate.scope):
            return _compare(candidate, backend, axes)

    spec = PartitionSpec(axes)
    step = jax.jit(machine.spread(body, (), (spec, spec)))
    with jax.disable_jit(False), machine.context():
        jax.block_until_ready(step())  # Compiles.
        begun = time.perf_counter()
        counts, values = jax.block_until_ready(step())
        seconds = time.perf_counter() - begun
    wrong: list[str] = []
    for counted, valued in zip(counts.addressable_shards, values.addressable_shards, strict=True):
        rank, number, first = (int(x) for x in jax.device_get(counted.data).reshape(-1))
        received, expected = (float(x) for x in jax.device_get(valued.data).reshape(-1))
        if number:
            wrong.append(
                f"rank {rank}: {number} elements are wrong, the first is element {first}:"
                f" {received:g}, expected {expected:g}"
            )
    return seconds, tuple(wrong)


def _compare(candidate: CheckedCollective, backend: Backend, axes: tuple[str, ...]) -> tuple[Array, Array]:
    """Run the collective on one rank, and compare its result.

    Returns:
        i32[1, 3]: the rank, the number of wrong elements, and the index of the first wrong element.
        f32[1, 2]: that element, and its expected value.
    """
    op, dtype = candidate.op, jnp.dtype(candidate.dtype.numpy_name)
    rank = jnp.asarray(backend.index(axes), jnp.int32)
    mine = _pattern(rank, jnp.arange(candidate.size, dtype=jnp.int32))
    operand = backend.varying(_as(mine, dtype), op.axes)
    finish = backend.start(operand, op)
    received = (finish() if finish is not None else backend.move(operand, op)).reshape(-1)
    expected = _as(_expected(op, backend, axes, candidate.size, received.size, dtype), dtype)
    received, expected = (x.astype(jnp.float32) for x in (received, expected))
    # A reduction of n floats rounds at most n times.
    rounding = float(jnp.finfo(dtype).eps) * backend.ways(op.axes) if candidate.dtype.is_float else 0.0
    close = jnp.abs(received - expected) <= rounding * jnp.abs(expected)
    if op.kind == "reduce":  # The result on other ranks than the root is unspecified.
        close |= jnp.asarray(backend.index(op.axes)) != op.root
    first = jnp.argmin(close)  # The first False.
    counts = jnp.stack([rank, jnp.sum(~close, dtype=jnp.int32), first.astype(jnp.int32)])
    values = jnp.stack([received[first], expected[first]])
    return backend.varying(counts[None], axes), backend.varying(values[None], axes)


def _pattern(rank: Array, element: Array) -> Array:
    """The operand of `rank` at index `element`, i32: whole numbers from 0 to 6.

    Ranks that are equal modulo `_PERIOD` have different strides, so that few ranks have equal data.
    """
    return (element % _PERIOD * (1 + rank // _PERIOD % (_PERIOD - 1)) + rank) % _PERIOD


def _as(numbers: Array, dtype: Any) -> Array:
    """`numbers` in another dtype; odd numbers are True."""
    return numbers % 2 != 0 if dtype == jnp.bool_ else numbers.astype(dtype)


def _expected(
    op: ir.Collective, backend: Backend, axes: tuple[str, ...], size: int, result_size: int, dtype: Any
) -> Array:
    """The expected result of this rank, i32[result_size], if each rank sends `_pattern`, i32[size].

    Args:
        op: The collective.
        backend: The backend, for the position of this rank.
        axes: All axes of the plan.
        size: The number of elements of the operand.
        result_size: The number of elements of the result.
        dtype: The dtype of both. Sums and maxima of booleans are disjunctions, minima are conjunctions.
    """
    # `members` are the ranks of this rank's group, in order, as numbers over all axes.
    ways, me = backend.ways(op.axes), jnp.asarray(backend.index(op.axes), jnp.int32)
    sizes = {axis: backend.sizes[axis] for axis in axes}
    offsets = jnp.asarray(group(dict.fromkeys(axes, 0), op.axes, sizes), jnp.int32)
    members = jnp.asarray(backend.index(axes), jnp.int32) - offsets[me] + offsets
    at, block = jnp.arange(result_size, dtype=jnp.int32), size // ways
    if op.op is not None:  # Reduce one period of the data, and repeat it.
        terms = _pattern(members[:, None], jnp.arange(_PERIOD, dtype=jnp.int32)[None, :])
        if dtype == jnp.bool_:
            terms, how = terms % 2, "min" if op.op == "min" else "max"
        else:
            how = op.op
        period = {"sum": jnp.sum, "max": jnp.max, "min": jnp.min}[how](terms, 0)
        start = me * block if op.kind == "reduce_scatter" else 0
        return period[(start % _PERIOD + at % _PERIOD) % _PERIOD]
    match op.kind:
        case "all_gather":
            return _pattern(members[at // size], at % size)
        case "all_to_all" | "swap":
            return _pattern(members[at // block], me * block + at % block)
        case "shift":
            return _pattern(members[(me - (op.root or 0)) % ways], at)
        case _:
            return _pattern(members[op.root or 0], at)


def _refuse(candidate: CheckedCollective, wrong: list[str], file: str) -> None:
    """Raise CP0856 with the descriptions `wrong`."""
    more = f"and {len(wrong) - _SHOWN} more ranks" if len(wrong) > _SHOWN else ""
    fail(
        "CP0856",
        f"{candidate.text} returns wrong results for phase `{candidate.phase}`",
        *wrong[:_SHOWN],
        *([more] if more else []),
        "the collective was tested on known data before the first step; the cause is outside of the plan:"
        " the library of collectives, MPI, a driver, the network, or memory",
        span=candidate.op.span,
        file=file,
    )
