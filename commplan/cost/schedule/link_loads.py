"""Bytes on every link of a machine in one run of a phase, for up to a few hundred ranks.

`CollectiveTime.nbytes` has the bytes on the busiest link of each level; here every member has separate
numbers. Programs are followed transfer by transfer. Library collectives are treated as the algorithm that
they are predicted as.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple, cast

import numpy as np

from commplan.collectives import registry
from commplan.collectives.program import Kind
from commplan.cost.collective import nccl
from commplan.cost.collective.cost import CostKind, library_algorithm, stages_of
from commplan.cost.network.network import Floats, Layout, Network
from commplan.cost.schedule.predictor import Predictor
from commplan.cost.schedule.requests import LinkLoads, link_bytes, request_traffic
from commplan.ir.collective_kinds import GATHERING
from commplan.ir.ops.base import Work
from commplan.ir.plan import Algorithm
from commplan.ir.schedule import Phase, Schedule, results
from commplan.protocol.build_sites import sites

COUNTED = 512  # maximum number of ranks of a collective whose transfers are followed
PAIRS = 2**20  # maximum number of pairs of ranks, over all groups of a collective; also of places


class _Flat(NamedTuple):
    """One collective with one flat algorithm.

    Attributes:
        algorithm: A chunk program, `nccl` and an algorithm of NCCL, or "" for `all_to_all` and `shift`.
        kind: The kind of collective.
        layout: The groups of ranks.
        nbytes: Bytes of the whole buffer, as in `CollectiveQuery`.
        root: The index of the root in its group; for a `shift`, the distance to the destination.
    """

    algorithm: str
    kind: CostKind
    layout: Layout
    nbytes: float
    root: int


def link_loads(schedule: Schedule, phase: Phase, predictor: Predictor) -> list[LinkLoads] | None:
    """Bytes on every link of the machine in one run of `phase`.

    Args:
        schedule: The schedule.
        phase: One of its phases.
        predictor: The machine, with the places of ranks and servers.

    Returns:
        For each level, innermost first, the bytes up and down on the link of each member. None for a machine
        with more than `PAIRS` places, and for a collective with more than `COUNTED` ranks in a group or
        `PAIRS` pairs of ranks.
    """
    network = predictor.network
    if network.places > PAIRS:
        return None
    members = [network.places // stride for stride in network.strides]
    totals: list[LinkLoads] = [(np.zeros(count), np.zeros(count)) for count in members]
    all_sites = sites(schedule)
    site_of = {site.result: site for site in all_sites.all if site.phase == phase.name}
    nbytes = {value.id: value.nbytes for value in (*schedule.entry, *phase.values)}
    collectives: dict[_Flat, float] = {}  # bytes of the whole buffers, by collective with `nbytes` 1
    for op in phase.ops:
        site = site_of.get(next(iter(results(op)), ""))
        if site is not None:
            servers = predictor.servers[site.first : site.first + site.servers]
            _add(totals, link_bytes(request_traffic(site, all_sites), predictor.workers, servers, network))
            continue
        work = op.work(nbytes, lambda axes: predictor.layout(axes).ranks)
        if work.kind in ("copy", "call"):
            continue
        for flat in _flats(work, predictor):
            key = flat._replace(nbytes=1.0)
            collectives[key] = collectives.get(key, 0.0) + flat.nbytes
    for flat, size in collectives.items():
        if flat.layout.ranks > COUNTED or flat.layout.groups.size * flat.layout.ranks > PAIRS:
            return None
        _add(totals, _loads(flat, size, network))
    return totals


def _add(totals: list[LinkLoads], loads: Iterable[LinkLoads]) -> None:
    """Add the loads of each level to `totals`, in place."""
    for total, load in zip(totals, loads, strict=True):
        total[0][:] += load[0]
        total[1][:] += load[1]


def _flats(work: Work, predictor: Predictor) -> Iterator[_Flat]:
    """The flat collectives of the collective of an op. `work.nbytes` are those of one rank's operand."""
    layout = predictor.layout(work.axes, native=work.algorithm.name == "native")
    is_gather = work.kind in GATHERING
    nbytes = work.nbytes * (layout.ranks if is_gather else 1)
    yield from _split(work.algorithm, cast("CostKind", work.kind), layout, nbytes, predictor, work.root)


def _split(
    algorithm: Algorithm, kind: CostKind, layout: Layout, nbytes: float, predictor: Predictor, root: int
) -> Iterator[_Flat]:
    """The flat collectives that a collective consists of; none for groups of one rank.

    A hierarchy consists of those of its stages. `nbytes` are those of the whole buffer.
    """
    network = predictor.network
    if layout.ranks == 1:
        return
    if kind in ("all_to_all", "shift"):
        yield _Flat("", kind, layout, nbytes, root)
    elif algorithm.name == "hierarchical":
        for stage in stages_of(algorithm, kind, layout, network, root) or ():
            size = nbytes * stage.share
            yield from _split(stage.algorithm, stage.kind, stage.layout, size, predictor, stage.root)
    elif algorithm.name == "native":
        name = library_algorithm(kind, layout, nbytes, network, root, predictor.backend)
        yield _Flat(name, kind, layout, nbytes, root)
    else:
        yield _Flat(algorithm.name, kind, layout, nbytes, root)


def _loads(flat: _Flat, nbytes: float, network: Network) -> Iterator[LinkLoads]:
    """The bytes of all groups of one collective on the links of each level, for `nbytes` of whole buffer."""
    ranks = flat.layout.ranks
    if flat.algorithm.startswith("nccl "):
        nccl_algorithm = flat.algorithm.removeprefix("nccl ")
        for up, down in nccl.link_loads(flat.kind, nccl_algorithm, flat.layout, network):
            yield up * nbytes, down * nbytes
        return
    if flat.kind == "all_to_all":
        shares = np.full((ranks, ranks), 1 / ranks)
    elif flat.kind == "shift":
        shares = np.roll(np.eye(ranks), flat.root, axis=1)
    else:
        shares = _shares(flat.algorithm, flat.kind, ranks, flat.root)
    moved = shares * nbytes
    for index, stride in enumerate(network.strides):
        up, down = np.zeros(network.places // stride), np.zeros(network.places // stride)
        units = network.units(flat.layout.groups, index)
        leaving = np.where(units[:, :, None] != units[:, None, :], moved, 0.0)
        np.add.at(up, units, leaving.sum(axis=2))
        np.add.at(down, units, leaving.sum(axis=1))
        yield up, down


@functools.lru_cache(maxsize=64)
def _shares(algorithm: str, kind: Kind, ranks: int, root: int) -> Floats:
    """The share of the whole buffer that each rank sends to each other rank; [senders, receivers]."""
    program = registry.program(algorithm, kind, ranks, root=root)
    chunks = np.zeros((ranks, ranks))
    for part in (part for transfers in program.rounds for part in transfers):
        np.add.at(chunks, (part.src, part.dst), part.count)
    return chunks / program.chunks
