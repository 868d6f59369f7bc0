"""Measure a machine: the costs of links, messages and collectives, as a `Calibration`.

Every rank calls `calibrate`. Links are measured with messages between pairs of ranks, all pairs of a level at
once if they share links. Collectives are measured by calling them as compiled programs do.
"""

from __future__ import annotations

import dataclasses
import datetime
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol, cast

import numpy as np

from commplan.collectives import registry
from commplan.collectives.algorithms import torus
from commplan.collectives.program import Kind
from commplan.cost.calibration import Calibration, Curve, MeasuredLevel
from commplan.cost.network.network import Network, one_group, shape_of
from commplan.diagnostics import CommplanError, Span, fail
from commplan.ir.collective_kinds import BLOCKED, NATIVE_KINDS, REDUCING
from commplan.ir.plan import Algorithm, Arg, AxisKind, Hints
from commplan.ir.schedule import Axis, Backend, Collective, CollectiveKind, Form, Spread
from commplan.ir.types import DType
from commplan.topology import Level, Topology, natural_order, places_of_hosts

AXIS = "ranks"  # The name of the only axis, over all ranks.
KINDS = cast("tuple[CollectiveKind, ...]", NATIVE_KINDS)  # The kinds of collectives that are measured.
# The bytes of the buffers that are measured: of the result for an all-gather, of a rank's operand for others.
SIZES = (4, 64, 1024, 4096, 8192, 16 * 1024, 32 * 1024, 128 * 1024, 512 * 1024, 2**21, 2**23, 2**26)
# A candidate that takes more than `HOPELESS` times as long as the best one at a size of `LARGE` bytes or more
# is not measured at the next size. Candidates that are slow on small buffers may be the best on larger ones.
HOPELESS = 3.0
LARGE = 128 * 1024  # Bytes.
MOST_RUNS = 25  # The most runs of each candidate at a size.
FEWEST_RUNS = 3  # Runs of each candidate at a size even if no time remains.
BURST = 32  # Small messages in a row whose CPU time is measured together.
LEAST = 3  # Sizes that are measured even if no time remains.
WORDS = 20  # Messages of one word, one after another, whose time is measured together.
WORD_NBYTES = 4  # Bytes of a word.
# Seconds of an exchange that is long enough to measure a bandwidth. Shorter ones are repeated with twice the
# size, or with four times the size below a quarter of this.
LONG_S = 0.08
SHORTEST_NBYTES = 2**16  # Bytes of the first exchange whose bandwidth is measured.
_LEAST_S = 1e-9  # Seconds that a duration has at least: differences of noisy durations may be negative.
_HERE = Span(1, 1, 1, 1)  # Measured collectives have no line.

Call = Callable[[], None]  # A measured operation; it returns after it is complete.
Pairs = Sequence[tuple[int, int]]  # Ranks that send to each other; each rank is in one pair at most.


class Fabric(Protocol):
    """Ranks that can be measured. All processes call every method, and the `Call`s that methods return."""

    @property
    def backend(self) -> Backend:
        """The backend whose collectives are measured."""
        ...

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of each rank."""
        ...

    @property
    def forms(self) -> tuple[Form, ...]:
        """The forms of programs that are measured."""
        ...

    @property
    def longest(self) -> int:
        """The most bytes of a message that measures the bandwidth of a link."""
        ...

    def gamma(self) -> float:
        """The seconds per byte of an addition in memory that exceeds the nearest caches."""
        ...

    def slowest(self, seconds: float) -> float:
        """The largest value of all processes."""
        ...

    def barrier(self) -> None:
        """Wait for all processes, if the next call does not do so itself."""
        ...

    def exchange(self, pairs: Pairs, nbytes: int, times: int) -> Call:
        """A call that exchanges `nbytes` in each direction, of all pairs at once, `times` times in a row."""
        ...

    def burst(self, pair: tuple[int, int], count: int) -> float | None:
        """The CPU seconds that the first rank of `pair` needs to send `count` small messages to the second.

        None if they cannot be measured.
        """
        ...

    def empty(self) -> Call:
        """A call into the backend that moves nothing."""
        ...

    def collective(self, op: Collective, axis: Axis, size: int) -> Call:
        """A call of the collective with `size` f32 elements on each rank."""
        ...


def calibrate(
    fabric: Fabric, topology: Topology | None = None, *, seconds: float = 120, largest: int = 2**26
) -> Calibration:
    """Measure a machine. All processes call this with the same arguments.

    Args:
        fabric: The ranks.
        topology: The machine; None for the result of `discovered`.
        seconds: About how long to measure. Links and the smallest buffers are measured in any case.
        largest: The most bytes of a buffer; see `SIZES`.

    Returns:
        The measured costs.

    Raises:
        CommplanError: CP0755 if the ranks do not fit the topology; CP0756 for a single rank.
    """
    if len(fabric.hosts) < 2:
        fail("CP0756", "a calibration needs at least two ranks", "start it with mpirun; see --help")
    machine = topology if topology is not None else discovered(fabric.hosts)
    places = places_of_hosts(machine, fabric.hosts)
    end = time.perf_counter() + seconds
    call = _typical(fabric, fabric.empty(), 50)
    spans = pairs_of_levels(machine, places)
    burst_s = fabric.burst(spans[0][1][0], BURST)
    overhead = burst_s / BURST if burst_s is not None else 0.0
    levels = tuple(measured_level(fabric, name, pairs, width, overhead, call) for name, pairs, width in spans)
    gamma = fabric.gamma()
    round_ = _round(fabric, levels, overhead, call)
    curves = _curves(fabric, machine, places, end, largest)
    return Calibration(
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        backend=fabric.backend,
        hosts=fabric.hosts,
        overhead=overhead,
        gamma=fabric.slowest(gamma),
        call=call,
        round=round_,
        levels=levels,
        curve_list=curves,
        topology=machine.name,
    )


def discovered(hosts: Sequence[str]) -> Topology:
    """A topology from the host of each rank: processes of a host, and hosts, as far as there are several.

    Its latencies and bandwidths are guesses until they are measured.
    """
    names = tuple(sorted(set(hosts), key=natural_order))
    inside = max(hosts.count(name) for name in names)
    levels: list[Level] = []
    if inside > 1 or len(names) == 1:
        levels.append(Level("process", inside, 1e-6, 1e9))
    if len(names) > 1:
        levels.append(Level("host", len(names), 5e-5, 1e8))
    return Topology("measured", tuple(levels), None, names if len(names) > 1 else ())


def pairs_of_levels(topology: Topology, places: Sequence[int]) -> list[tuple[str, Pairs, int]]:
    """Find pairs of ranks to measure each level of the network.

    Members of a level are paired, and the ranks of one member each send to a rank of the other. On the
    innermost level a member is a rank. On outer levels the pairs fill the link of a member together.

    Args:
        topology: The machine.
        places: The place of each rank in the topology.

    Returns:
        For each level that the ranks span, innermost first: its name, the pairs that cross it, and the most
        pairs that share a link.
    """
    network = Network.for_topology(topology)
    candidates: list[tuple[str, Pairs, int]] = []
    array = np.asarray(places, np.int64)
    whole = np.zeros(len(places), np.int64)  # The unit outside of the outermost level.
    for index in reversed(range(len(network.levels))):
        units = network.units(array, index)
        groups: dict[int, dict[int, list[int]]] = {}
        outer = network.units(array, index + 1) if index + 1 < len(network.levels) else whole
        for rank, (unit, parent) in enumerate(zip(units.tolist(), outer.tolist(), strict=True)):
            groups.setdefault(parent, {}).setdefault(unit, []).append(rank)
        pairs: list[tuple[int, int]] = []
        width = 1
        for members in groups.values():
            ranks = list(members.values())
            for first, second in zip(ranks[::2], ranks[1::2], strict=False):
                pairs_of_members = list(zip(first, second, strict=False))
                width = max(width, len(pairs_of_members))
                pairs += pairs_of_members
        if pairs:
            candidates.append((network.levels[index].name, pairs, width))
    return candidates[::-1]


def measured_level(
    fabric: Fabric, name: str, pairs: Pairs, width: int, overhead: float, call: float
) -> MeasuredLevel:
    """Measure a level: latency with one-word messages of one pair, bandwidth with long messages of all pairs.

    The best of several runs counts, because noise only makes a link slower.

    Args:
        fabric: The ranks.
        name: The name of the level.
        pairs: Pairs of ranks that cross the level, at least one.
        width: The number of pairs that share a link.
        overhead: The CPU seconds of a small message on one rank.
        call: The seconds of a call into the backend.

    Returns:
        The latency in seconds, and the bandwidth of a link in bytes per second in each direction.
    """
    once = call if fabric.backend == "jax" else 0.0  # JAX sends messages in a compiled function.
    words = _typical(fabric, fabric.exchange(pairs[:1], WORD_NBYTES, WORDS), 15, best=True)
    word = (words - once) / WORDS
    latency = max(word - 2 * overhead, _LEAST_S)
    nbytes = SHORTEST_NBYTES
    while True:
        duration = _typical(fabric, fabric.exchange(pairs, nbytes, 1), 3)
        if duration > LONG_S or nbytes >= fabric.longest:
            break
        nbytes *= 4 if duration < LONG_S / 4 else 2
    duration = _typical(fabric, fabric.exchange(pairs, nbytes, 1), 7, best=True) - once - word
    return MeasuredLevel(name, latency, width * nbytes / max(duration, _LEAST_S))


def _typical(fabric: Fabric, call: Call, runs: int, *, best: bool = False) -> float:
    """The median seconds of `runs` runs of `call` on the slowest process; with `best`, the fewest seconds.

    The first run, which is not counted, compiles and connects.
    """
    call()
    durations: list[float] = []
    for _ in range(runs):
        fabric.barrier()
        start = time.perf_counter()
        call()
        durations.append(time.perf_counter() - start)
    return fabric.slowest(min(durations) if best else statistics.median(durations))


def host_gamma() -> float:
    """See `Fabric.gamma`; measured in the memory of this host, with arrays of 2 MiB."""
    total, term = np.ones(2**19, np.float32), np.ones(2**19, np.float32)
    durations: list[float] = []
    for _ in range(20):
        start = time.perf_counter()
        np.add(total, term, out=total)
        durations.append(time.perf_counter() - start)
    return statistics.median(durations) / total.nbytes


def _round(fabric: Fabric, levels: Sequence[MeasuredLevel], overhead: float, call: float) -> float:
    """The seconds of a round without its message, from a ring's rounds on one word.

    If the fabric runs no rounds, that is if a program is one call, it is the time of a call.
    """
    ranks = len(fabric.hosts)
    axis = Axis(AXIS, AxisKind.REPLICA, ranks)
    if "rounds" not in fabric.forms and fabric.backend != "jax":
        return call
    op = _op("all_reduce", Algorithm("ring"), "rounds", ranks * WORD_NBYTES)
    duration = _typical(fabric, fabric.collective(op, axis, ranks), 15)
    latency = max(level.latency for level in levels)
    # The ring of an all-reduce has 2 (n - 1) rounds.
    return max(0.0, (duration - call) / (2 * (ranks - 1)) - latency - 2 * overhead)


@dataclasses.dataclass(frozen=True)
class _Candidate:
    """An algorithm and form of one collective kind, and its measurements.

    Attributes:
        algorithm: The algorithm.
        form: The form of its program.
        sizes: The bytes of the measured buffers, in increasing order.
        seconds: The seconds for each of `sizes`.
    """

    algorithm: Algorithm
    form: Form
    sizes: list[int] = dataclasses.field(default_factory=list[int])
    seconds: list[float] = dataclasses.field(default_factory=list[float])


def _curves(
    fabric: Fabric, topology: Topology, places: Sequence[int], end: float, largest: int
) -> tuple[Curve, ...]:
    """Measure collectives, small buffers first, so that each curve is complete up to some size.

    Args:
        fabric: The ranks.
        topology: The machine.
        places: The place of each rank in the topology.
        end: When to end, on `time.perf_counter`. The first `LEAST` sizes are measured in any case.
        largest: The most bytes of a buffer.
    """
    shape = shape_of(one_group(places), Network.for_topology(topology))
    axis = Axis(AXIS, AxisKind.REPLICA, len(places), _levels_of_ranks(topology, places))
    candidates = {kind: _candidates(fabric, kind, axis) for kind in KINDS}
    sizes = [size for size in SIZES if size <= largest]
    for index, size in enumerate(sizes):
        for kind_index, kind in enumerate(KINDS):
            # All ranks must agree on the time; otherwise some would call more often than others.
            remaining = fabric.slowest(end - time.perf_counter())
            if remaining <= 0 and index >= LEAST:
                break
            budget = max(0.0, remaining) / ((len(sizes) - index) * len(KINDS) - kind_index)
            _at_size(fabric, kind, candidates[kind], axis, size, budget)
    return tuple(
        Curve(kind, str(each.algorithm), each.form, shape, tuple(each.sizes), tuple(each.seconds))
        for kind, candidates_of_kind in candidates.items()
        for each in candidates_of_kind
        if each.sizes
    )


def _candidates(fabric: Fabric, kind: CollectiveKind, axis: Axis) -> list[_Candidate]:
    """The native collective, and each algorithm in each form; hierarchical ones with rings on all levels."""
    names = [
        name
        for name in registry.algorithms(cast("Kind", kind))
        if name != "torus" or min(torus.shape(axis.size)) > 1  # For a prime size it is the ring.
    ]
    candidates = [_Candidate(Algorithm("native"), fabric.forms[0])]
    for form in fabric.forms:
        candidates += [_Candidate(Algorithm(name), form) for name in names]
        if len(axis.levels) > 1:
            args = tuple(Arg("ring", spread.level) for spread in axis.levels)
            candidates.append(_Candidate(Algorithm("hierarchical", args), form))
    return candidates


def _at_size(
    fabric: Fabric, kind: CollectiveKind, candidates: list[_Candidate], axis: Axis, size: int, budget: float
) -> None:
    """Measure the median times of candidates that are not hopeless, with interleaved runs.

    Args:
        fabric: The ranks.
        kind: The kind of collective.
        candidates: Its candidates, which get the measurements. Those that cannot run are left out.
        axis: The axis over all ranks.
        size: The bytes of the buffer. They are rounded down to whole f32 elements per block, at least one.
        budget: About how many seconds to measure.
    """
    ranks = axis.size
    per_rank = size // ranks if kind == "all_gather" else size
    if kind in BLOCKED:
        per_rank = max(per_rank // (4 * ranks) * 4 * ranks, 4 * ranks if kind == "reduce_scatter" else 4)
    elements = max(1, per_rank // 4)

    # Compile.
    calls: list[tuple[_Candidate, Call]] = []
    for candidate in candidates:
        if candidate.sizes and _is_too_slow(candidate, candidates):
            continue
        try:
            op = _op(kind, candidate.algorithm, candidate.form, 4 * elements)
            call = fabric.collective(op, axis, elements)
            call()
        except CommplanError:
            continue
        calls.append((candidate, call))
    if not calls:
        return

    # Find the number of runs, which must be the same on all ranks.
    start = time.perf_counter()
    for _, call in calls:
        call()
    once = fabric.slowest(time.perf_counter() - start)
    runs = int(min(MOST_RUNS, max(FEWEST_RUNS, budget / max(once, _LEAST_S))))

    durations: list[list[float]] = [[] for _ in calls]
    for _ in range(runs):
        for (_, call), times in zip(calls, durations, strict=True):
            fabric.barrier()
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
    whole = 4 * elements * (ranks if kind == "all_gather" else 1)
    for (candidate, _), times in zip(calls, durations, strict=True):
        # Small sizes may be rounded up to the same size.
        if not candidate.sizes or candidate.sizes[-1] < whole:
            candidate.sizes.append(whole)
            candidate.seconds.append(fabric.slowest(statistics.median(times)))


def _is_too_slow(candidate: _Candidate, candidates: Sequence[_Candidate]) -> bool:
    """Whether not to measure `candidate`, which has measurements, at the next size; see `HOPELESS`.

    Native collectives are measured at all sizes.
    """
    last = max(other.sizes[-1] for other in candidates if other.sizes)
    if last < LARGE:
        return False
    at_last = [other.seconds[-1] for other in candidates if other.sizes and other.sizes[-1] == last]
    is_behind = candidate.sizes[-1] != last or candidate.seconds[-1] > HOPELESS * min(at_last)
    return is_behind and candidate.algorithm.name != "native"


def _op(kind: CollectiveKind, algorithm: Algorithm, form: Form, nbytes: int) -> Collective:
    """The collective to measure, on f32 over all ranks; nbytes: of the operand on one rank."""
    reducing = kind in REDUCING
    return Collective(
        kind=kind,
        result="y.0",
        operand="x.0",
        axes=(AXIS,),
        dtype=DType.F32,
        nbytes=nbytes,
        span=_HERE,
        op="sum" if reducing else None,
        root=0 if kind == "broadcast" else None,
        algorithm=algorithm,
        hints=Hints(),
        form=form,
    )


def _levels_of_ranks(topology: Topology, places: Sequence[int]) -> tuple[Spread, ...]:
    """The levels that the ranks span, innermost first, or none if ranks do not fill them evenly in order."""
    if list(places) != sorted(places):
        return ()
    network = Network.for_topology(topology)
    array = np.asarray(places, np.int64)
    counts = [len(set(network.units(array, index).tolist())) for index in range(len(network.levels))]
    spreads: list[Spread] = []
    inner = len(places)
    for index, level in enumerate(network.levels):
        outer = counts[index + 1] if index + 1 < len(counts) else 1
        if inner % outer:
            return ()
        if inner // outer > 1:
            spreads.append(Spread(level.name, inner // outer))
        inner = outer
    return tuple(spreads)
