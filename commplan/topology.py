"""Topologies: the levels of a machine, read from TOML, and how axes are placed on them.

name = "h100_64"
[host]
cores = 104
names = ["n0", "n1", ..]  # may be left out: hosts in the order of their places
[[level]]                 # innermost first
name      = "gpu"
count     = 8             # places inside one place of the next level
latency   = "3us"
bandwidth = "450GB/s"     # per member of the level and per direction
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from commplan import files
from commplan.diagnostics import fail
from commplan.ir.plan import AxisKind
from commplan.ir.schedule import Axis, Spread

HOSTS = ("host", "node", "server", "machine")  # what levels are called whose members are hosts
_BANDWIDTH = {"Mbit/s": 1e6 / 8, "Gbit/s": 1e9 / 8, "MB/s": 1e6, "GB/s": 1e9}
MOST = 2**31 - 1  # places: ranks are numbered in 32 bits, MPI's among them
_TIME = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


class Level(msgspec.Struct, frozen=True):
    """One level: `count` members inside each place of the level outside.

    latency: seconds. bandwidth: bytes a second, per member and per direction.
    """

    name: str
    count: int
    latency: float
    bandwidth: float


class Topology(msgspec.Struct, frozen=True):
    """Levels, innermost first; `cores` are those of one host, None where unknown.

    hosts: the names of the hosts, in the order of their places, of which each has equally many; empty where
    the file does not list them.
    """

    name: str
    levels: tuple[Level, ...]
    cores: int | None = None
    hosts: tuple[str, ...] = ()

    @property
    def places(self) -> int:
        return math.prod(level.count for level in self.levels)

    @property
    def host_places(self) -> int:
        """How many places lie in one host: as the names of the hosts say; else the members of the level that
        is called host or node; else those of the innermost level, one host where there is no other."""
        if self.hosts:
            return max(1, self.places // len(self.hosts))
        places = 1
        for level in self.levels:
            if level.name in HOSTS:
                return places
            places *= level.count
        return self.levels[0].count

    def level(self, name: str) -> Level:
        return next(level for level in self.levels if level.name == name)


def load_topology(path: str | Path) -> Topology:
    """The topology in the file at `path`. Raises CP0712 where it cannot be read or is malformed."""
    place = Path(path)
    try:
        text = files.read(place).decode("utf-8")
    except (OSError, ValueError) as error:
        fail("CP0712", f"topology {place} cannot be read: {error}", file=str(place))
    return parse_topology(text, str(place))


def parse_topology(text: str, file: str = "<topology>") -> Topology:
    """The topology that `text` (TOML) describes; CP0712 names what is wrong."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        fail("CP0712", f"the topology is no TOML: {error}", file=file)
    except RecursionError:
        fail("CP0712", "the topology is nested too deep", "levels are tables of numbers and texts", file=file)
    _known_keys(content, ("name", "host", "level"), "the topology", file)
    name = _want(content, "name", str, "the topology", file)
    tables = _want(content, "level", list, "the topology", file)
    if not tables:
        fail("CP0712", "the topology has no [[level]]", "give at least one, innermost first", file=file)
    levels = tuple(_level(table, index, file) for index, table in enumerate(cast("list[Any]", tables)))
    names = [level.name for level in levels]
    for twice in (n for i, n in enumerate(names) if n in names[:i]):
        fail("CP0712", f"two levels are called `{twice}`", file=file)
    cores, hosts = _host(content, file)
    made = Topology(name, levels, cores, hosts)
    if made.places > MOST:
        what = " x ".join(str(level.count) for level in levels)
        fail(
            "CP0712",
            f"the topology has {what} places, and may have {MOST:,}",
            "give smaller counts",
            file=file,
        )
    if hosts and made.places % len(hosts):
        what = f"{len(hosts)} hosts cannot have equally many of the {made.places} places"
        fail("CP0712", what, "list every host once in `names` of [host], or leave it out", file=file)
    return made


def _host(content: dict[str, Any], file: str) -> tuple[int | None, tuple[str, ...]]:
    """Cores of a host, and the names of the hosts."""
    host = content.get("host")
    if host is None:
        return None, ()
    if not isinstance(host, dict):
        fail("CP0712", "`host` is no table", "write [host] with `cores = N`", file=file)
    table = cast("dict[str, Any]", host)
    _known_keys(table, ("cores", "names"), "[host]", file)
    cores = None
    if "cores" in table or "names" not in table:
        cores = _positive(_want(table, "cores", int, "[host]", file), "cores of [host]", file)
    names = cast("list[Any]", _want(table, "names", list, "[host]", file)) if "names" in table else []
    for index, name in enumerate(names):
        if not isinstance(name, str) or not name or not name.isprintable() or name in names[:index]:
            fail(
                "CP0712",
                f"{name!r} in `names` of [host] is no name of its own",
                "a text for each host",
                file=file,
            )
    return cores, tuple(names)


def _level(table: Any, index: int, file: str) -> Level:
    what = f"level {index + 1}"
    if not isinstance(table, dict):
        fail(
            "CP0712", f"{what} is no table", "write [[level]] with name, count, latency, bandwidth", file=file
        )
    entries = cast("dict[str, Any]", table)
    _known_keys(entries, ("name", "count", "latency", "bandwidth"), what, file)
    name = _want(entries, "name", str, what, file)
    what = f"level `{name}`"
    count = _positive(_want(entries, "count", int, what, file), f"count of {what}", file)
    latency = _quantity(_want(entries, "latency", str, what, file), _TIME, f"latency of {what}", file)
    bandwidth = _quantity(
        _want(entries, "bandwidth", str, what, file), _BANDWIDTH, f"bandwidth of {what}", file
    )
    if bandwidth <= 0:
        fail("CP0712", f"the bandwidth of {what} must be above zero", file=file)
    return Level(name, count, latency, bandwidth)


def _known_keys(table: Mapping[str, Any], known: tuple[str, ...], what: str, file: str) -> None:
    for key in table:
        if key not in known:
            fail("CP0712", f"{what} has an unknown key `{key}`", _hint(key, known, "known:"), file=file)


def _want(table: Mapping[str, Any], key: str, kind: type[Any], what: str, file: str) -> Any:
    if key not in table:
        fail("CP0712", f"{what} has no `{key}`", file=file)
    value = table[key]
    if not isinstance(value, kind) or isinstance(value, bool):
        fail("CP0712", f"`{key}` of {what} must be of type {kind.__name__}, not {value!r}", file=file)
    if kind is str and not value.isprintable():
        fail(
            "CP0712", f"`{key}` of {what} is {value!r}", "write a text without control characters", file=file
        )
    return value


def _positive(value: int, what: str, file: str) -> int:
    if value < 1:
        fail("CP0712", f"the {what} is {value}, and must be at least 1", file=file)
    if value > MOST:
        fail("CP0712", f"the {what} is {value:.4g}, and must be at most {MOST:,}", file=file)
    return value


def _quantity(text: str, units: Mapping[str, float], what: str, file: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z/]+)\s*", text)
    if match is None or match[2] not in units:
        fail(
            "CP0712",
            f"the {what} is {text!r}",
            f"expected a number with a unit: {', '.join(units)}",
            file=file,
        )
    return float(match[1]) * units[match[2]]


def places_of_hosts(topology: Topology, hosts: Sequence[str]) -> tuple[int, ...]:
    """The place of each rank on `topology`, `hosts` being the names of the hosts that they run on, by rank.

    Where the topology lists its hosts, theirs are the places; else hosts take places in the order in which
    they appear. Raises CP0755 for a host that is not listed, and for more ranks than places.
    """
    names = topology.hosts or tuple(dict.fromkeys(hosts))
    each = max(1, topology.places // len(names)) if names else 1
    taken: dict[str, int] = {}
    found: list[int] = []
    for host in hosts:
        if host not in names:
            what = f"a rank runs on host `{host}`, which topology `{topology.name}` does not list"
            fail("CP0755", what, _hint(host, names, "it lists"))
        at = taken.get(host, 0)
        if at >= each or names.index(host) * each + at >= topology.places:
            fail(
                "CP0755",
                f"host `{host}` runs more ranks than topology `{topology.name}` has places for it, {each}",
                "start fewer ranks on each host, or take a topology with more places",
            )
        taken[host] = at + 1
        found.append(names.index(host) * each + at)
    return tuple(found)


def place(
    axes: tuple[Axis, ...], topology: Topology, mapping: Mapping[str, str], *, oversubscribe: bool = False
) -> tuple[Axis, ...]:
    """`axes` with their levels: as mapped, else by name, else laid out with the last axis innermost.

    A level holds as many axes as its count has room for. Servers are processes of their own and take no room;
    one that is mapped to a level goes round its members. Raises CP0713 (more ranks than places, unless
    `oversubscribe`) and CP0714 (unknown axis or level in `mapping`).
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
    chosen = {axis.name: mapping.get(axis.name, axis.name if axis.name in names else "") for axis in ranked}
    room = {level.name: level.count for level in topology.levels}
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
    """Take room for `size` members from the innermost level outward; what does not fit lies on the last."""
    found: list[Spread] = []
    for name in names:
        if size <= 1:
            break
        taken = min(room[name], size)
        if taken > 1:
            found.append(Spread(name, taken))
            room[name] //= taken
            size = math.ceil(size / taken)
    if size > 1:
        last = found.pop().count if found and found[-1].level == names[-1] else 1
        found.append(Spread(names[-1], last * size))
    return tuple(found) or (Spread(names[0], 1),)


def _check_mapping(
    axes: Sequence[Axis], names: list[str], mapping: Mapping[str, str], topology: Topology
) -> None:
    known = [axis.name for axis in axes]
    for axis, level in mapping.items():
        if axis not in known:
            what = f"an axis `{axis}` is mapped, which the plan does not have"
            fail("CP0714", what, _hint(axis, known, "its axes are:"))
        if level not in names:
            what = f"topology `{topology.name}` has no level `{level}`"
            fail("CP0714", what, _hint(level, names, "its levels are:"))


def _hint(name: str, known: Sequence[str], otherwise: str) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean `{near[0]}`?" if near else f"{otherwise} {', '.join(known) or 'none'}"
