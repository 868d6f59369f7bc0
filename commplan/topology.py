"""Topologies: the levels of a machine, read from TOML, and the placement of axes on them.

name = "h100_64"
[host]
cores = 104
names = ["n0", "n1", ..]  # in the order of their places; by default sorted by name
[[level]]                 # innermost first
name      = "gpu"
count     = 8             # places in one place of the next level
latency   = "3us"
bandwidth = "450GB/s"     # per member of the level and per direction
[backend]                 # optional, like each of its keys
devices = "h100"          # GPUs connected by NVLink: native collectives are those of NCCL
call  = "8us"             # an empty native collective
round = "7us"             # a round of a chunk program with one operation per round
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import msgspec

from commplan import io
from commplan.diagnostics import CommplanError, Diagnostic, Note, Span, did_you_mean, fail, near_note
from commplan.ir.plan import AxisKind, Plan
from commplan.ir.schedule import Axis, CompiledTopology, Spread
from commplan.tracebacks import ends_at_caller

HOSTS = ("host", "node", "server", "machine")  # names of levels whose members are hosts
DEVICES = ("a100", "h100", "h200")  # GPUs with a model of NCCL
SHOWN = 9  # most host names in a message
MOST = 2**24  # most places, and most ranks to price on them: a table of ranks then has 128 MiB
LOG = logging.getLogger("commplan.topology")  # without a handler, messages go to stderr
_BANDWIDTH = {"Mbit/s": 1e6 / 8, "Gbit/s": 1e9 / 8, "MB/s": 1e6, "GB/s": 1e9}  # units in bytes per second
_TIME = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}  # units in seconds
_announced: set[str] = set()  # lines that `announce` has logged in this process


class Level(msgspec.Struct, frozen=True):
    """One level: `count` members in each place of the next level.

    Attributes:
        name: The name, unique in the topology.
        count: The number of members, at least 1.
        latency: Seconds of an empty message between two members.
        bandwidth: Bytes per second, per member and per direction.
    """

    name: str
    count: int
    latency: float
    bandwidth: float


class Topology(msgspec.Struct, frozen=True):
    """A machine as a hierarchy of levels.

    Attributes:
        name: The name.
        levels: The levels, innermost first.
        cores: Cores per host, or None if unknown.
        hosts: The names of the hosts in the order of their places, with equally many places each; empty if
            the file does not list them.
        call: Seconds of a call into the backend, or None if unknown.
        round: Seconds of a round of a chunk program with one backend operation per round, or None if unknown.
        devices: The kind of GPU, one of `DEVICES`; None for other devices.
        memory: The bandwidth, in bytes per second, that the speed of copies and sums is derived from; None
            for that of the innermost level.
    """

    name: str
    levels: tuple[Level, ...]
    cores: int | None = None
    hosts: tuple[str, ...] = ()
    call: float | None = None
    round: float | None = None
    devices: str | None = None
    memory: float | None = None

    def compiled(self, assumed: tuple[str, ...] = ()) -> CompiledTopology:
        """The record of this topology in a schedule, with the assumptions that were made about it."""
        return CompiledTopology(self.name, self.digest, assumed)

    @property
    def digest(self) -> str:
        """The SHA-256, in hex, of the content of the topology."""
        # `memory` is only included if it is set: saved schedules have digests without it.
        fields = {key: value for key, value in msgspec.structs.asdict(self).items() if key != "memory"}
        if self.memory is not None:
            fields["memory"] = self.memory
        return hashlib.sha256(msgspec.json.encode(fields)).hexdigest()

    @property
    def places(self) -> int:
        """The number of places, each for one rank."""
        return math.prod(level.count for level in self.levels)

    @property
    def host_places(self) -> int:
        """The number of places per host.

        It follows from the list of hosts, or else from the level named like a host. Without either, a member
        of the second level is a host, or the whole machine if there is only one level.
        """
        if self.hosts:
            return max(1, self.places // len(self.hosts))
        places = 1
        for level in self.levels:
            if level.name in HOSTS:
                return places
            places *= level.count
        return self.levels[0].count

    def level(self, name: str) -> Level:
        """The level called `name`, which must exist."""
        return next(level for level in self.levels if level.name == name)


@ends_at_caller
def load_topology(path: str | Path) -> Topology:
    """Read the topology in the file at `path`. Raises CP0712 if it cannot be read or is malformed."""
    path = Path(path)
    try:
        text = io.read(path).decode()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        fail("CP0712", f"topology {path} cannot be read: {why}", file=str(path))
    return parse_topology(text, str(path))


def topology_of(plan: Plan, topology: Topology | str | Path | None = None) -> Topology | None:
    """The topology to compile `plan` for: `topology`, or else the one that the plan declares.

    Args:
        plan: the plan. The path that it declares is relative to its file.
        topology: a topology, or the path of a topology file.

    Returns:
        The topology, or None if there is neither.

    Raises:
        CommplanError: CP0712 if the file cannot be read or is malformed, at the line of the plan if the plan
            names the file.
    """
    if topology is not None:
        return load_topology(topology) if isinstance(topology, str | Path) else topology
    if plan.topology is None:
        return None
    path = Path(plan.file).parent / plan.topology.path
    with declared_in(plan):
        try:
            return load_topology(path)
        except CommplanError as error:
            if path.exists():
                raise
            names = [other.name for other in path.parent.glob("*.toml")] if path.parent.is_dir() else []
            notes = [Note(note) for note in near_note(path.name, names)]
            first = error.diagnostics[0]
            raise CommplanError(msgspec.structs.replace(first, notes=(*first.notes, *notes))) from None


@contextlib.contextmanager
def declared_in(plan: Plan) -> Generator[None]:
    """Context that adds the span of the topology declaration of `plan` to errors without a span."""
    try:
        yield
    except CommplanError as error:
        if plan.topology is None:
            raise
        located = [_declared(diagnostic, plan, plan.topology.span) for diagnostic in error.diagnostics]
        raise CommplanError(*located) from None


def _declared(diagnostic: Diagnostic, plan: Plan, span: Span) -> Diagnostic:
    """`diagnostic` with the span of the declaration, and a note with the file of the topology if needed."""
    if diagnostic.span is not None:
        return diagnostic
    file = diagnostic.file
    notes = (Note(f"in {file}"),) if file and file not in diagnostic.message else ()
    return msgspec.structs.replace(diagnostic, span=span, file=plan.file, notes=(*diagnostic.notes, *notes))


def parse_topology(text: str, file: str = "<topology>") -> Topology:
    """Parse a topology in TOML. Raises CP0712 if it is malformed."""
    return _TopologyReader(file).topology(text)


def topology_text(topology: Topology) -> str:
    """`topology` as TOML that `parse_topology` reads, with rounded numbers and without `memory`."""
    host = [f"cores = {topology.cores}"] if topology.cores is not None else []
    host += [f"names = [{', '.join(map(json.dumps, topology.hosts))}]"] if topology.hosts else []
    times = {"call": topology.call, "round": topology.round}
    backend = [f"devices = {json.dumps(topology.devices)}"] if topology.devices else []
    backend += [f'{key} = "{seconds * 1e6:.2f}us"' for key, seconds in times.items() if seconds is not None]
    lines = [f"name = {json.dumps(topology.name)}"]
    lines += ["", "[host]", *host] if host else []
    for level in topology.levels:
        lines += [
            "",
            "[[level]]",
            f"name = {json.dumps(level.name)}",
            f"count = {level.count}",
            f'latency = "{level.latency * 1e6:.2f}us"',
            f'bandwidth = "{level.bandwidth * 8 / 1e6:.2f}Mbit/s"',
        ]
    lines += ["", "[backend]", *backend] if backend else []
    return "\n".join(lines) + "\n"


@dataclasses.dataclass(frozen=True)
class _TopologyReader:
    """Parses a topology file. `file` is its name in errors, and all methods raise CP0712."""

    file: str

    def fail(self, message: str, *notes: str) -> NoReturn:
        fail("CP0712", message, *notes, file=self.file)

    def topology(self, text: str) -> Topology:  # see `parse_topology`
        try:
            content = io.decode_toml(text)
        except ValueError as error:
            self.fail(f"the topology is not valid TOML: {error}", "levels are tables of numbers and texts")
        self.known_keys(content, ("name", "host", "level", "backend"), "the topology")
        name = self.want(content, "name", str, "the topology")
        tables = self.want(content, "level", list, "the topology")
        if not tables:
            self.fail("the topology has no [[level]]", "give at least one, innermost first")
        levels = tuple(self.level(table, index) for index, table in enumerate(cast("list[Any]", tables)))
        names = [level.name for level in levels]
        for duplicate in (n for i, n in enumerate(names) if n in names[:i]):
            self.fail(f"two levels are called `{duplicate}`")
        cores, hosts = self.host(content)
        result = Topology(name, levels, cores, hosts, **self.backend(content))
        if result.places > MOST:
            counts = " x ".join(str(level.count) for level in levels)
            self.fail(f"the topology has {counts} places, and may have {MOST:,}", "give smaller counts")
        if hosts and result.places % len(hosts):
            counts = f"{result.places} places cannot be divided evenly among {len(hosts)} hosts"
            self.fail(counts, "list every host once in `names` of [host], or leave it out")
        return result

    def host(self, content: dict[str, Any]) -> tuple[int | None, tuple[str, ...]]:
        """The number of cores per host, and the names of the hosts."""
        host = content.get("host")
        if host is None:
            return None, ()
        if not isinstance(host, dict):
            self.fail("`host` is not a table", "write [host] with `cores = N`")
        table = cast("dict[str, Any]", host)
        self.known_keys(table, ("cores", "names"), "[host]")
        cores = None
        if "cores" in table or "names" not in table:
            cores = self.positive(self.want(table, "cores", int, "[host]"), "cores of [host]")
        names = cast("list[Any]", self.want(table, "names", list, "[host]")) if "names" in table else []
        for index, name in enumerate(names):
            if not isinstance(name, str) or not name or not name.isprintable() or name in names[:index]:
                self.fail(f"{name!r} in `names` of [host] is not a unique name", "a text for each host")
        return cores, tuple(names)

    def backend(self, content: dict[str, Any]) -> dict[str, Any]:
        """The seconds of a backend call and of a round, and the kind of GPU, if the file has them."""
        if "backend" not in content:
            return {}
        if not isinstance(content["backend"], dict):
            self.fail("`backend` is not a table", 'write [backend] with `call` and `round`, such as "8us"')
        table = cast("dict[str, Any]", content["backend"])
        self.known_keys(table, ("call", "round", "devices"), "[backend]")
        result: dict[str, Any] = {
            key: self.quantity(table, key, _TIME, "[backend]") for key in table if key != "devices"
        }
        if "devices" in table:
            result["devices"] = self.want(table, "devices", str, "[backend]")
            if result["devices"] not in DEVICES:
                expected = f"expected one of {', '.join(DEVICES)}; leave it out for other devices"
                self.fail(f"the devices of [backend] are {result['devices']!r}", expected)
        return result

    def level(self, table: Any, index: int) -> Level:
        label = f"level {index + 1}"
        if not isinstance(table, dict):
            self.fail(f"{label} is not a table", "write [[level]] with name, count, latency, bandwidth")
        entries = cast("dict[str, Any]", table)
        self.known_keys(entries, ("name", "count", "latency", "bandwidth"), label)
        name = self.want(entries, "name", str, label)
        label = f"level `{name}`"
        count = self.positive(self.want(entries, "count", int, label), f"count of {label}")
        latency = self.quantity(entries, "latency", _TIME, label)
        bandwidth = self.quantity(entries, "bandwidth", _BANDWIDTH, label)
        if bandwidth <= 0:
            self.fail(f"the bandwidth of {label} must be above zero")
        return Level(name, count, latency, bandwidth)

    def known_keys(self, table: Mapping[str, Any], valid: tuple[str, ...], label: str) -> None:
        """Check that `table`, called `label` in errors, has only `valid` keys."""
        for key in table:
            if key not in valid:
                self.fail(f"{label} has an unknown key `{key}`", did_you_mean(key, valid, "known:"))

    def want(self, table: Mapping[str, Any], key: str, kind: type[Any], label: str) -> Any:
        """The value of `key`, which must exist and have the type `kind`."""
        if key not in table:
            self.fail(f"{label} has no `{key}`")
        value = table[key]
        if not isinstance(value, kind) or isinstance(value, bool):
            self.fail(f"`{key}` of {label} must be of type {kind.__name__}, not {value!r}")
        if kind is str and not value.isprintable():
            self.fail(f"`{key}` of {label} is {value!r}", "write a text without control characters")
        return value

    def positive(self, value: int, label: str) -> int:
        if value < 1:
            self.fail(f"the {label} is {value}, and must be at least 1")
        if value > MOST:
            self.fail(f"the {label} is {value:.4g}, and must be at most {MOST:,}")
        return value

    def quantity(self, table: Mapping[str, Any], key: str, units: Mapping[str, float], label: str) -> float:
        """The value of `key`, a number with one of `units`, in seconds or bytes per second."""
        text = self.want(table, key, str, label)
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z/]+)\s*", text)
        if match is None or match[2] not in units:
            message = f"the {key} of {label} is {text!r}"
            self.fail(message, f"expected a number with a unit: {', '.join(units)}")
        return float(match[1]) * units[match[2]]


def natural_order(name: str) -> tuple[tuple[str, int], ...]:
    """A sort key that compares digits in names as numbers: node2 before node10."""
    return tuple((text, int(digits or -1)) for text, digits in re.findall(r"(\D*)(\d*)", name))


def hosts_in_order(topology: Topology, hosts: Sequence[str]) -> tuple[str, ...]:
    """The hosts of a job in the order of their places: as `topology` lists them, else in natural order.

    `hosts` are the host names of all ranks.
    """
    return topology.hosts or tuple(sorted(set(hosts), key=natural_order))


def assumed_hosts(topology: Topology, hosts: Sequence[str]) -> tuple[str, ...]:
    """The assumption of `places_of_hosts` as one sentence; empty if it assumes nothing.

    The order of the hosts is an assumption if there are several and `topology` lists none.
    """
    names = hosts_in_order(topology, hosts)
    if topology.hosts or len(names) < 2:
        return ()
    shown = ", ".join(names if len(names) <= SHOWN else (*names[: SHOWN - 1], "..", names[-1]))
    text = f"topology `{topology.name}` lists no hosts: they take its places in the order of their names"
    return (f"{text}, {shown}",)


def announce(plan: str, assumed: Sequence[str]) -> None:
    """Log each assumption about the machine of `plan`, once per process."""
    for text in assumed:
        line = f"commplan: plan `{plan}`: {text}"
        if line not in _announced:
            _announced.add(line)
            LOG.warning("%s", line)


def places_of_hosts(topology: Topology, hosts: Sequence[str]) -> tuple[int, ...]:
    """The place of each rank on `topology`, from the host names of the ranks.

    Hosts take places in the order of `hosts_in_order`, and the ranks of a host in their own order. If
    `topology` does not list hosts, a host has the places of one member of the host level if all ranks fit
    there. Otherwise, all places are divided evenly among the hosts.

    Args:
        topology: The topology.
        hosts: The host name of each rank.

    Raises:
        CommplanError: CP0755 for a host that is not listed, or with more ranks than places.
    """
    names = hosts_in_order(topology, hosts)
    quota = topology.host_places
    most_ranks = max(Counter(hosts).values(), default=0)
    if topology.hosts or most_ranks > quota or quota * len(names) > topology.places:
        quota = max(1, topology.places // max(1, len(names)))
    index_of = {name: index for index, name in enumerate(names)}
    occupied = Counter[str]()
    places: list[int] = []
    for host in hosts:
        if host not in index_of:
            message = f"a rank runs on host `{host}`, which topology `{topology.name}` does not list"
            fail("CP0755", message, did_you_mean(host, names, "it lists"))
        position = index_of[host] * quota + occupied[host]
        if occupied[host] >= quota or position >= topology.places:
            fail(
                "CP0755",
                f"host `{host}` runs more ranks than topology `{topology.name}` has places for it, {quota}",
                "start fewer ranks on each host, or take a topology with more places",
            )
        occupied[host] += 1
        places.append(position)
    return tuple(places)


def assign_levels(
    axes: tuple[Axis, ...], topology: Topology, mapping: Mapping[str, str], *, oversubscribe: bool = False
) -> tuple[Axis, ...]:
    """Assign levels to axes: as in `mapping`, else by name, else from the last axis on, innermost first.

    Several axes fit on a level if its count allows. Servers are separate processes that use no places; a
    server axis mapped to a level is distributed over its members.

    Args:
        axes: The axes.
        topology: The topology.
        mapping: Names of levels by axis.
        oversubscribe: Whether several ranks may share a place.

    Returns:
        The axes with their `levels`, which are empty for servers that are not mapped.

    Raises:
        CommplanError: CP0713 (more ranks than places) or CP0714 (unknown axis or level in `mapping`).
    """
    names = [level.name for level in topology.levels]
    ranked = [axis for axis in axes if axis.kind is not AxisKind.SERVER]
    _check_mapping(axes, names, mapping, topology)
    ranks = math.prod(axis.size for axis in ranked)
    if ranks > topology.places and not oversubscribe:
        fail(
            "CP0713",
            f"{ranks} ranks do not fit on topology `{topology.name}`, which has {topology.places} places",
            f"ranks: {' x '.join(f'{axis.name}={axis.size}' for axis in ranked)}",
            "take a larger topology or smaller axes, or let ranks share a place with --oversubscribe",
        )
    # The level that `mapping` or the name of an axis selects, or "".
    chosen = {axis.name: mapping.get(axis.name, axis.name if axis.name in names else "") for axis in ranked}
    room = {level.name: level.count for level in topology.levels}  # members that are still free
    spread: dict[str, tuple[Spread, ...]] = {
        axis.name: (Spread(mapping[axis.name], axis.size),)
        for axis in axes
        if axis.kind is AxisKind.SERVER and axis.name in mapping
    }
    for axis in (axis for axis in ranked if chosen[axis.name]):
        level = chosen[axis.name]
        if room[level] < axis.size and not oversubscribe:
            inside = " x ".join(f"{a.name}={a.size}" for a in ranked if chosen[a.name] == level)
            fail(
                "CP0713",
                f"{inside} does not fit on level `{level}`, which has {topology.level(level).count} places",
                "map an axis to another level with --map AXIS=LEVEL, or allow it with --oversubscribe",
            )
        room[level] = max(1, room[level] // axis.size)
        spread[axis.name] = (Spread(level, axis.size),)
    for axis in reversed(ranked):
        if not chosen[axis.name]:
            spread[axis.name] = _lay_out(names, room, axis.size)
    return tuple(msgspec.structs.replace(axis, levels=spread.get(axis.name, ())) for axis in axes)


def _lay_out(names: list[str], room: dict[str, int], size: int) -> tuple[Spread, ...]:
    """Allocate `size` ranks to free members from the innermost level outwards, and reduce `room`.

    The remainder goes to the last level, even if it does not fit there.
    """
    spreads: list[Spread] = []
    for name in names:
        if size <= 1:
            break
        allocated = min(room[name], size)
        if allocated > 1:
            spreads.append(Spread(name, allocated))
            room[name] //= allocated
            size = -(-size // allocated)
    if size > 1:
        last = spreads.pop().count if spreads and spreads[-1].level == names[-1] else 1
        spreads.append(Spread(names[-1], last * size))
    return tuple(spreads) or (Spread(names[0], 1),)


def _check_mapping(
    axes: Sequence[Axis], names: list[str], mapping: Mapping[str, str], topology: Topology
) -> None:
    """Raise CP0714 for an axis that is not in `axes`, or a level that is not in `names`."""
    axis_names = [axis.name for axis in axes]
    for axis, level in mapping.items():
        if axis not in axis_names:
            message = f"an axis `{axis}` is mapped, which the plan does not have"
            fail("CP0714", message, did_you_mean(axis, axis_names, "its axes are:"))
        if level not in names:
            message = f"topology `{topology.name}` has no level `{level}`"
            fail("CP0714", message, did_you_mean(level, names, "its levels are:"))
