"""Who shares: processes in the order of the members that they hold; readers as the plan counts them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from support import host_processes
from support.embedding import mesh_of

from commplan.input.work_partition import Division
from commplan.runtime.input.device.batches import shared_group
from commplan.runtime.machines.machine import PeerHello, Peers, peers_of


def test_peers_stand_in_the_order_of_what_they_hold():
    key, other = b"k" * 8, b"o" * 8
    hellos = [
        PeerHello(key, b"host-b", 2, "t0"),
        PeerHello(other, b"host-a", 0, "t1"),
        PeerHello(key, b"host-a", 0, "t2"),
        PeerHello(key, b"host-b", 1, "t3"),
    ]
    messages = dict(enumerate(hellos))
    assert peers_of(0, messages) == Peers("t2", 2, (0, 1, 1), (2, 3, 0), (0, 1, 2))
    assert peers_of(2, messages) == Peers("t2", 0, (0, 1, 1), (2, 3, 0), (0, 1, 2))
    assert peers_of(1, messages) is None


class Machine:
    """A machine with `peers`; it records requests."""

    def __init__(self, peers: Peers | None) -> None:
        self.found, self.asked, self.divisions = peers, [], []
        self.input = self

    def peers(self, key: str, host: str, place: int, timeout: float) -> Peers | None:
        self.asked.append((key, host, place))
        return self.found

    def carrier(self, peers: Peers, division: Division, **options: Any) -> Any:
        assert peers is self.found
        self.divisions.append((division, options))
        return self if division.moves() else None


def asked(design: str, peers: Peers | None, local: dict[str, tuple[int, ...]]) -> tuple[Any, Machine]:
    run, _ = host_processes.bound(design, 4, mesh_of(member=4))
    machine: Any = Machine(peers)
    context = dataclasses.replace(run.context, machine=machine)
    phase = run.program.schedule.phase("step")
    return shared_group(context, phase, local, host="here", timeout=7.0), machine


@pytest.mark.parametrize(
    ("design", "places", "readers", "makers"),
    [
        ("multi_broadcast(readers = 3)", (0, 2), 2, (0, 1)),
        ("multi_broadcast(readers = 2)", (0, 2), 1, (0,)),
        ("single_broadcast(readers = 2)", (0, 1, 2, 3), 2, (0, 1)),
        ("all_shared", (0, 2), None, (0, 1)),
    ],
)
def test_readers_are_the_processes_that_hold_the_first_members(
    design: str, places: tuple[int, ...], readers: int | None, makers: tuple[int, ...]
):
    count = len(places)
    peers = Peers("ab12", 1, (0,) * (count // 2) + (1,) * (count - count // 2), tuple(range(count)), places)
    among, machine = asked(design, peers, {"member": (places[1],)})
    assert (among.index, among.count, among.hosts, among.timeout) == (1, count, peers.hosts, 7.0)
    assert among.readers == readers
    assert among.carrier is machine
    [(division, options)] = machine.divisions
    assert division.readers == makers
    assert (options["on_failure"], options["timeout"]) == ("stop", 7.0)
    assert options["blame"][0].startswith("share x via ")
    assert [(host, place) for _, host, place in machine.asked] == [("here", places[1])]


def test_a_group_on_one_host_needs_no_carrier():
    among, _ = asked("all_shared", Peers("ab12", 0, (0, 0), (0, 1), (0, 2)), {"member": (0, 1)})
    assert among.carrier is None
    assert among.local == (0, 1)


def test_nobody_is_asked_where_nothing_is_shared():
    among, machine = asked("duplicate", None, {"member": (0,)})
    assert among is None
    assert machine.asked == []
    among, machine = asked("all_shared", None, {"member": (0,)})
    assert among is None
    assert len(machine.asked) == 1
