"""Processes that die silently, and the report of the sidecar of their host."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import mpirun

from commplan.cli import main
from commplan.recorder.blame import blame
from commplan.recorder.file import LIVE
from commplan.recorder.reading import read_records
from commplan.sidecar import process as process_of_sidecar
from commplan.sidecar.__main__ import Sidecar
from commplan.sidecar.attend import PORT, SOCKET, attend, locked
from commplan.sidecar.mail import open_socket

# A process of a job of three ranks, in an operation: it reports when it is ready, then follows instructions.
PROGRAM = """
import os, signal, struct, sys, time
from commplan.recorder.file import BEGIN, EVENT, EVENTS, HEAD, put_name, start_recording
from commplan.sidecar import attend, leave
rank, code = int(sys.argv[1]), sys.argv[2]
recording = start_recording("job", "killed", rank, 3)
put_name(recording.memory, 0, "line 5 of killed.plan")
EVENT.pack_into(recording.memory, EVENTS, time.monotonic_ns(), BEGIN, 0, 1, 4, 0)
struct.pack_into("<q", recording.memory, HEAD, 1)
attend(recording.path, f"rank {rank}", watched=True)
print("there", flush=True)
sys.stdin.readline()
exec(code)
"""
Process = subprocess.Popen[str]


@pytest.fixture(name="place")
def _place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for records and a separate sidecar, short enough for the path of a socket."""
    place = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setenv("COMMPLAN_RECORDS", str(place))
    monkeypatch.setenv("COMMPLAN_SIDECAR", str(place / "s"))
    yield place
    shutil.rmtree(place, ignore_errors=True)


def process(rank: int, code: str, warnings: str = "error") -> Process:
    pipe = subprocess.PIPE
    words = [sys.executable, "-W", warnings, "-c", PROGRAM, str(rank), code]
    started = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert started.stdout is not None and started.stdout.readline() == "there\n"
    return started


def ended(started: Process, word: str = "\n") -> str:
    """Resume it; returns its output, or the sidecar's, up to the close of its standard error."""
    return started.communicate(word, timeout=60)[1]


def test_who_is_killed_is_named_with_the_signal_and_the_line(place: Path) -> None:
    last, other = process(0, "time.sleep(600)"), process(1, "os.kill(os.getpid(), 9)")
    assert ended(other) == ""  # another process is left to report it
    last.send_signal(signal.SIGTERM)
    said = ended(last)
    assert f"error[CP0834]: rank 1 (process {other.pid} on " in said
    assert "was killed (SIGKILL) in line 5 of killed.plan, run 4" in said
    assert f"note: rank 0 (process {last.pid}" in said and "was ended (SIGTERM) in line 5" in said
    assert "ranks on other hosts" in said
    verdict = blame(read_records([str(place)]))
    assert [rank.end for rank in verdict.ranks] == ["was ended (SIGTERM)", "was killed (SIGKILL)"]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("", ""),
        ("sys.exit(3)", ""),
        ("raise KeyError('own')", "KeyError: 'own'"),
        ("leave(); os._exit(3)", ""),
        ("os._exit(0)", ""),
        ("os._exit(3)", "exited with status 3 in the middle of its program in line 5"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "crashed (SIGSEGV) in line 5"),
        ("os.kill(os.getpid(), signal.SIGTERM)", ""),
        ("os.fork() or time.sleep(0.1); os._exit(3)", "exited with status 3"),
    ],
)
def test_who_speaks_for_itself_is_not_spoken_for(place: Path, code: str, said: str) -> None:
    text = ended(process(0, code))
    assert said in text
    assert ("CP0834" in text) == (bool(said) and "KeyError" not in said)
    left(place)


def test_who_ends_the_job_is_let_go_of_first(place: Path) -> None:
    """A launcher may wait for the end of its standard error before it ends the others."""
    started = process(0, "leave(aborts=True); os.close(2); sys.stdin.readline(); os._exit(0)")
    assert started.stdin is not None and started.stderr is not None
    started.stdin.write("\n")
    started.stdin.flush()
    assert select.select([started.stderr], [], [], 60)[0] and started.stderr.read() == ""
    assert started.poll() is None
    started.communicate("\n", timeout=60)
    left(place)


def left(place: Path) -> None:
    """Wait until nothing is left of the sidecar."""
    while (place / "s").exists():
        time.sleep(0.01)


def test_only_its_user_may_enter(place: Path) -> None:
    started = process(0, "")
    folder, address = place / "s", place / "s" / SOCKET
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and stat.S_ISSOCK(address.stat().st_mode)
    ended(started)
    left(place)
    folder.mkdir(mode=0o755)
    unwatched = ended(process(0, "os._exit(3)", "always"))
    assert "CP0834" not in unwatched and "no sidecar runs" in unwatched  # and goes on all the same
    assert not address.exists()


def sidecar_of(place: Path, other_than: int = 0) -> int:
    """The process of the sidecar, once it runs."""
    limit = time.monotonic() + 20
    while time.monotonic() < limit:
        for path in Path("/proc").glob("[0-9]*"):
            is_ours = str(place / "s") in _environment(path) and int(path.name) != other_than
            if is_ours and "-m\0commplan.sidecar" in (path / "cmdline").read_text():
                return int(path.name)
    raise AssertionError("no sidecar runs")


def attended_by(sidecar: int) -> int:
    """The number of processes of which a sidecar has a descriptor."""
    links: list[str] = []
    for each in Path(f"/proc/{sidecar}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            links.append(str(each.readlink()))
    return links.count("anon_inode:[pidfd]")


WAIT = """
from commplan.recorder import live
while (verdict := live.verdict_of(recording)) is None:
    time.sleep(0.02)
print(verdict.message, file=sys.stderr, flush=True)
"""


def test_a_killed_sidecar_is_replaced_and_names_the_process_that_then_blocks_others(place: Path) -> None:
    waiting, blocking = process(0, WAIT), process(1, "sys.stdin.readline()")
    first = sidecar_of(place)
    os.kill(first, signal.SIGKILL)
    second = sidecar_of(place, first)
    while attended_by(second) < 2:
        time.sleep(0.01)
    blocking.send_signal(signal.SIGSTOP)
    for path in place.glob("*.rec"):  # both wait, and rank 1 is stopped
        with path.open("r+b") as file:
            now = time.monotonic_ns()
            os.pwrite(file.fileno(), struct.pack("<2q", now, now), LIVE)
            os.pwrite(file.fileno(), struct.pack("<2q", 500_000_000, 10**12), LIVE + 40)
            os.pwrite(file.fileno(), struct.pack("<q", 1), LIVE + 72)
    output = ended(waiting)
    assert output.startswith("rank 1 is stopped (SIGSTOP, or a debugger)\n"), output
    os.kill(second, signal.SIGKILL)
    blocking.send_signal(signal.SIGCONT)
    assert blocking.stderr is not None
    assert "the sidecar of this host has ended: processes that block others" in blocking.stderr.readline()
    ended(blocking, "\n\n")


DYING = """
import importlib, os, pathlib, socket, time
joined = importlib.import_module("commplan.sidecar.attend")
listeners = []
def start(listener, mail):
    listeners.append(socket.socket(fileno=os.dup(listener)))
joined._start = start
joined.attend(pathlib.Path("record"), "rank 0")
line, _ = listeners[0].accept()
line.close()  # a sidecar that is killed: it still listens
until = time.monotonic() + 20
while len(listeners) < 2 and time.monotonic() < until:
    time.sleep(0.01)
print(len(listeners), flush=True)
os._exit(0)
"""


def test_a_sidecar_that_is_killed_is_not_joined_again_while_it_still_listens(place: Path) -> None:
    done = subprocess.run([sys.executable, "-c", DYING], capture_output=True, text=True, check=True)
    assert done.stdout == "2\n", done.stderr


def test_a_sidecar_may_open_as_many_files_as_the_system_allows(place: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard - 1), hard))
    try:
        attended = process(0, "")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    sidecar, limit = sidecar_of(place), time.monotonic() + 20
    while resource.prlimit(sidecar, resource.RLIMIT_NOFILE) != (hard, hard):
        assert time.monotonic() < limit
        time.sleep(0.01)
    ended(attended)


def test_a_sidecar_that_cannot_have_the_folder_ends_once_it_can(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["commplan.sidecar.attend"], "LOCK_S", 0.05)
    with locked() as folder:
        (folder / PORT).write_text("1 key")
    has_tried, has_ended = threading.Event(), Sidecar.has_ended

    def ends(sidecar: Sidecar) -> bool:
        is_over = has_ended(sidecar)
        has_tried.set()
        return is_over

    monkeypatch.setattr(Sidecar, "has_ended", ends)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, open_socket() as mail:
        listener.bind(str(place / "s" / SOCKET))
        listener.listen()
        sidecar = threading.Thread(target=Sidecar(listener, mail).run, daemon=True)
        with locked():
            sidecar.start()
            assert has_tried.wait(20)
        sidecar.join(20)
        assert not sidecar.is_alive()
    left(place)


def test_a_folder_that_another_process_keeps_is_waited_for_with_a_bound(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["commplan.sidecar.attend"], "LOCK_S", 0.05)
    with locked() as folder:
        assert folder == place / "s"
        with pytest.raises(TimeoutError), locked():
            pass
        with pytest.warns(RuntimeWarning, match="no sidecar runs: another process has had"):
            assert attend(place / "a.rec", "rank 0") is None
    with pytest.raises(FileNotFoundError, match="of its own"), locked():
        raise FileNotFoundError("of its own")


def test_nothing_is_written_to_the_descriptors_of_a_process_that_has_ended() -> None:
    (read, write), (again, reused), (line, peer) = os.pipe(), os.pipe(), socket.socketpair()
    attended = process_of_sidecar.AttendedProcess(line, lambda *_: None)
    attended.errors = write
    attended.close()
    try:
        os.dup2(reused, write)  # another file has the number now
        attended.write_stderr("it has ended")
        assert not select.select([again], [], [], 0)[0]
    finally:
        peer.close()
        for descriptor in (read, write, again, reused):
            os.close(descriptor)


def test_an_error_that_nobody_reads_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_of_sidecar, "_READ_MS", 10)
    read, write = os.pipe()
    line, peer = socket.socketpair()
    try:
        attended = process_of_sidecar.AttendedProcess(line, lambda *_: None)
        attended.write_stderr("it has not sent its standard error")
        attended.errors = write
        attended.write_stderr("x" * 10_000)
        assert os.read(read, 20_000) == b"x" * 10_000
        while select.select([], [write], [], 0)[1]:
            os.write(write, b"y" * select.PIPE_BUF)
        attended.write_stderr("nobody reads this")
    finally:
        for opened in (line, peer):
            opened.close()
        os.close(read)
        os.close(write)


def _environment(path: Path) -> str:
    try:
        return (path / "environ").read_text(errors="replace")
    except OSError:
        return ""


JOB = """
import os, sys
import jax, numpy as np
from mpi4py import MPI
from commplan.hang_limits import HangLimits
from commplan.ir.plan import Algorithm
from commplan.lowering.mpi.collectives import Channel
from commplan.lowering.mpi.tuning import Spec
channel = Channel(MPI.COMM_WORLD, limits=HangLimits(10.0), plan="killed")
spec = Spec("all_reduce", algorithm=Algorithm("ring"), line=6, file="x.plan")
step = jax.jit(lambda x, token: channel.run(x, spec, token)[0])
for number in range(8):
    if MPI.COMM_WORLD.rank == 1 and number == 5:
        os.kill(os.getpid(), 9)
    jax.block_until_ready(step(np.ones(1000, np.float32), channel.token()))
"""


def test_where_mpi_ends_the_others_it_is_said_all_the_same(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mpirun.needs_mpi()
    done = mpirun.start(3, JOB)
    assert done.returncode != 0
    assert done.stderr.count("error[CP0834]") == 1
    assert "was killed (SIGKILL), in no collective; it last finished line 6 of x.plan, run 5" in done.stderr
    assert done.stderr.count("was ended (SIGTERM) in line 6 of x.plan, run 6") == 2
    assert main(["blame", str(place)]) == 1
    out = capsys.readouterr().out
    assert "rank 1 blocks the others: it was killed (SIGKILL)" in out
    left(place)
