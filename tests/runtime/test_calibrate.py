"""Measuring: the plan of it on a fabric made by hand, then devices of JAX and ranks of MPI for real."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support import mpirun

from commplan.cost.calibration import parse_calibration
from commplan.diagnostics import CommplanError
from commplan.ir.schedule import Axis, Backend, Collective, Form
from commplan.runtime.calibrate.calibrate import Pairs, calibrate, discovered
from commplan.runtime.calibrate.jax import device_gamma
from commplan.topology import Level, Topology, parse_topology

Call = Callable[[], None]


class Made:
    """A fabric without traffic. It records the requests."""

    backend: Backend = "mpi"
    forms: tuple[Form, ...] = ("call",)
    longest = 2**20

    def __init__(self, *hosts: str) -> None:
        self.hosts = hosts
        self.pairs: list[tuple[Pairs, int]] = []
        self.ops: list[tuple[Collective, Axis, int]] = []

    def slowest(self, seconds: float) -> float:
        return seconds

    def gamma(self) -> float:
        return 2e-10

    def barrier(self) -> None:
        pass

    def exchange(self, pairs: Pairs, nbytes: int, times: int) -> Call:
        self.pairs.append((pairs, nbytes * times))
        return self.barrier

    def burst(self, pair: tuple[int, int], count: int) -> float | None:
        del pair
        return count * 1e-6

    def empty(self) -> Call:
        return self.barrier

    def collective(self, op: Collective, axis: Axis, size: int) -> Call:
        self.ops.append((op, axis, size))
        return self.barrier


def test_hosts_and_ranks_make_a_topology() -> None:
    assert [(level.name, level.count) for level in discovered(["a", "a", "b", "b"]).levels] == [
        ("process", 2),
        ("host", 2),
    ]
    assert [level.name for level in discovered(["a", "b", "c"]).levels] == ["host"]
    assert discovered(["n10", "n2", "n1"]).hosts == ("n1", "n2", "n10")
    assert [level.name for level in discovered(["a", "a"]).levels] == ["process"]


def test_links_are_measured_by_pairs_of_their_level() -> None:
    fabric = Made("a", "a", "b", "b")
    calibration = calibrate(fabric, seconds=0.01, largest=64)
    assert [level.name for level in calibration.levels] == ["process", "host"]
    assert {tuple(pairs) for pairs, _ in fabric.pairs} >= {((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 2),)}
    assert calibration.overhead == pytest.approx(1e-6)
    assert (calibration.gamma, max(nbytes for _, nbytes in fabric.pairs)) == (2e-10, fabric.longest)
    assert calibration.hosts == fabric.hosts


def test_what_adding_costs_is_measured_where_the_buffers_lie() -> None:
    assert 0 < device_gamma(2**16, times=3) < 1e-3


def test_collectives_are_measured_in_all_ways_at_every_size() -> None:
    fabric = Made("a", "a", "b", "b")
    calibration = calibrate(fabric, seconds=5, largest=64)
    by_kind = {curve.kind for curve in calibration.curve_list}
    assert by_kind == {"all_reduce", "reduce_scatter", "all_gather", "broadcast"}
    names = {curve.algorithm for curve in calibration.curve_list if curve.kind == "all_reduce"}
    assert {
        "native",
        "ring",
        "torus",
        "halving_doubling",
        "hierarchical(process = ring, host = ring)",
    } <= names
    shapes = {curve.shape for curve in calibration.curve_list}
    assert shapes == {"host/process 0/0 0/1 1/2 1/3"}
    native = next(c for c in calibration.curve_list if (c.kind, c.algorithm) == ("all_reduce", "native"))
    assert native.sizes == (4.0, 64.0)
    for op, axis, size in fabric.ops:
        assert op.axes == (axis.name,)
        assert op.kind != "reduce_scatter" or size % 4 == 0


def test_a_given_topology_tells_the_levels() -> None:
    racks = Topology(
        "racks", (Level("host", 2, 1e-5, 1e8), Level("rack", 2, 1e-5, 1e8)), None, ("a", "b", "c", "d")
    )
    calibration = calibrate(Made("a", "c", "b", "d"), racks, seconds=0.01, largest=4)
    assert [level.name for level in calibration.levels] == ["host", "rack"]
    # Interleaved: no hierarchy by levels, as the ranks are not in their order.
    assert not any("hierarchical" in curve.algorithm for curve in calibration.curve_list)


def test_one_rank_has_nothing_to_measure() -> None:
    with pytest.raises(CommplanError, match="CP0756"):
        calibrate(Made("a"))


def test_hosts_must_be_those_of_the_topology() -> None:
    pair = Topology("pair", (Level("host", 2, 1e-5, 1e8),), None, ("a", "b"))
    with pytest.raises(CommplanError, match="CP0755"):
        calibrate(Made("a", "c"), pair)


QUICK = ("--seconds", "1", "--largest", "4B")


def test_devices_of_jax_are_measured(tmp_path: Path) -> None:
    file = tmp_path / "jax.calibration.toml"
    words = [
        sys.executable,
        "-W",
        "error",
        "-m",
        "commplan.cli",
        "calibrate",
        "--devices",
        "2",
        "-o",
        str(file),
    ]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OMPI_")} | {
        "JAX_PLATFORMS": "cpu"
    }
    done = subprocess.run(
        [*words, *QUICK], capture_output=True, text=True, check=False, env=environment, timeout=240
    )
    assert done.returncode == 0, done.stderr
    calibration = parse_calibration(file.read_text())
    assert (calibration.backend, len(calibration.hosts)) == ("jax", 2)
    assert [level.name for level in calibration.levels] == ["process"]
    assert {curve.form for curve in calibration.curve_list} == {"rounds"}


def test_ranks_of_mpi_are_measured(tmp_path: Path) -> None:
    file = tmp_path / "mpi.calibration.toml"
    racks = tmp_path / "racks.toml"
    lines = [
        "from commplan.cli import main",
        "from commplan.runtime.calibrate.mpi import MpiFabric",
        f"assert main({['calibrate', '-o', str(file), *QUICK]!r}) == 0",
        f"words = {['calibrate', '--discover', '-o', str(racks)]!r}",
        "assert main(words) == 1  # one host",
        "two = property(lambda self: ('b', 'a'), lambda self, hosts: None)",
        "MpiFabric.hosts, MpiFabric.longest = two, 2**18",
        "assert main(words) == 0",
    ]
    mpirun.run(2, "\n".join(lines))
    machine = parse_topology(racks.read_text())
    assert (machine.name, machine.hosts) == ("racks", ("a", "b"))
    assert [level.name for level in machine.levels] == ["host"]
    calibration = parse_calibration(file.read_text())
    assert (calibration.backend, len(calibration.hosts)) == ("mpi", 2)
    assert calibration.overhead > 0
    assert {curve.form for curve in calibration.curve_list} == {"call"}
