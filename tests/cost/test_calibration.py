"""Calibration files: written, read back, and refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commplan.cost.calibration import (
    Calibration,
    Curve,
    MeasuredLevel,
    load_calibration,
    parse_calibration,
    write_calibration,
)
from commplan.diagnostics import CommplanError
from commplan.topology import Level, Topology, assumed_hosts, places_of_hosts

CURVE = Curve(
    "all_reduce", "hierarchical(host = ring, rack = ring)", "call", "host 0 1", (4.0, 64.0), (1e-4, 2e-4)
)
MADE = Calibration(
    "2026-11-21",
    "mpi",
    ("n0", 'a "b"\\'),
    1e-6,
    1e-10,
    5e-5,
    1e-5,
    (MeasuredLevel("host", 6e-5, 2.4e7),),
    (CURVE,),
)
TEXT = write_calibration(MADE)
TWICE = '[[level]]\nname = "host"\nlatency = 1.0\nbandwidth = 1.0\n[[curve]]'


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    file = tmp_path / "x.calibration.toml"
    file.write_text(TEXT)
    assert load_calibration(file) == MADE
    assert len(MADE.hosts) == 2


@given(st.floats(min_value=1e-12, max_value=1e12), st.text(max_size=8).filter(str.isprintable))
def test_numbers_and_names_survive(number: float, name: str) -> None:
    calibration = Calibration("2026-11-21", "jax", (name,), number, number, number, number, note=name)
    assert parse_calibration(write_calibration(calibration)) == calibration


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("version = 1", "version = 2", "has version 2, expected 1"),
        ("version = 1", "", "has version None, expected 1"),
        ("version = 1", "version =", "is not TOML"),
        ('topology = ""', r'topology = "\u001b[31m"', "matching regex"),
        ('backend = "mpi"', 'backend = "nccl"', "Invalid enum value 'nccl'"),
        ("gamma = 1e-10", "gamma = -1.0", "gamma"),
        ("gamma = 1e-10", "gamma = nan", "gamma"),
        ("gamma = 1e-10", "gamma = inf", "not finite"),
        ("gamma = 1e-10", "gamme = 1.0", "unknown field `gamme`"),
        ("call = 5e-05", "", "missing required field `call`"),
        ("bandwidth = 24000000.0", "bandwidth = 0.0", "bandwidth"),
        ("sizes = [4.0, 64.0]", "sizes = [64.0, 4.0]", "are not increasing"),
        ("sizes = [4.0, 64.0]", "sizes = [4.0]", "has 1 sizes and 2 times"),
        ("sizes = [4.0, 64.0]", "sizes = []", "length >= 1"),
        ("[[curve]]", TWICE, "contains level `host` twice"),
        ("seconds = [0.0001, 0.0002]", f"seconds = {'[' * 3000}", "nested too deep"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(old: str, new: str, message: str) -> None:
    assert old in TEXT
    with pytest.raises(CommplanError) as caught:
        parse_calibration(TEXT.replace(old, new, 1), "x.toml")
    diagnostic = caught.value.diagnostics[0]
    assert (diagnostic.code, diagnostic.file) == ("CP0751", "x.toml")
    assert message in diagnostic.message


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CommplanError, match=r"CP0751.*cannot be read"):
        load_calibration(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CommplanError, match=r"CP0751.*cannot be read"):
        load_calibration(tmp_path / "binary.toml")


RACKS = Topology("racks", (Level("core", 2, 1e-6, 1e9), Level("host", 2, 1e-5, 1e8)), None, ("n0", "n1"))


def test_ranks_lie_where_their_hosts_are() -> None:
    assert places_of_hosts(RACKS, ["n1", "n0", "n1", "n0"]) == (2, 0, 3, 1)
    unlisted = Topology("racks", RACKS.levels)
    assert places_of_hosts(unlisted, ["x", "y", "x"]) == (0, 2, 1)


def test_hosts_without_names_are_taken_in_their_natural_order() -> None:
    unlisted = Topology("racks", (Level("host", 2, 1e-5, 1e8), Level("rack", 2, 1e-5, 1e7)))
    hosts = ["node2", "node10", "node1", "node9"]
    assert places_of_hosts(unlisted, hosts) == (1, 3, 0, 2)
    (text,) = assumed_hosts(unlisted, hosts)
    assert text.startswith(
        "topology `racks` lists no hosts: they take its places in the order of their names"
    )
    assert text.endswith(", node1, node2, node9, node10")
    assert assumed_hosts(unlisted, ["node2", "node2"]) == assumed_hosts(RACKS, ["n1", "n0"]) == ()
    (text,) = assumed_hosts(unlisted, [f"node{k}" for k in range(64)])
    assert text.endswith("node6, node7, .., node63")


def test_a_few_hosts_of_a_large_topology_are_neighbors() -> None:
    levels = (Level("gpu", 8, 1e-6, 1e9), Level("node", 8, 1e-5, 1e8), Level("rack", 8, 1e-5, 1e7))
    assert places_of_hosts(Topology("cluster", levels), ["b"] * 8 + ["a"] * 8) == (*range(8, 16), *range(8))
    assert places_of_hosts(Topology("cluster", levels), ["a"] * 9)[8] == 8, (
        "a host with more ranks than a node"
    )


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        (["n0", "n2"], "host `n2`, which topology `racks` does not list"),
        (["n0"] * 3, "host `n0` runs more ranks than topology `racks` has places for it, 2"),
    ],
)
def test_ranks_that_do_not_fit_their_hosts(hosts: list[str], message: str) -> None:
    with pytest.raises(CommplanError, match="CP0755") as caught:
        places_of_hosts(RACKS, hosts)
    assert message in caught.value.diagnostics[0].message
