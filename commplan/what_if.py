"""Changed machines, to compare a plan on them: functions from a topology to a topology."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from msgspec.structs import replace

from commplan.cost import Calibration
from commplan.diagnostics import did_you_mean, fail
from commplan.topology import Topology


def scaled(topology: Topology, factors: Mapping[str, Fraction]) -> Topology:
    """`topology` with the bandwidth of levels multiplied. Its name lists the changes.

    Copies and sums take as long as on `topology`.

    Args:
        topology: the machine as it is.
        factors: what the bandwidth of a level is multiplied by, by the name of the level.

    Raises:
        CommplanError: CP0714 for a level that `topology` does not have.
    """
    names = [level.name for level in topology.levels]
    for name in factors:
        if name not in names:
            message = f"topology `{topology.name}` has no level `{name}`"
            fail("CP0714", message, did_you_mean(name, names, "its levels are:"))
    levels = tuple(
        replace(level, bandwidth=level.bandwidth * float(factors.get(level.name, 1)))
        for level in topology.levels
    )
    changes = (f"{name} x {factor}" for name, factor in factors.items())
    memory = topology.memory or topology.levels[0].bandwidth
    return replace(topology, name=", ".join((topology.name, *changes)), levels=levels, memory=memory)


def scaled_calibration(calibration: Calibration, factors: Mapping[str, Fraction]) -> Calibration:
    """`calibration` with the measured bandwidth of levels multiplied, and without the measured curves: those
    hold for the links as they are."""
    levels = tuple(
        replace(level, bandwidth=level.bandwidth * float(factors.get(level.name, 1)))
        for level in calibration.levels
    )
    return replace(calibration, levels=levels, curve_list=())


def with_room(topology: Topology, ranks: int) -> Topology:
    """`topology`, its outermost level with as many members as `ranks` need, at least those that it has."""
    *inner, outermost = topology.levels
    inside = topology.places // outermost.count
    count = max(outermost.count, -(-ranks // inside))
    if count == outermost.count:
        return topology
    name = f"{topology.name}, {outermost.name} = {count}"
    levels = (*inner, replace(outermost, count=count))
    return replace(topology, name=name, levels=levels, hosts=())
