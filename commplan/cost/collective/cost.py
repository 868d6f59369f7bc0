"""What a collective costs, carried out by a given algorithm: the number that passes and `simulate` go by.

Where a calibration measured the same collective on as many ranks that lie alike, its curve answers; where it
was measured with messages of the usual size alone, the model says how another size compares. Else the model
does: the rounds of the program on the links (`steps`), level by level for hierarchies. `native` is NCCL on
GPUs for which it is modelled (`nccl`). Elsewhere it stands for a library that takes the best flat algorithm
in rank order.
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
from commplan.cost.collective.stages import Stage, split, stages
from commplan.cost.network import message_simulation
from commplan.cost.network.link_traffic import Pattern, lay_out
from commplan.cost.network.network import Floats, Layout, Network, shape_of
from commplan.diagnostics import CommplanError
from commplan.ir.plan import Algorithm
from commplan.ir.schedule import Backend, Form

EXACT = 200  # messages; more are priced step by step
COMPOSED = 64  # ranks; larger hierarchies are priced stage by stage
ROUND_BY_ROUND = 512  # ranks; larger groups are priced by the formulas of the algorithms
# Of a chunk program under JAX, many operations of XLA, on machines where nothing was measured: an assumption
# for the time between its rounds. A program must be so much better to be preferred.
UNMEASURED = 1.25
NATIVE = (
    "ring", "halving_doubling", "recursive_doubling", "bruck", "pairwise", "binomial_tree", "scatter_gather",
)  # fmt: skip
NEIGHBOURS = ("ring", "chain", "torus")
USUAL_FORM: dict[Backend, Form] = {"jax": "rounds", "mpi": "call"}

Way = Form | Literal["library"]  # a library's own: dataflow, whole messages
CostKind = Kind | Literal["all_to_all", "shift"]


class CollectiveTime(msgspec.Struct, frozen=True):
    """How long a collective takes, and why.

    nbytes: of each level, innermost first, what its busiest link carries in one direction. level: the one
    whose links are busy longest. bound: seconds that no algorithm beats here. source: `model`, or `measured`
    and the date.
    """

    seconds: float
    nbytes: tuple[tuple[str, float], ...]
    level: str
    bound: float
    source: str = "model"

    @classmethod
    def of(cls, seconds: float, load: Floats, bound: float, network: Network, source: str) -> CollectiveTime:
        """load: bytes on the busiest link of each level."""
        level = network.levels[int((load / network.bandwidths).argmax())].name
        return cls(seconds, network.by_level(load), level, bound, source)


class _Query(NamedTuple):
    """What is to be predicted: see `collective_time`."""

    kind: CostKind
    layout: Layout
    nbytes: float
    network: Network
    form: Way
    chunk: int | None
    root: int
    backend: Backend


_Modelled = tuple[float, Floats]  # seconds, and bytes on the busiest link of each level


def collective_time(
    algorithm: Algorithm,
    kind: CostKind,
    layout: Layout,
    nbytes: float,
    network: Network,
    *,
    calibration: Calibration | None = None,
    backend: Backend = "jax",
    form: Form | None = None,
    chunk: int | None = None,
    root: int = 0,
) -> CollectiveTime | None:
    """The prediction for one collective, all groups of `layout` at once; None where there is no such program.

    nbytes: of the whole buffer: what every rank has after all_reduce, all_gather or broadcast, and before
    reduce, reduce_scatter, scatter (the root) or all_to_all. chunk: bytes of a message, None for unsliced
    chunks. form: None for the backend's usual one.
    """
    bound = lower_bound(kind, nbytes, layout, network, root=root)
    if layout.ranks == 1:
        return CollectiveTime.of(0.0, np.zeros(len(network.levels)), 0.0, network, "model")
    form = form or USUAL_FORM[backend]
    query = _Query(kind, layout, nbytes, network, form, chunk, root, backend)
    modelled = _modelled(algorithm, query)
    if modelled is None:
        return None
    (seconds, load), source = modelled, "model"
    if calibration is not None and _alone(layout, network):
        shape = shape_of(layout, network)
        curve, usual = (
            calibration.curve(backend, kind, str(algorithm), form, shape, size) for size in (chunk, None)
        )
        # Short messages may be faster than the bound: what is measured of links is the time of long ones.
        if curve is not None:
            seconds, source = curve.at(nbytes), f"measured {calibration.date}"
            bound = min(bound, seconds)
        elif usual is not None:
            bound = min(bound, usual.at(nbytes))
            # Only what another size of messages changes is left to the model: compared with times that were
            # measured, its own errors would make a modelled way look better than it is.
            whole = _modelled(algorithm, query._replace(chunk=None))
            if whole is not None:
                seconds *= usual.at(nbytes) / whole[0]
                source = f"model, scaled to the messages measured {calibration.date}"
        else:
            # What the model leaves out of measured algorithms is taken to be left out of the others as well.
            left_out = _left_out(query, shape, calibration, backend)
            seconds *= left_out
            source = f"model, scaled to what was measured {calibration.date}" if left_out > 1 else source
    return CollectiveTime.of(float(max(seconds, bound)), load, bound, network, source)


def _left_out(query: _Query, shape: str, calibration: Calibration, backend: Backend) -> float:
    """How many times their model algorithms of the same collective were measured to take, the least; at least
    1, and 1 if none was measured."""
    curves = tuple(
        curve
        for curve in calibration.curve_list
        if (curve.kind, curve.shape, curve.chunk) == (query.kind, shape, 0)
        and (curve.algorithm == "native" or curve.form == query.form)
        and backend == calibration.backend
    )
    return _least_ratio(curves, query._replace(chunk=None)) if curves else 1.0


@lru_cache(maxsize=1024)
def _least_ratio(curves: tuple[Curve, ...], query: _Query) -> float:
    ratios: list[float] = []
    for curve in curves:
        modelled = _modelled(Algorithm(curve.algorithm), query)
        if modelled is not None and modelled[0] > 0:
            ratios.append(curve.at(query.nbytes) / modelled[0])
    return max(1.0, min(ratios, default=1.0))


def _alone(layout: Layout, network: Network) -> bool:
    """Whether no two groups share a link: what was measured on one group holds for all."""
    if len(layout.groups) == 1:
        return True
    first = Layout(layout.groups[:1])
    shared, own = (busiest_bytes("all_gather", 1.0, each, network) for each in (layout, first))
    return bool(np.allclose(shared, own))


def _modelled(algorithm: Algorithm, query: _Query) -> _Modelled | None:
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
    # Levels overlap where a buffer is cut: of whole chunks, the first levels' messages go first everywhere.
    if query.form == "rounds" or layout.ranks > COMPOSED or native or not query.chunk:
        by_level = stages_of(algorithm, kind, layout, network, query.root)
        return None if by_level is None else _staged(by_level, query)
    try:
        return _dataflow(composed(parts.levels, kind, query.root, parts.ranks.layout, network), query)
    except CommplanError:
        return None


def _nccl(kind: Kind, query: _Query) -> tuple[nccl.NcclChoice, Floats] | None:
    """The choice of NCCL, if that is the library and modelled."""
    return nccl.choose(kind, query.nbytes, query.layout, query.network) if query.backend == "jax" else None


def _native(kind: Kind, query: _Query) -> _Modelled | None:
    chosen = _nccl(kind, query)
    if chosen is not None:
        return chosen[0].seconds(query.nbytes), chosen[1]
    return min(_library(kind, query).values(), key=lambda each: each[0], default=None)


def _library(kind: Kind, query: _Query) -> dict[str, _Modelled]:
    """What each algorithm that a library may take would cost."""
    library = query._replace(form="library", chunk=None)
    return {name: _flat(name, kind, library) for name in NATIVE if registry.supports(name, kind)}


@lru_cache(maxsize=1024)
def library_algorithm(
    kind: Kind, layout: Layout, nbytes: float, network: Network, root: int = 0, backend: Backend = "jax"
) -> str:
    """The algorithm that `native` is priced as, `nccl ring` if it is NCCL's. nbytes: of the whole buffer, as
    in `collective_time`."""
    query = _Query(kind, layout, nbytes, network, "library", None, root, backend)
    chosen = _nccl(kind, query)
    if chosen is not None:
        return f"nccl {chosen[0].algorithm}"
    priced = _library(kind, query)
    return min(priced, key=lambda name: priced[name][0])


def _flat(name: str, kind: Kind, query: _Query) -> _Modelled:
    if query.layout.ranks > ROUND_BY_ROUND:
        seconds, load = _by_formula(name, kind, query)
    else:
        seconds, load = _dataflow(laid(name, kind, query.root, query.layout, query.network), query)
    is_guess = query.backend == "jax" and query.form == "rounds" and not query.network.measured
    return seconds * (UNMEASURED if is_guess else 1), load


def _dataflow(pattern: Pattern, query: _Query) -> _Modelled:
    network, form, chunk = query.network, query.form, query.chunk
    of_chunk = query.nbytes / pattern.chunks
    if form in ("call", "split"):  # the engine cuts every message, and pieces do not wait for each other
        chunk = message(of_chunk, chunk)
    slices = max(1, math.ceil(of_chunk / chunk)) if chunk else 1
    messages = slices * sum(len(step.src) for step in pattern.steps)
    if form != "rounds" and pattern.own and not pattern.alike and messages <= EXACT:
        seconds = message_simulation.seconds(pattern, network, of_chunk, slices)
    else:
        seconds = step_model.seconds(pattern, network, of_chunk, slices, blocking=form == "rounds")
    return seconds + network.call, pattern.load * of_chunk


def least_seconds(
    name: str, kind: Kind, layout: Layout, nbytes: float, network: Network, root: int = 0
) -> float:
    """Seconds of the program `name` at least, for the bytes on its busiest link. nbytes: of the whole."""
    if not 1 < layout.ranks <= ROUND_BY_ROUND:
        return 0.0
    pattern = laid(name, kind, root, layout, network)
    return float((pattern.load * (nbytes / pattern.chunks) / network.bandwidths).max())


@lru_cache(maxsize=1024)
def laid(name: str, kind: Kind, root: int, layout: Layout, network: Network) -> Pattern:
    """The pattern of a program, laid out once."""
    return lay_out(registry.program(name, kind, layout.ranks, root=root), layout, network)


_formula = lru_cache(maxsize=256)(registry.formula)
split_of = lru_cache(maxsize=256)(split)


@lru_cache(maxsize=256)
def stages_of(
    algorithm: Algorithm, kind: Kind, layout: Layout, network: Network, root: int
) -> tuple[Stage, ...] | None:
    """The stages of a hierarchy; None where it has none on this layout."""
    parts = split_of(algorithm, layout, network)
    return None if parts is None else stages(parts, kind, root)


@lru_cache(maxsize=256)
def composed(
    levels: tuple[tuple[str, int], ...], kind: Kind, root: int, layout: Layout, network: Network
) -> Pattern:
    """A hierarchy as one program. Raises CP0739 where a level cannot do its part."""
    return lay_out(registry.hierarchical(levels, kind, root=root), layout, network)


def _by_formula(name: str, kind: Kind, query: _Query) -> _Modelled:
    """Rounds, and the busiest rank's share of the bytes, each round to a neighbour or to the far half."""
    layout, network = query.layout, query.network
    rounds, share = _formula(name, kind, layout.ranks)
    distance = 1 if name in NEIGHBOURS else layout.ranks // 2
    load, latency = _shifted(layout, network, distance)
    moved = load * float(share) * query.nbytes
    busy = float((moved / network.bandwidths).max())
    each = latency + 2 * network.overhead + (network.round if query.form == "rounds" else 0.0)
    return rounds * each + busy + network.call, moved


@lru_cache(maxsize=256)
def _shifted(layout: Layout, network: Network, distance: int) -> tuple[Floats, float]:
    """Messages on the busiest link of each level, every rank sending one `distance` on; the mean latency."""
    to = np.roll(layout.groups, -distance, axis=1)
    load = np.zeros(len(network.levels))
    latency = np.zeros(layout.groups.shape)
    for index, level in enumerate(network.levels):
        source, sink = network.units(layout.groups, index), network.units(to, index)
        crossing = source != sink
        if crossing.any():
            load[index] = np.bincount(source[crossing]).max()
        latency[crossing] = level.latency
    return load, float(latency.mean())


def _of_library(query: _Query) -> _Modelled:
    """A collective that only libraries have: every rank sends to all others, or to one, at once, and links
    are busy from the first to the last byte."""
    layout, network = query.layout, query.network
    load = busiest_bytes(query.kind, query.nbytes, layout, network, root=query.root)
    reached = np.flatnonzero(load)
    busy = float((load / network.bandwidths).max())
    latency = network.levels[int(reached[-1])].latency if len(reached) else 0.0
    messages = layout.ranks - 1 if query.kind == "all_to_all" else 1
    return network.call + messages * network.overhead + latency + network.overhead + busy, load


def _staged(stages: tuple[Stage, ...], query: _Query) -> _Modelled | None:
    """The stages of a hierarchy one after another; in calls, slices of them overlap."""
    network = query.network
    whole = [_of_stage(stage, query) for stage in stages]
    done = [each for each in whole if each is not None]
    if len(done) < len(stages):
        return None
    total = cast("Floats", np.sum([load for _, load in done], axis=0))
    calls = network.call * (len(stages) - 1)  # one call does all stages, or one jitted function
    after_another = sum(seconds for seconds, _ in done) - calls
    if query.form == "rounds" or not query.chunk:
        return after_another, total
    # One slice goes through all stages, the others follow as fast as the busiest link lets them.
    parts = max(1.0, query.nbytes * stages[0].share / stages[0].layout.ranks / query.chunk)
    first = [_of_stage(stage, query._replace(nbytes=query.nbytes / parts)) for stage in stages]
    fill = sum(each[0] for each in first if each is not None) - calls
    busy = float((total / network.bandwidths).max())
    return min(after_another, fill + busy * (1 - 1 / parts)), total


def _of_stage(stage: Stage, query: _Query) -> _Modelled | None:
    own = query._replace(kind=stage.kind, layout=stage.layout, root=stage.root)
    return _modelled(stage.algorithm, own._replace(nbytes=query.nbytes * stage.share))
