"""Predicts the time of a collective with a given algorithm, for passes and `simulate`.

The model simulates the rounds of the program on the links (`step_model`), stage by stage for hierarchies.
`native` is NCCL on GPUs for which it is modeled (`nccl`). Elsewhere it is a library that selects the fastest
flat algorithm in rank order.

With a calibration whose measurements are of the same collective and placement of the ranks:

- If it has a curve of the same algorithm and message size, the time is that of the curve.
- If it has a curve of the algorithm for unsliced chunks only, the model scales that curve.
- If it has curves of other algorithms only, the model's time is scaled by the smallest measured error.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal, NamedTuple, cast

import msgspec
import numpy as np

from commplan.collectives import registry
from commplan.collectives.layout import message
from commplan.collectives.program import KINDS, Kind
from commplan.cost.calibration import Calibration, Curve
from commplan.cost.collective import nccl, step_model
from commplan.cost.collective.bounds import busiest_bytes, lower_bound
from commplan.cost.collective.nccl_model import NcclChoice
from commplan.cost.collective.stages import PlacedStage, split, stages
from commplan.cost.network import message_simulation
from commplan.cost.network.link_traffic import Pattern, lay_out
from commplan.cost.network.network import Floats, Layout, Network, shape_of
from commplan.diagnostics import CommplanError
from commplan.ir.plan import Algorithm
from commplan.ir.schedule import Backend, CollectiveKind, Form

EXACT = 200  # messages; programs with more are predicted step by step, not message by message
COMPOSED = 64  # ranks; larger hierarchies are predicted stage by stage, not as one program
ROUND_BY_ROUND = 512  # ranks; larger groups are predicted with the formulas of the algorithms
# A factor for chunk programs under JAX on machines without measurements: an assumption for the time between
# their rounds, which are separate operations of XLA. A program must be faster by this factor to be selected.
UNMEASURED = 1.25
# The algorithms that a library is assumed to have, if NCCL is not modeled.
NATIVE = (
    "ring", "halving_doubling", "recursive_doubling", "bruck", "pairwise", "binomial_tree", "scatter_gather",
)  # fmt: skip
# The algorithms whose ranks send only to their neighbors, for `_by_formula`.
NEIGHBOURS = ("ring", "chain", "torus")
# The default form of each backend.
USUAL_FORM: dict[Backend, Form] = {"jax": "rounds", "mpi": "call"}

# The form of a chunk program, or `library` for one inside a library: dataflow with unsliced chunks.
Way = Form | Literal["library"]
# Kinds of chunk programs, and kinds that only libraries implement.
CostKind = Kind | CollectiveKind


class CollectiveTime(msgspec.Struct, frozen=True):
    """The predicted time of a collective.

    Attributes:
        seconds: The time; at least `bound`.
        nbytes: For each level, innermost first, its name and the bytes on its busiest link in one direction.
        level: The name of the level whose links are busy longest.
        bound: A lower bound in seconds for all algorithms. It is reduced to the measured time if that is
            shorter.
        source: `model`, `measured` with the date, or `model, scaled to ..` measurements. In predictions of
            servers also `model, links measured`.
    """

    seconds: float
    nbytes: tuple[tuple[str, float], ...]
    level: str
    bound: float
    source: str = "model"

    @classmethod
    def from_load(
        cls, seconds: float, load: Floats, bound: float, network: Network, source: str
    ) -> CollectiveTime:
        """Create a time from `load` [levels], the bytes on the busiest link of each level."""
        level = network.levels[int((load / network.bandwidths).argmax())].name
        return cls(seconds, network.by_level(load), level, bound, source)


class CollectiveQuery(NamedTuple):
    """A collective to predict.

    Attributes:
        kind: The kind of collective.
        layout: The groups of ranks, which communicate at the same time.
        nbytes: Bytes of the whole buffer. This is the result of all_reduce, all_gather and broadcast on every
            rank and of gather on the root. It is the operand of reduce, reduce_scatter, all_to_all, swap and
            shift on every rank and of scatter on the root.
        network: The network.
        backend: The backend.
        form: The form; None for the default form of the backend.
        chunk: Bytes of a message; None for the default: the engine's own message size in the forms `call` and
            `split`, and whole chunks otherwise.
        root: The index of the root in its group; for a `shift`, the distance to the destination.
    """

    kind: CostKind
    layout: Layout
    nbytes: float
    network: Network
    backend: Backend = "jax"
    form: Way | None = None
    chunk: int | None = None
    root: int = 0

    @property
    def way(self) -> Way:
        """`form`, or the default form of the backend."""
        return self.form or USUAL_FORM[self.backend]


_Modeled = tuple[float, Floats]  # seconds, and bytes on the busiest link of each level


def collective_time(
    algorithm: Algorithm, query: CollectiveQuery, calibration: Calibration | None = None
) -> CollectiveTime | None:
    """Predict one collective, with all groups of its layout active at the same time.

    Args:
        algorithm: The algorithm: `native`, a flat algorithm, or `hierarchical` with its levels.
        query: The collective.
        calibration: Measured collectives; None to use only the model. The costs of links are those of
            `query.network`.

    Returns:
        The prediction, which is zero seconds for groups of one rank. None if the algorithm does not implement
        the collective, or a hierarchy does not fit the layout.
    """
    kind, layout, nbytes, network = query.kind, query.layout, query.nbytes, query.network
    backend, form, chunk, root = query.backend, cast("Form", query.way), query.chunk, query.root
    bound = lower_bound(kind, nbytes, layout, network, root=root)
    if layout.ranks == 1:
        return CollectiveTime.from_load(0.0, np.zeros(len(network.levels)), 0.0, network, "model")
    query = query._replace(form=form)
    modeled = _model(algorithm, query)
    if modeled is None:
        return None
    (seconds, load), source = modeled, "model"
    if calibration is not None and _groups_are_independent(layout, network):
        shape = shape_of(layout, network)
        curve, unsliced = (
            calibration.curve(backend, kind, str(algorithm), form, shape, size) for size in (chunk, None)
        )
        # Short messages may be faster than the bound, because the measured link costs are those of long ones.
        if curve is not None:
            seconds, source = curve.at(nbytes), f"measured {calibration.date}"
            bound = min(bound, seconds)
        elif unsliced is not None:
            bound = min(bound, unsliced.at(nbytes))
            # The model only provides the ratio between message sizes. Next to measured times, the errors
            # of its absolute times could favor a modeled algorithm.
            whole = _model(algorithm, query._replace(chunk=None))
            if whole is not None:
                seconds *= unsliced.at(nbytes) / whole[0]
                source = f"model, scaled to the messages measured {calibration.date}"
        else:
            # Costs that the model omits for measured algorithms are assumed to be omitted for others, too.
            ratio = _model_error(query, shape, calibration, backend)
            seconds *= ratio
            source = f"model, scaled to measurements of {calibration.date}" if ratio > 1 else source
    return CollectiveTime.from_load(float(max(seconds, bound)), load, bound, network, source)


def _model_error(query: CollectiveQuery, shape: str, calibration: Calibration, backend: Backend) -> float:
    """The smallest ratio of measured to modeled time among measured algorithms of the same collective.

    At least 1, and 1 without measurements.
    """
    curves = tuple(
        curve
        for curve in calibration.curve_list
        if (curve.kind, curve.shape, curve.chunk) == (query.kind, shape, 0)
        and (curve.algorithm == "native" or curve.form == query.way)
        and backend == calibration.backend
    )
    return _least_ratio(curves, query._replace(chunk=None)) if curves else 1.0


@lru_cache(maxsize=1024)
def _least_ratio(curves: tuple[Curve, ...], query: CollectiveQuery) -> float:
    ratios: list[float] = []
    for curve in curves:
        modeled = _model(Algorithm(curve.algorithm), query)
        if modeled is not None and modeled[0] > 0:
            ratios.append(curve.at(query.nbytes) / modeled[0])
    return max(1.0, min(ratios, default=1.0))


def _groups_are_independent(layout: Layout, network: Network) -> bool:
    """Whether all groups together load the busiest links no more than the first group alone.

    Measurements of one group are then valid for all of them.
    """
    if len(layout.groups) == 1:
        return True
    first = Layout(layout.groups[:1])
    shared, single = (busiest_bytes("all_gather", 1.0, each, network) for each in (layout, first))
    return bool(np.allclose(shared, single))


def _model(algorithm: Algorithm, query: CollectiveQuery) -> _Modeled | None:
    """Predict the time of an algorithm by a model; None if it does not implement the collective."""
    if query.kind not in KINDS:
        return _of_library(query)
    kind, layout, network = query.kind, query.layout, query.network
    if algorithm.name == "native":
        return _native(kind, query)
    if algorithm.name != "hierarchical":
        return _flat(algorithm.name, kind, query) if registry.supports(algorithm.name, kind) else None
    parts = split_of(algorithm, layout, network)
    if parts is None:
        return None
    native = any(name == "native" for name, _ in parts.levels)
    # Levels overlap only if the buffer is sliced: with whole chunks all ranks finish one level first.
    if query.way == "rounds" or layout.ranks > COMPOSED or native or not query.chunk:
        by_level = stages_of(algorithm, kind, layout, network, query.root)
        return None if by_level is None else _model_stages(by_level, query)
    try:
        return _dataflow(composed(parts.levels, kind, query.root, parts.ranks.layout, network), query)
    except CommplanError:
        return None


def _nccl(kind: Kind, query: CollectiveQuery) -> tuple[NcclChoice, Floats] | None:
    """NCCL's choice and its bytes by level; None if the library is not NCCL, or NCCL is not modeled."""
    return nccl.choose(kind, query.nbytes, query.layout, query.network) if query.backend == "jax" else None


def _native(kind: Kind, query: CollectiveQuery) -> _Modeled | None:
    """Predict the library's own collective; None if no algorithm of `NATIVE` supports `kind`."""
    chosen = _nccl(kind, query)
    if chosen is not None:
        return chosen[0].seconds(query.nbytes), chosen[1]
    return min(_library(kind, query).values(), key=lambda each: each[0], default=None)


def _library(kind: Kind, query: CollectiveQuery) -> dict[str, _Modeled]:
    """The predictions of all algorithms that a library may select."""
    library = query._replace(form="library", chunk=None)
    return {name: _flat(name, kind, library) for name in NATIVE if registry.supports(name, kind)}


@lru_cache(maxsize=1024)
def library_algorithm(
    kind: Kind, layout: Layout, nbytes: float, network: Network, root: int = 0, backend: Backend = "jax"
) -> str:
    """The algorithm that `native` is predicted as: `nccl ring` for NCCL, `ring` for other libraries.

    `nbytes` and `root` are those of `CollectiveQuery`.
    """
    query = CollectiveQuery(kind, layout, nbytes, network, backend, "library", root=root)
    chosen = _nccl(kind, query)
    if chosen is not None:
        return f"nccl {chosen[0].algorithm}"
    predicted = _library(kind, query)
    return min(predicted, key=lambda name: predicted[name][0])


def _flat(name: str, kind: Kind, query: CollectiveQuery) -> _Modeled:
    """Predict a flat algorithm, which must support `kind`."""
    if query.layout.ranks > ROUND_BY_ROUND:
        seconds, load = _by_formula(name, kind, query)
    else:
        seconds, load = _dataflow(pattern_of(name, kind, query.root, query.layout, query.network), query)
    is_guess = query.backend == "jax" and query.way == "rounds" and not query.network.measured
    return seconds * (UNMEASURED if is_guess else 1), load


def _dataflow(pattern: Pattern, query: CollectiveQuery) -> _Modeled:
    """Predict one program by simulation: message by message for few messages, else step by step."""
    network, form, chunk = query.network, query.way, query.chunk
    of_chunk = query.nbytes / pattern.chunks
    if form in ("call", "split"):  # the engine slices every message, and pieces proceed independently
        chunk = message(of_chunk, chunk)
    slices = max(1, math.ceil(of_chunk / chunk)) if chunk else 1
    messages = slices * sum(len(traffic.src) for traffic in pattern.rounds)
    if form != "rounds" and pattern.is_single_group and not pattern.alike and messages <= EXACT:
        seconds = message_simulation.seconds(pattern, network, of_chunk, slices)
    else:
        seconds = step_model.seconds(pattern, network, of_chunk, slices, blocking=form == "rounds")
    return seconds + network.call, pattern.load * of_chunk


def least_seconds(
    name: str, kind: Kind, layout: Layout, nbytes: float, network: Network, root: int = 0
) -> float:
    """A lower bound on the seconds of program `name`, from the bytes on its busiest link.

    It is 0 for one rank and for more than `ROUND_BY_ROUND` ranks. `nbytes` and `root` are those of
    `CollectiveQuery`.
    """
    if not 1 < layout.ranks <= ROUND_BY_ROUND:
        return 0.0
    pattern = pattern_of(name, kind, root, layout, network)
    return float((pattern.load * (nbytes / pattern.chunks) / network.bandwidths).max())


@lru_cache(maxsize=1024)
def pattern_of(name: str, kind: Kind, root: int, layout: Layout, network: Network) -> Pattern:
    """The traffic of a flat program on a layout; cached."""
    return lay_out(registry.program(name, kind, layout.ranks, root=root), layout, network)


_formula = lru_cache(maxsize=256)(registry.formula)  # cached: a search tries the same programs many times
split_of = lru_cache(maxsize=256)(split)  # cached for the same reason


@lru_cache(maxsize=256)
def stages_of(
    algorithm: Algorithm, kind: Kind, layout: Layout, network: Network, root: int
) -> tuple[PlacedStage, ...] | None:
    """The stages of a hierarchy; None if it does not fit the layout or a level does not support its stage."""
    parts = split_of(algorithm, layout, network)
    return None if parts is None else stages(parts, kind, root)


@lru_cache(maxsize=256)
def composed(
    levels: tuple[tuple[str, int], ...], kind: Kind, root: int, layout: Layout, network: Network
) -> Pattern:
    """The traffic of a hierarchy as one program.

    Args:
        levels: The algorithm and the number of ranks of each level, innermost first.
        kind: The kind of collective.
        root: The index of the root in its group.
        layout: The ranks in the order of `registry.hierarchical`.
        network: The network.

    Raises:
        CommplanError: CP0739 if a level does not support its stage, or is `native`.
    """
    return lay_out(registry.hierarchical(levels, kind, root=root), layout, network)


def _by_formula(name: str, kind: Kind, query: CollectiveQuery) -> _Modeled:
    """Predict an algorithm from its number of rounds and the bytes of its busiest rank.

    All rounds are assumed to have the same distance: 1 for algorithms of `NEIGHBOURS`, and half of the ranks
    for others.
    """
    layout, network = query.layout, query.network
    rounds, share = _formula(name, kind, layout.ranks)
    distance = 1 if name in NEIGHBOURS else layout.ranks // 2
    load, latency = _shift_load(layout, network, distance)
    moved = load * float(share) * query.nbytes
    busy = float((moved / network.bandwidths).max())
    round_seconds = latency + 2 * network.overhead + (network.round if query.way == "rounds" else 0.0)
    return rounds * round_seconds + busy + network.call, moved


@lru_cache(maxsize=256)
def _shift_load(layout: Layout, network: Network, distance: int) -> tuple[Floats, float]:
    """The traffic if every rank sends one message to the rank `distance` places further.

    Returns:
        The number of messages on the busiest link of each level [levels], and the mean latency in seconds.
    """
    destination = np.roll(layout.groups, -distance, axis=1)
    load = np.zeros(len(network.levels))
    latency = np.zeros(layout.groups.shape)
    for index, level in enumerate(network.levels):
        source = network.units(layout.groups, index)
        sink = network.units(destination, index)
        crossing = source != sink
        if crossing.any():
            load[index] = np.bincount(source[crossing]).max()
        latency[crossing] = level.latency
    return load, float(latency.mean())


def _of_library(query: CollectiveQuery) -> _Modeled:
    """Predict a collective that only libraries implement: `all_to_all` or `shift`.

    All ranks send at the same time, to all others or to one. Links are busy from the first to the last byte.
    """
    layout, network = query.layout, query.network
    load = busiest_bytes(query.kind, query.nbytes, layout, network, root=query.root)
    reached = np.flatnonzero(load)
    busy = float((load / network.bandwidths).max())
    latency = network.levels[int(reached[-1])].latency if len(reached) else 0.0
    messages = layout.ranks - 1 if query.kind == "all_to_all" else 1
    return network.call + messages * network.overhead + latency + network.overhead + busy, load


def _model_stages(stages: tuple[PlacedStage, ...], query: CollectiveQuery) -> _Modeled | None:
    """Predict the stages of a hierarchy one after the other; None if one of them cannot be predicted.

    In forms other than `rounds`, the slices of a sliced buffer overlap.
    """
    network = query.network
    modeled = [_of_stage(stage, query) for stage in stages]
    complete = [each for each in modeled if each is not None]
    if len(complete) < len(stages):
        return None
    total = cast("Floats", np.sum([load for _, load in complete], axis=0))
    calls = network.call * (len(stages) - 1)  # all stages are one call, or one jitted function
    sequential = sum(seconds for seconds, _ in complete) - calls
    if query.way == "rounds" or not query.chunk:
        return sequential, total
    # One slice goes through all stages; the others follow at the rate of the busiest link.
    parts = max(1.0, query.nbytes * stages[0].share / stages[0].layout.ranks / query.chunk)
    first = [_of_stage(stage, query._replace(nbytes=query.nbytes / parts)) for stage in stages]
    fill = sum(each[0] for each in first if each is not None) - calls
    busy = float((total / network.bandwidths).max())
    return min(sequential, fill + busy * (1 - 1 / parts)), total


def _of_stage(stage: PlacedStage, query: CollectiveQuery) -> _Modeled | None:
    """Predict one stage of a hierarchy with the buffer, form and message size of `query`."""
    stage_query = query._replace(kind=stage.kind, layout=stage.layout, root=stage.root)
    return _model(stage.algorithm, stage_query._replace(nbytes=query.nbytes * stage.share))
