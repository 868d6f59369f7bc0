"""Hypothetical machines for `commplan explain` and `simulate`: functions from a topology to a topology."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from msgspec.structs import replace

from commplan.cost import Calibration
from commplan.diagnostics import did_you_mean, fail
from commplan.topology import Topology


def scaled(topology: Topology, factors: Mapping[str, Fraction]) -> Topology:
    """Scale the bandwidth of levels. The name of the result lists the changes.

    Copies and sums take as long as on `topology`.

    Args:
        topology: the machine.
        factors: the factor for the bandwidth of each level, by name.

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
    """Scale the measured bandwidth of levels, and drop the measured curves.

    Curves are only valid for the unscaled links.
    """
    levels = tuple(
        replace(level, bandwidth=level.bandwidth * float(factors.get(level.name, 1)))
        for level in calibration.levels
    )
    return replace(calibration, levels=levels, curve_list=())


def with_room(topology: Topology, ranks: int) -> Topology:
    """Enlarge the outermost level of `topology` to have `ranks` places, if necessary.

    The result is named after the change, and lists no hosts. If the ranks fit, it is `topology` itself.
    """
    *inner, outermost = topology.levels
    inside = topology.places // outermost.count
    count = max(outermost.count, -(-ranks // inside))
    if count == outermost.count:
        return topology
    name = f"{topology.name}, {outermost.name} = {count}"
    levels = (*inner, replace(outermost, count=count))
    return replace(topology, name=name, levels=levels, hosts=())
