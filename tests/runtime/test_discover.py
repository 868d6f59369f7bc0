"""Racks are found from the bandwidth between pairs of hosts, here on made networks."""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from commplan.cli import main
from commplan.diagnostics import CommplanError
from commplan.runtime.calibrate.calibrate import Pairs
from commplan.runtime.calibrate.discover import discover, racks_of, tournament
from commplan.topology import Level, Topology, parse_topology, topology_text
from tests.runtime.test_calibrate import Made


class Racks(Made):
    """A network of racks: pairs across racks share the uplinks of both, and all rates have some noise."""

    longest = 2**24

    def __init__(
        self, rack_of: dict[str, int], *, ranks: int = 1, host: float = 24e6, uplink: float = 24e6
    ) -> None:
        names = [name for name in rack_of for _ in range(ranks)]
        random.Random(7).shuffle(names)
        super().__init__(*names)
        self.rack_of, self.host, self.uplink, self.noise = rack_of, host, uplink, random.Random(3)

    def timed(self, pairs: Pairs, nbytes: int, runs: int) -> list[float]:
        del runs
        hosts = [(self.hosts[a], self.hosts[b]) for a, b in pairs]
        shares = Counter(host for pair in hosts for host in pair)
        crossing = [(self.rack_of[a], self.rack_of[b]) for a, b in hosts]
        loads = Counter(rack for a, b in crossing if a != b for rack in (a, b))
        times: list[float] = []
        for (a, b), racks in zip(hosts, crossing, strict=True):
            rate = self.host / max(shares[a], shares[b])
            if racks[0] != racks[1]:
                rate = min(rate, *(self.uplink / loads[rack] for rack in racks))
            times.append(nbytes / rate * self.noise.uniform(1, 1.15))
        return times


def dealt(racks: int, hosts: int, **more: int) -> dict[str, int]:
    """Hosts that are dealt out to racks in turn."""
    return {f"node{number}": number % racks for number in range(racks * hosts)} | more


def found_racks(network: Racks) -> list[set[str]]:
    topology = discover(network, "found")
    return [{topology.hosts[host] for host in rack} for rack in topology.racks]


@pytest.mark.parametrize("count", range(2, 9))
def test_every_pair_meets_once_in_rounds_without_a_host_twice(count: int) -> None:
    rounds = list(tournament(range(count)))
    assert sorted(tuple(sorted(pair)) for pairs in rounds for pair in pairs) == list(
        combinations(range(count), 2)
    )
    assert all(len({host for pair in pairs for host in pair}) == 2 * len(pairs) for pairs in rounds)


@pytest.mark.parametrize(("racks", "hosts"), [(2, 2), (2, 3), (2, 4), (3, 3), (4, 8)])
@pytest.mark.parametrize("uplink", [6e6, 24e6])
def test_racks_are_found(racks: int, hosts: int, uplink: float) -> None:
    """This includes the case that a single pair gets the same bandwidth across an uplink as within a rack."""
    network = Racks(dealt(racks, hosts), uplink=uplink)
    expected = [{f"node{n}" for n in range(k, racks * hosts, racks)} for k in range(racks)]
    assert found_racks(network) == expected


@pytest.mark.parametrize("rack_of", [dealt(1, 6), dealt(3, 2)])
def test_a_network_without_a_bottleneck_is_one_rack(rack_of: dict[str, int]) -> None:
    network = Racks(rack_of, uplink=1e9)
    assert found_racks(network) == [set(rack_of)]
    assert [level.name for level in discover(network, "flat").topology.levels] == ["host"]


def test_the_topology_lists_hosts_rack_by_rack() -> None:
    topology = discover(Racks(dealt(2, 2, node10=0, node9=1), ranks=2), "lab")
    names = ("node0", "node2", "node10", "node1", "node3", "node9")
    assert topology.topology.hosts == names
    assert [(level.name, level.count) for level in topology.topology.levels] == [
        ("process", 2), ("host", 3), ("rack", 2),
    ]  # fmt: skip
    assert parse_topology(topology_text(topology.topology)).hosts == names
    lines = topology.lines()
    assert lines[1].split() == list(names)
    assert lines[2].split()[:2] == ["node0", "-"]
    assert "rack 1: node0, node2, node10" in lines


def test_smaller_racks_are_filled_with_places_that_no_host_has() -> None:
    topology = discover(Racks(dealt(2, 3, node6=0), uplink=12e6), "lab")
    assert topology.topology.hosts == (
        "node0",
        "node2",
        "node4",
        "node6",
        "node1",
        "node3",
        "node5",
        "none-2-4",
    )


def test_many_hosts_are_not_all_measured_alone() -> None:
    network = Racks(dealt(4, 8))
    topology = discover(network, "lab")
    assert np.isnan(topology.alone).sum() > 500
    assert not np.isnan(topology.shared[np.triu_indices(32, 1)]).any()
    assert len(topology.lines()) < 10, "no table of a thousand pairs"


def test_one_slow_pair_makes_no_racks() -> None:
    rates = np.full((8, 8), 24e6)
    rates[0, 1] = rates[1, 0] = 1e6
    assert [len(rack) for rack in racks_of(rates)] == [8]


@pytest.mark.parametrize("names", [("a", "a"), ("a", "a", "b")])
def test_hosts_must_have_equally_many_ranks(names: tuple[str, ...]) -> None:
    network = Racks(dict.fromkeys(names, 0))
    network.hosts = names
    with pytest.raises(CommplanError, match="CP0759"):
        discover(network, "lab")


def test_a_topology_is_written_as_it_is_read() -> None:
    levels = (Level("gpu", 8, 3e-6, 450e9), Level("node", 2, 6e-6, 2.5e6))
    for topology in (
        Topology("plain", levels),
        Topology("all", levels, 4, ("a", 'b"'), call=8e-6, round=7e-6, devices="h100"),
        Topology("names", levels, None, ("x", "y")),
        Topology("cores", levels, 3),
    ):
        assert parse_topology(topology_text(topology)) == topology


def test_discovery_needs_mpi(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--discover", "-o", str(tmp_path / "cluster.toml")]) == 1
    assert "CP0759" in capsys.readouterr().err
