"""What a collective costs, carried out by a given algorithm: the number that passes and `simulate` go by.

Where a calibration measured the same collective on as many ranks that lie alike, its curve answers; where it
was measured with messages of the usual size alone, the model says how another size compares. Else the model
does: the rounds of the program on the links (`steps`), level by level for hierarchies. `native` stands for a
library that takes the best flat algorithm in rank order.
"""

from __future__ import annotations

import functools
import math
from typing import Literal, cast

import msgspec
import numpy as np

from commplan.collectives import registry
from commplan.collectives.layout import message
from commplan.collectives.program import Kind
from commplan.diagnostics import CommplanError
from commplan.ir.plan import Algorithm
from commplan.ir.schedule import Backend, Form
from commplan.simulate import flows, steps
from commplan.simulate.bounds import busiest_bytes, lower_bound
from commplan.simulate.calibration import Calibration
from commplan.simulate.network import Floats, Layout, Network, shape_of
from commplan.simulate.pattern import Pattern, busiest, lay_out
from commplan.simulate.stages import Stage, split, stages

EXACT = 200  # messages; more are priced step by step
COMPOSED = 64  # ranks; larger hierarchies are priced stage by stage
ROUND_BY_ROUND = 512  # ranks; larger groups are priced by the formulas of the algorithms
NATIVE = ("ring", "halving_doubling", "recursive_doubling", "bruck", "binomial_tree", "scatter_gather")
NEIGHBOURS = ("ring", "chain", "torus")
USUAL_FORM: dict[Backend, Form] = {"jax": "rounds", "mpi": "call"}

Way = Form | Literal["library"]  # a library's own: dataflow, whole messages
CostKind = Kind | Literal["all_to_all"]


class Prediction(msgspec.Struct, frozen=True):
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


def predict(
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
) -> Prediction | None:
    """The prediction for one collective, all groups of `layout` at once; None where there is no such program.

    nbytes: of the whole buffer: what every rank has after all_reduce, all_gather or broadcast, and before
    reduce, reduce_scatter, scatter (the root) or all_to_all. chunk: bytes of a message, None for unsliced
    chunks. form: None for the backend's usual one.
    """
    bound = lower_bound(kind, nbytes, layout, network, root=root)
    if layout.ranks == 1:
        return Prediction(
            0.0, tuple((level.name, 0.0) for level in network.levels), network.levels[0].name, 0.0
        )
    form = form or USUAL_FORM[backend]
    found = _modelled(algorithm, kind, layout, nbytes, network, form, chunk, root)
    if found is None:
        return None
    seconds, load = found
    busy = load / np.array([level.bandwidth for level in network.levels])
    names = [level.name for level in network.levels]
    per_level = tuple((name, float(most)) for name, most in zip(names, load, strict=True))
    level, source = names[int(busy.argmax())], "model"
    if calibration is not None and _alone(layout, network):
        shape = shape_of(layout, network)
        curve = calibration.curve(backend, kind, str(algorithm), form, shape, chunk)
        usual = calibration.curve(backend, kind, str(algorithm), form, shape, None)
        # Short messages may be faster than the bound: what is measured of links is the time of long ones.
        if curve is not None:
            seconds, source = curve.at(nbytes), f"measured {calibration.date}"
            bound = min(bound, seconds)
        elif usual is not None:
            bound = min(bound, usual.at(nbytes))
            # Only what another size of messages changes is left to the model: compared with times that were
            # measured, its own errors would make a modelled way look better than it is.
            whole = _modelled(algorithm, kind, layout, nbytes, network, form, None, root)
            if whole is not None:
                seconds *= usual.at(nbytes) / whole[0]
                source = f"model, scaled to the messages measured {calibration.date}"
    return Prediction(float(max(seconds, bound)), per_level, level, bound, source)


def _alone(layout: Layout, network: Network) -> bool:
    """Whether no two groups share a link: what was measured on one group holds for all."""
    if len(layout.groups) == 1:
        return True
    one = Layout(layout.groups[:1])
    shared, own = (busiest_bytes("all_gather", 1.0, each, network) for each in (layout, one))
    return bool(np.allclose(shared, own))


def _modelled(
    algorithm: Algorithm,
    kind: CostKind,
    layout: Layout,
    nbytes: float,
    network: Network,
    form: Way,
    chunk: int | None,
    root: int,
) -> tuple[float, Floats] | None:
    """Seconds, and bytes on the busiest link of each level."""
    if kind == "all_to_all":
        return _all_to_all(layout, nbytes, network)
    if algorithm.name == "native":
        names = [name for name in NATIVE if registry.supports(name, kind)]
        priced = [_flat(name, kind, layout, nbytes, network, "library", None, root) for name in names]
        return min(priced, key=lambda one: one[0]) if priced else None
    if algorithm.name != "hierarchical":
        if not registry.supports(algorithm.name, kind):
            return None
        return _flat(algorithm.name, kind, layout, nbytes, network, form, chunk, root)
    parts = split_of(algorithm, layout, network)
    if parts is None:
        return None
    native = any(name == "native" for name, _ in parts.levels)
    # Levels overlap where a buffer is cut: of whole chunks, the first levels' messages go first everywhere.
    if form == "rounds" or layout.ranks > COMPOSED or native or not chunk:
        found = stages_of(algorithm, kind, layout, network, root)
        return None if found is None else _staged(found, nbytes, network, form, chunk)
    try:
        pattern, load = composed(parts.levels, kind, root, parts.layout, network)
    except CommplanError:
        return None
    return _dataflow(pattern, load, nbytes, network, form, chunk)


def _flat(
    name: str,
    kind: Kind,
    layout: Layout,
    nbytes: float,
    network: Network,
    form: Way,
    chunk: int | None,
    root: int,
) -> tuple[float, Floats]:
    if layout.ranks > ROUND_BY_ROUND:
        return _by_formula(name, kind, layout, nbytes, network, form)
    pattern, load = laid(name, kind, root, layout, network)
    return _dataflow(pattern, load, nbytes, network, form, chunk)


def _dataflow(
    pattern: Pattern, load: Floats, nbytes: float, network: Network, form: Way, chunk: int | None
) -> tuple[float, Floats]:
    of_chunk = nbytes / pattern.chunks
    if form in ("call", "split"):  # the engine cuts every message, and pieces do not wait for each other
        chunk = message(of_chunk, chunk)
    slices = max(1, math.ceil(of_chunk / chunk)) if chunk else 1
    messages = slices * sum(len(step.src) for step in pattern.steps)
    if form != "rounds" and pattern.own and not pattern.alike and messages <= EXACT:
        seconds = flows.seconds(pattern, network, of_chunk, slices)
    else:
        seconds = steps.seconds(pattern, network, of_chunk, slices, blocking=form == "rounds")
    return seconds + network.call, load * of_chunk


@functools.lru_cache(maxsize=1024)
def laid(name: str, kind: Kind, root: int, layout: Layout, network: Network) -> tuple[Pattern, Floats]:
    """The pattern of a program, and chunks on the busiest link of each level."""
    pattern = lay_out(registry.program(name, kind, layout.ranks, root=root), layout, network)
    return pattern, busiest(pattern, len(network.levels))


_formula = functools.lru_cache(maxsize=256)(registry.formula)
split_of = functools.lru_cache(maxsize=256)(split)


@functools.lru_cache(maxsize=256)
def stages_of(
    algorithm: Algorithm, kind: Kind, layout: Layout, network: Network, root: int
) -> tuple[Stage, ...] | None:
    """The stages of a hierarchy on one byte."""
    parts = split_of(algorithm, layout, network)
    return None if parts is None else stages(parts, kind, 1.0, root)


@functools.lru_cache(maxsize=256)
def composed(
    levels: tuple[tuple[str, int], ...], kind: Kind, root: int, layout: Layout, network: Network
) -> tuple[Pattern, Floats]:
    """As `laid`, of a hierarchy as one program. Raises CP0739 where a level cannot do its part."""
    pattern = lay_out(registry.hierarchical(levels, kind, root=root), layout, network)
    return pattern, busiest(pattern, len(network.levels))


def _by_formula(
    name: str, kind: Kind, layout: Layout, nbytes: float, network: Network, form: Way
) -> tuple[float, Floats]:
    """Rounds, and the busiest rank's share of the bytes, each round to a neighbour or to the far half."""
    rounds, share = _formula(name, kind, layout.ranks)
    distance = 1 if name in NEIGHBOURS else layout.ranks // 2
    load, latency = _shifted(layout, network, distance)
    moved = load * float(share) * nbytes
    busy = float((moved / np.array([level.bandwidth for level in network.levels])).max())
    each = latency + 2 * network.overhead + (network.round if form == "rounds" else 0.0)
    return rounds * each + busy + network.call, moved


@functools.lru_cache(maxsize=256)
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


def _all_to_all(layout: Layout, nbytes: float, network: Network) -> tuple[float, Floats]:
    """Every rank sends a row to every other at once: links are busy from the first to the last byte."""
    load = busiest_bytes("all_to_all", nbytes, layout, network)
    reached = np.flatnonzero(load)
    busy = float((load / np.array([level.bandwidth for level in network.levels])).max())
    latency = network.levels[int(reached[-1])].latency if len(reached) else 0.0
    return network.call + (layout.ranks - 1) * network.overhead + latency + network.overhead + busy, load


def _staged(
    found: tuple[Stage, ...], nbytes: float, network: Network, form: Way, chunk: int | None
) -> tuple[float, Floats] | None:
    """The stages of a hierarchy one after another; in calls, slices of them overlap."""
    whole = [_of_stage(stage, nbytes, network, form, chunk) for stage in found]
    done = [one for one in whole if one is not None]
    if len(done) < len(found):
        return None
    total = cast("Floats", np.sum([load for _, load in done], axis=0))
    calls = network.call * (len(found) - 1)  # one call does all stages, or one jitted function
    after_another = sum(seconds for seconds, _ in done) - calls
    if form == "rounds" or not chunk:
        return after_another, total
    # One slice goes through all stages, the others follow as fast as the busiest link lets them.
    parts = max(1.0, nbytes * found[0].nbytes / found[0].layout.ranks / chunk)
    first = [_of_stage(stage, nbytes / parts, network, form, chunk) for stage in found]
    fill = sum(one[0] for one in first if one is not None) - calls
    busy = float((total / np.array([level.bandwidth for level in network.levels])).max())
    return min(after_another, fill + busy * (1 - 1 / parts)), total


def _of_stage(
    stage: Stage, nbytes: float, network: Network, form: Way, chunk: int | None
) -> tuple[float, Floats] | None:
    size = nbytes * stage.nbytes
    return _modelled(stage.algorithm, stage.kind, stage.layout, size, network, form, chunk, stage.root)
