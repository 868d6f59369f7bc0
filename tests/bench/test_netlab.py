"""The emulated cluster: built, used, cleared away, also after a crash."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.netlab import Counters, Lab, Shape, counters, line_rate, state
from bench.netlab.__main__ import main
from bench.netlab.lab import down
from commplan.diagnostics import CommplanError

ROOT = Path(__file__).resolve().parents[2]


def reason_against() -> str:
    """The reason why no lab can be built here; empty if one can."""
    if os.geteuid() != 0:
        return "needs root"
    if not (shutil.which("ip") and shutil.which("tc")):
        return "needs iproute2"
    probe = "labprobe-sw"
    done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False)
    return f"no network namespaces: {done.stderr.strip()}" if done.returncode else ""


AGAINST = reason_against()
needs_lab = pytest.mark.skipif(bool(AGAINST), reason=AGAINST)
NAME = f"t{os.getpid()}"  # unique among labs of other runs of these tests


def namespaces(name: str = NAME) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return sorted(line.split()[0] for line in listed.splitlines() if line.startswith(f"{name}-"))


@pytest.fixture(scope="module")
def racks() -> Iterator[Lab]:
    """Two racks of two hosts, ranks going round the racks."""
    with Lab(Shape(hosts=2, racks=2, uplink="100mbit", interleave=True), NAME) as lab:
        yield lab


def send(lab: Lab, sender: int, receiver: int, nbytes: int) -> int:
    """Bytes that arrived when rank `sender` sent `nbytes` over TCP to rank `receiver`, by name."""
    listen = (
        "import socket; s = socket.create_server(('', 7000)); print('ready', flush=True); c, _ = s.accept()\n"
        "n = 0\nwhile piece := c.recv(65536): n += len(piece)\nprint(n)"
    )
    talk = (
        f"import socket; s = socket.create_connection(({lab.ranks[receiver].name!r}, 7000), 10); "
        f"s.sendall(bytes({nbytes})); s.close()"
    )
    server = lab.spawn(receiver, [sys.executable, "-c", listen], stdout=subprocess.PIPE)
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    client = lab.spawn(sender, [sys.executable, "-c", talk])
    assert client.wait(20) == 0
    return int(server.communicate(timeout=20)[0])


@needs_lab
def test_bytes_cross_the_links_between_the_hosts_and_no_others(racks: Lab):
    before = counters(racks)
    assert send(racks, 0, 2, 200_000) == 200_000  # the same rack: 0, 2 | 1, 3
    inside = counters(racks).since(before)
    sender, receiver, *neighbors = (racks.hosts.index(racks.ranks[rank]) for rank in (0, 2, 1, 3))
    assert inside.sent[sender] > 200_000
    assert inside.received[receiver] > 200_000
    idle = [*(inside.sent[host] for host in neighbors), inside.uplinks[0]]
    assert max(idle) < inside.sent[sender] / 10, "only what keeps a network up"
    assert send(racks, 0, 1, 200_000) == 200_000
    across = counters(racks).since(before).since(inside)
    crossed = across.sent[sender] + across.received[sender]  # both links count retransmissions
    assert 200_000 < across.uplinks[0] < 1.5 * crossed, "once, though an uplink has two ends"


@needs_lab
def test_every_link_is_shaped_at_both_ends(racks: Lab):
    def rate(namespace: str, interface: str) -> str:
        words = ["tc", "-n", namespace, "qdisc", "show", "dev", interface]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout

    for number, host in enumerate(racks.hosts, 1):
        for line in (rate(host.name, "eth0"), rate(racks.switch, f"h{number}")):
            assert "tbf" in line
            assert re.search(r"rate 200Mbit burst 5\S+ lat 100ms", line)
    for end in ("up1", "up2"):
        assert "rate 100Mbit burst 5" in rate(racks.switch, end)


@needs_lab
def test_ranks_go_round_the_racks_or_fill_them(racks: Lab):
    assert [host.rack for host in racks.ranks] == [0, 1, 0, 1]
    assert [host.rack for host in Lab(Shape(hosts=2, racks=2), NAME).ranks] == [0, 0, 1, 1]
    assert [host.name for host in racks.ranks] == [f"{NAME}-{k}" for k in (1, 3, 2, 4)]


@needs_lab
def test_programs_run_under_the_name_and_environment_of_their_host(racks: Lab):
    words = ["sh", "-c", "echo $(hostname) $RANK $WORLD_SIZE $MASTER_ADDR $JAX_PROCESS_ID"]
    for rank, host in enumerate(racks.ranks):
        process = racks.spawn(rank, words, stdout=subprocess.PIPE)
        assert process.communicate(timeout=10)[0].decode().split() == [
            host.name,
            str(rank),
            "4",
            racks.ranks[0].address,
            str(rank),
        ]


@needs_lab
def test_mpirun_puts_one_rank_on_each_host(racks: Lab):
    pytest.importorskip("mpi4py")
    program = (
        "from mpi4py import MPI; import socket; c = MPI.COMM_WORLD\n"
        "print(*c.gather((c.rank, socket.gethostname(), c.allreduce(c.rank))) or [], sep='\\n', flush=True)"
    )
    before = counters(racks)
    done = subprocess.run(
        racks.mpirun([sys.executable, "-c", program]), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    expected = [str((rank, host.name, 6)) for rank, host in enumerate(racks.ranks)]
    assert [line for line in done.stdout.splitlines() if line.startswith("(")] == expected
    assert all(sent > 1_000 for sent in counters(racks).since(before).sent)


@needs_lab
def test_the_line_rate_is_that_of_bytes_that_crossed(racks: Lab):
    before = counters(racks)
    forward, backward = line_rate(racks, 0, 2, seconds=0.4)
    crossed = counters(racks).since(before)
    host = racks.hosts.index(racks.ranks[0])
    assert 0.3 * forward < crossed.sent[host]
    assert 0.3 * backward < crossed.received[host]


@needs_lab
def test_a_lab_that_stands_is_not_taken_over(racks: Lab):
    with pytest.raises(CommplanError, match="CP1121"):
        Lab(Shape(), NAME).up()
    assert len(namespaces()) == 5
    assert Lab.standing(NAME).shape == racks.shape


@needs_lab
def test_down_twice_and_three_racks(capsys: pytest.CaptureFixture[str]):
    name = f"{NAME}x"
    assert main(["up", "--hosts", "1", "--racks", "3", "--name", name]) == 0
    try:
        assert namespaces(name) == [f"{name}-{k}" for k in (1, 2, 3, "sw")]
        assert send(Lab.standing(name), 0, 2, 100_000) == 100_000
        assert main(["status"]) == 0
        assert main(["exec", "9", "--name", name, "--", "true"]) == 2
        assert main(["launch", "--name", name, "--", "sh", "-c", "exit $RANK"]) == 1
    finally:
        assert main(["down", "--name", name]) == 0
    assert not namespaces(name)
    assert not list(Path("/etc/netns").glob(f"{name}-*"))
    assert main(["down", "--name", name]) == 0
    output = capsys.readouterr().out
    assert f"{name}-3: " in output
    assert "uplink 3: " in output
    assert output.endswith(f"lab {name}: nothing was there\n")
    assert main(["line-rate", "--name", name]) == 1


def the_sleeper(namespace: str) -> int:
    """The process that sleeps in `namespace`, once it is more than the shell that starts it."""
    for _ in range(200):
        pids = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=True)
        pids_of_sleepers = [int(pid) for pid in pids.stdout.split()]
        if len(pids_of_sleepers) == 1 and Path(f"/proc/{pids_of_sleepers[0]}/comm").read_text() == "sleep\n":
            return pids_of_sleepers[0]
        time.sleep(0.05)
    raise AssertionError("no process sleeps there")


@needs_lab
def test_what_a_killed_process_leaves_is_cleared_by_the_next(capsys: pytest.CaptureFixture[str]):
    name = f"{NAME}k"
    program = (
        "import sys, time; from bench.netlab import Lab, Shape\n"
        f"lab = Lab(Shape(hosts=2), {name!r}); lab.__enter__(); lab.spawn(1, ['sleep', '300'])\n"
        "print('up', flush=True); time.sleep(300)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        sleeper = the_sleeper(f"{name}-2")
        saved = state.load(name)
        assert saved is not None
        assert not saved.left_behind
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        assert saved.left_behind
        assert main(["status"]) == 0
        assert f"lab {name}: left behind" in capsys.readouterr().out
        with Lab(Shape(hosts=1), name):
            assert namespaces(name) == [f"{name}-1", f"{name}-sw"]
            stat = Path(f"/proc/{sleeper}/stat")
            assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"
    finally:
        process.kill()
        down(name)
    assert not namespaces(name)
    assert state.load(name) is None


@needs_lab
def test_down_leaves_labs_whose_names_begin_alike():
    longer = f"{NAME}y2"
    with Lab(Shape(hosts=1), longer):
        assert not down(f"{NAME}y")
        assert namespaces(longer) == [f"{longer}-1", f"{longer}-sw"]


@needs_lab
def test_a_damaged_record_is_named_and_cleared(capsys: pytest.CaptureFixture[str]):
    name = f"{NAME}d"
    state.FOLDER.mkdir(exist_ok=True)
    state.path(name).write_text("{")
    try:
        with pytest.raises(CommplanError, match="CP1122"):
            state.load(name)
    finally:
        assert main(["down", "--name", name]) == 0
    assert "cleared away" in capsys.readouterr().out
    assert state.load(name) is None


@pytest.mark.parametrize(
    ("shape", "name", "problem"),
    [
        (Shape(hosts=0), "lab", "1 racks of 0 hosts"),
        (Shape(hosts=100, racks=3), "lab", "at most 250 hosts"),
        (Shape(rate="200Mbit/s"), "lab", "the rate is `200Mbit/s`"),
        (Shape(uplink="fast"), "lab", "the uplink is `fast`"),
        (Shape(), "Lab-1", "`Lab-1` is no name"),
    ],
)
def test_shapes_that_cannot_be(shape: Shape, name: str, problem: str):
    with pytest.raises(CommplanError, match="CP1123") as caught:
        Lab(shape, name)
    assert problem in str(caught.value)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["up", "--name", f"{NAME}n"]) == 1
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert main(["down", "--name", f"{NAME}n"]) == 1
    message = capsys.readouterr().err
    assert "CP1120" in message
    assert "needs root" in message or "`ip` and `tc`" in message


def test_counters_are_differences():
    now, before = Counters((5, 9), (3, 4), (7,)), Counters((1, 2), (3, 3), (5,))
    assert now.since(before) == Counters((4, 7), (0, 1), (2,))


def test_a_process_is_told_from_a_later_one_of_its_number():
    mine = state.this_process()
    assert mine.alive
    assert not state.Owner(mine.pid, mine.started + 1).alive
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert not state.Owner(ended.pid, 0).alive


def test_one_of_two_at_once_gets_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(state, "FOLDER", tmp_path)
    won: list[bool] = []
    start = threading.Barrier(8)

    def claim() -> None:
        start.wait()
        time.sleep(0)
        won.append(state.claim(state.State("one", Shape())))

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == [False] * 7 + [True]
