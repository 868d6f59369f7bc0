"""A lab with all systems in it, and the measuring of works on them side by side."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple, Self

import msgspec

from bench.harness.group import Group
from bench.harness.spread import spread, turns
from bench.harness.work import Work
from bench.harness.worker import PRIORITY
from bench.netlab import Lab, Shape, counters, line_rate
from commplan.cost.collective.bounds import busiest_bytes
from commplan.cost.network.network import Network, one_group
from commplan.diagnostics import fail
from commplan.topology import Level, Topology, parse_topology, places_of_hosts, topology_text

# Under mpirun or started one by one. torch and XLA find their peers through the environment.
UNDER_MPI = {"commplan": True, "openmpi": True, "mpi4jax": True, "xla": False, "torch": False}
# Everything runs on CPUs, and every host of the lab counts as a separate machine.
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "OMP_NUM_THREADS": "1"}
ROOT = Path(__file__).resolve().parents[2]
LONG = 0.5  # seconds: a repetition above this needs no company in its block, and no second warm-up


def run_ranks(
    lab: Lab,
    label: str,
    *words: str,
    environment: Mapping[str, str] | None = None,
    out: IO[str] | None = None,
) -> None:
    """Run `python words...` as a rank on every host of `lab`. `out` receives stdout; None keeps it.

    Raises CP1124 if a rank fails, with its last lines of output; `label` names them.
    """
    done = subprocess.run(
        lab.mpirun([sys.executable, *words]),
        env={**os.environ, **ENVIRONMENT, **(environment or {}), "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL, stdout=out or subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        check=False, start_new_session=True,
    )  # fmt: skip
    if done.returncode:
        output = ((done.stdout or "") + done.stderr).splitlines()
        fail("CP1124", f"{label} in the lab failed", *output[-20:])


class Entry(NamedTuple):
    """One line of a comparison: its title, its system, and its work."""

    label: str
    system: str
    work: Work


class Figure(msgspec.Struct, frozen=True):
    """The measurements of one entry.

    Attributes:
        times: seconds until the last rank was done, one per repetition.
        cpu: CPU seconds of all ranks.
        crossed: bytes sent by the busiest host per repetition, as counted by the kernel.
        missing: the reason if the system cannot do the work.
        note: the system's choice, if it makes one.
    """

    label: str
    system: str
    work: Work
    ranks: int
    seconds: list[float] = []
    cpu: list[float] = []
    crossed: float = 0.0
    missing: str = ""
    note: str = ""

    @property
    def time(self) -> float:
        """Seconds: the median."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a fraction of the median."""
        return spread(self.seconds)

    @property
    def bus(self) -> float:
        """Bus bandwidth in bytes a second: S / t times 2(n-1)/n for all-reduce, (n-1)/n for reduce-scatter
        and all-gather, 1 for broadcast, as nccl-tests defines it."""
        n = self.ranks
        factor = {"all_reduce": 2 * (n - 1) / n, "broadcast": 1.0}.get(self.work.kind, (n - 1) / n)
        return self.work.nbytes / self.time * factor


class Surroundings(msgspec.Struct, frozen=True):
    """Place and time: the lab, its line rate (bytes a second, per direction), the machine, the versions.

    `hosts`: the host of each rank. `topology`: the lab, for the compiler.
    """

    date: str
    shape: Shape
    congestion_control: str
    line_rates: dict[str, float]
    hosts: list[str]
    topology: str
    cores: int
    load: tuple[float, float, float]
    python: str
    versions: dict[str, str]

    @property
    def line(self) -> float:
        """Of a host's link."""
        return self.line_rates["host"]

    def bound(self, work: Work) -> float:
        """The least seconds for `work` here: the traffic of the busiest link, at its measured rate."""
        known = parse_topology(self.topology)
        network, layout = Network.for_topology(known), one_group(places_of_hosts(known, self.hosts))
        most = busiest_bytes(work.kind, work.nbytes, layout, network)
        return max(nbytes / level.bandwidth for nbytes, level in zip(most, network.levels, strict=True))


class Stage:
    """A lab of `shape` with the processes of `systems`, for the duration of a `with` block.

    `rounds` is the number of turns of each entry; the first is dropped. `calibration`: for commplan, in
    addition to the rates measured here. `budget`: seconds for one block of repetitions; there is always at
    least one repetition.
    """

    def __init__(
        self,
        shape: Shape,
        systems: Sequence[str],
        *,
        name: str = "bench",
        rounds: int = 5,
        budget: float = 0.25,
        calibration: Path | None = None,
    ) -> None:
        self.lab = Lab(shape, name)
        self.systems = tuple(dict.fromkeys(systems))
        self.rounds = rounds
        self.budget = budget
        self.calibration = calibration
        self.surroundings: Surroundings
        self.topology: Path
        self._groups: dict[str, Group] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.lab)
            self.surroundings = _surroundings(self.lab)
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="commplan-bench-"))
            self.topology = Path(folder) / "lab.toml"
            self.topology.write_text(self.surroundings.topology, encoding="utf-8")
            env = {**ENVIRONMENT, "COMMPLAN_BENCH_TOPOLOGY": str(self.topology)}
            if self.calibration is not None:
                if not self.calibration.exists():
                    self._calibrate(self.calibration)
                env["COMMPLAN_BENCH_CALIBRATION"] = str(self.calibration.resolve())
            for system in self.systems:
                module = f"bench.systems.{system}"
                group = Group(self.lab, module, mpi=UNDER_MPI[system], env=env)
                self._groups[system] = stack.enter_context(group)
            for group in self._groups.values():
                group.wait()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _calibrate(self, path: Path) -> None:
        """Measure the lab as `commplan calibrate` does, before other programs run in it."""
        words = ["nice", "-n", str(PRIORITY), sys.executable, "-m", "commplan.cli", "calibrate"]
        command = self.lab.mpirun([*words, "--topology", str(self.topology), "-o", str(path.resolve())])
        done = subprocess.run(
            command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            fail("CP1124", "`commplan calibrate` failed in the lab", *done.stderr.splitlines()[-20:])

    def compare(self, entries: Sequence[Entry]) -> list[Figure]:
        """Measure all of them, block by block in turns; each round begins with another one."""
        seconds: dict[str, list[float]] = {entry.label: [] for entry in entries}
        cpu: dict[str, list[float]] = {entry.label: [] for entry in entries}
        crossed: dict[str, list[float]] = {entry.label: [] for entry in entries}
        missing: dict[str, str] = {}
        notes: dict[str, str] = {}
        times = {entry.label: 1 for entry in entries}
        warm = {entry.label: 2 for entry in entries}
        for turn, order in enumerate(turns(entries, self.rounds)):
            for label, system, work in order:
                if label in missing:
                    continue
                before = counters(self.lab)
                block = self._groups[system].measure(work, times[label], warm[label])
                if isinstance(block, str):
                    missing[label] = block
                    continue
                notes[label] = block.note
                sent = counters(self.lab).since(before).sent
                crossed[label].append(max(sent) / (times[label] + warm[label]))
                if turn:  # the first round finds out how long a repetition takes
                    seconds[label] += block.seconds
                    cpu[label] += block.cpu
                usual = statistics.median(block.seconds)
                times[label] = max(1, min(20, round(self.budget / max(usual, 1e-9))))
                warm[label] = 0 if usual > LONG else 1
                if not turn and usual > LONG:  # too long to be thrown away
                    seconds[label] += block.seconds
                    cpu[label] += block.cpu
        for system in {entry.system for entry in entries}:
            self._groups[system].forget()
        return [
            Figure(
                label, system, work, len(self.lab.ranks), seconds[label], cpu[label],
                statistics.fmean(crossed[label]) if crossed[label] else 0.0,
                missing.get(label, ""), notes.get(label, ""),
            )
            for label, system, work in entries
        ]  # fmt: skip


def _surroundings(lab: Lab) -> Surroundings:
    """Measure the line rates before other programs run in the lab."""
    racks = [host.rack for host in lab.ranks]
    pairs = {"host": (0, next((r for r in range(1, len(racks)) if racks[r] == racks[0]), 1))}
    if lab.shape.racks > 1:
        pairs["uplink"] = (0, next(rank for rank, rack in enumerate(racks) if rack != racks[0]))
    rates = {label: statistics.fmean(line_rate(lab, a, b)) for label, (a, b) in pairs.items()}
    names = ("commplan", "openmpi", "mpi4py", "mpi4jax", "jax", "jaxlib", "torch", "numpy")
    return Surroundings(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        shape=lab.shape,
        congestion_control=lab.congestion_control(),
        line_rates=rates,
        hosts=[host.name for host in lab.ranks],
        topology=topology(lab, rates),
        cores=os.cpu_count() or 1,
        load=os.getloadavg(),
        python=platform.python_version(),
        versions={name: version for name in names if (version := _version(name))},
    )


def topology(lab: Lab, rates: Mapping[str, float]) -> str:
    """The lab as a topology file, with its measured rates (bytes a second)."""
    levels = [Level("host", lab.shape.hosts, 60e-6, rates["host"])]
    if lab.shape.racks > 1:
        levels.append(Level("rack", lab.shape.racks, 120e-6, rates["uplink"]))
    return topology_text(Topology("lab", tuple(levels), None, tuple(host.name for host in lab.hosts)))


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
