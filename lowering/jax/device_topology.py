"""Derives a topology from the devices of a mesh, if neither the program nor the plan names a topology."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from commplan.diagnostics import plural
from commplan.lowering.gpu.targets import machine_topology, name_of_kind
from commplan.topology import Level, Topology, places_of_hosts

# For CPU devices:
_MEMORY = 10e9  # bytes per second between devices of a process
_MEMORY_S = 1e-6  # latency between devices of a process, in seconds
_ETHERNET = 1.25e9  # bytes per second between processes, 10 Gbit/s
_ETHERNET_S = 5e-5  # latency between processes, in seconds
# For GPUs:
_DOMAIN = 8  # maximum number of GPUs in an NVLink domain, if `slice_index` does not identify domains
_targets: dict[int, tuple[Any, str]] = {}  # of `name_devices`: by id of a client, the client and the name
# The remedy in messages about an assumed topology.
FIX = 'name the machine with topology=.. or with `topology "FILE"` in the plan'


class AssumedTopology(NamedTuple):
    """A topology that is derived from devices.

    Attributes:
        topology: The topology.
        places: The place of each rank in the topology; ranks are row-major over the axes.
        assumed: A description for users, with a remedy.
    """

    topology: Topology
    places: tuple[int, ...]
    assumed: str


def topology_of_mesh(mesh: Any, axes: Sequence[str]) -> AssumedTopology | None:
    """The levels that ranks along `axes` span, derived from the devices of `mesh`.

    Devices are grouped into machines by `slice_index`, which under CUDA is the NVLink domain, or by
    `process_index` if they are CPUs or too many for one domain. Costs are those of the data sheet of a known
    GPU, or of memory and 10 Gbit/s Ethernet for CPUs. Along axes that are not in `axes` the first index is
    used.

    Args:
        mesh: The mesh.
        axes: The axes over which ranks are counted, the first axis major.

    Returns:
        The topology; None for fewer than two devices, for CPU devices of one process, for unknown kinds of
        devices, if the mesh lacks an axis, and if machines have different numbers of devices.
    """
    devices = _devices(mesh, axes)
    hosts = [f"host{machine}" for machine in _machines_of(devices)]
    counts = set(Counter(hosts).values())
    if len(devices) < 2 or len(counts) != 1:
        return None
    (per_host,), count = counts, len(set(hosts))
    platforms = {str(device.platform) for device in devices}
    names = {_target_of(device) for device in devices}
    if platforms == {"cpu"} and count > 1:
        topology = _of_processes(count, per_host)
        each = plural(per_host, "CPU device")
        described = f"{count} processes with {each} each, joined by 10 Gbit/s with a latency of 50 us"
    elif len(names) == 1 and (name := names.pop()) is not None:
        topology = machine_topology(name, count, per_host)
        links = ", ".join(f"{level.name} {level.bandwidth / 1e9:g} GB/s" for level in topology.levels)
        described = f"{count} x {per_host} {name.upper()} with the links of data sheets ({links})"
    else:
        return None
    text = f"no topology; assumed from the mesh: {described}, not measured; {FIX}"
    return AssumedTopology(topology, places_of_hosts(topology, hosts), text)


def is_first_process(mesh: Any) -> bool:
    """Whether this is the first process of `mesh`; True for devices that are not present."""
    client = getattr(next(iter(mesh.devices.flat)), "client", None)
    return client is None or client.process_index() == min(d.process_index for d in mesh.devices.flat)


def _devices(mesh: Any, axes: Sequence[str]) -> list[Any]:
    """The device of each rank along `axes`; none if the mesh has no devices or lacks an axis."""
    grid = getattr(mesh, "devices", None)
    names = tuple(getattr(mesh, "axis_names", ()))
    if grid is None or not axes or not set(axes) <= set(names):
        return []
    order = [names.index(axis) for axis in axes]
    other_axes = [index for index in range(len(names)) if index not in order]
    ranks = grid.transpose(*order, *other_axes)
    return list(ranks[(..., *(0 for _ in other_axes))].flat)


def _machines_of(devices: Sequence[Any]) -> list[int]:
    """The number of the machine of each device: equal for devices of one machine."""
    processes = [int(device.process_index) for device in devices]
    if any(device.platform == "cpu" for device in devices):
        return processes
    domains = [getattr(device, "slice_index", None) for device in devices]
    if None in domains or (len(set(domains)) == 1 and len(devices) > _DOMAIN):
        return processes
    return [int(domain) for domain in domains if domain is not None]


def _target_of(device: Any) -> str | None:
    """The name of the GPU, as declared by `name_devices` or from the kind of the device; None if unknown."""
    client = getattr(device, "client", None)
    registered, name = _targets.get(id(client), (None, None))
    return name if client is not None and registered is client else name_of_kind(str(device.device_kind))


def name_devices(devices: Sequence[Any], name: str) -> None:
    """Declare that `devices`, which may be absent and without a kind, are GPUs `name`, such as `h100`."""
    client = devices[0].client
    _targets[id(client)] = (client, name)


def _of_processes(count: int, per_process: int) -> Topology:
    """The topology of `count` processes with `per_process` CPU devices each."""
    levels = [Level("device", per_process, _MEMORY_S, _MEMORY)] if per_process > 1 else []
    levels.append(Level("host", count, _ETHERNET_S, _ETHERNET))
    return Topology(f"cpu_{count}x{per_process}", tuple(levels))
