"""Datagrams between the processes of a job, from each to each: what a watchdog asks and answers."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Mapping, Sequence

import msgspec

from commplan.lowering.mpi.job.watchdog import job
from commplan.recorder.file import machine
from commplan.recorder.processes import identity, process_state, silence, waits_for_core
from commplan.recorder.verdict import RankState
from commplan.runtime.observe.joint_calls import JointReport

_LONGEST = 60_000  # bytes of a datagram
DOWN = ("dead", "stopped", "stuck in the kernel")  # states in which a process cannot answer


class Peer(msgspec.Struct, frozen=True, array_like=True):
    """How a process is asked.

    token: begins what is sent to it. space: see `recorder.file.machine`. bound_s, busy_s: see `Program.bind`.
    """

    process: int
    address: str
    port: int
    token: str
    pid: int
    host: str
    space: str
    bound_s: float | None
    busy_s: float = 0.0

    @property
    def state(self) -> str:
        """See `recorder.blame.Rank`."""
        return process_state(self.pid) if self.space == machine() else "unknown"

    @property
    def waits_for_core(self) -> bool:
        """See `recorder.processes`; of a process of another machine that is not known."""
        return self.space == machine() and waits_for_core(self.pid)

    def silence(self, state: str) -> str:
        """What is said of it in this state where it does not answer."""
        if state == "alive" and self.waits_for_core:
            return "does not answer: its process lives, and gets no core: the machine is too busy"
        return silence(state, self.host)

    def identity(self, state: str, who: str = "process") -> str:
        """See `recorder.processes.identity`."""
        return identity(who, self.process, self.pid, self.host, state)


class Message(msgspec.Struct, frozen=True, array_like=True):
    """kind: `hello`, `ask`, `answer`, `verdict` or `left`. serial: of what is asked, and of its answer.
    code: of a verdict. state: of the sender. joint: how far its calls with collectives are, by processes that
    call alike."""

    process: int
    kind: str
    serial: int = 0
    text: str = ""
    state: RankState | None = None
    code: str = ""
    joint: Mapping[str, JointReport] = {}


class Endpoint:
    """Where process `own` is asked: at the address with which it reaches `coordinator`, HOST:PORT.

    others: the processes that it asks, by number. Raises OSError or ValueError where there is none.
    """

    def __init__(self, own: int, coordinator: str) -> None:
        self.own, self.token = own, job()
        self.others: dict[int, Peer] = {}
        host, _, port = coordinator.rpartition(":")
        infos = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
        family, *_, address = min(infos, key=lambda info: info[0])
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            own_address = probe.getsockname()[0]
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.bind((own_address, 0))

    def peer(self, bound_s: float | None, busy_s: float) -> Peer:
        """What others need to ask this process."""
        address, port = self._socket.getsockname()[:2]
        host = socket.gethostname()
        return Peer(self.own, address, port, self.token, os.getpid(), host, machine(), bound_s, busy_s)

    def send(self, message: Message, processes: Sequence[int]) -> None:
        """What does not arrive is sent again, or missed."""
        data = msgspec.json.encode(message)
        for peer in map(self.others.__getitem__, processes):
            with contextlib.suppress(OSError):
                self._socket.sendto(peer.token.encode() + data, (peer.address, peer.port))

    def receive(self, take: Callable[[Message], None], seconds: float) -> None:
        """Give `take` all that has come from others; waits this long where that is nothing."""
        self._socket.settimeout(seconds)
        with contextlib.suppress(OSError):
            while True:
                data = self._socket.recv(_LONGEST)
                self._socket.settimeout(0.0)
                if not data.startswith(self.token.encode()):
                    continue
                with contextlib.suppress(msgspec.DecodeError):
                    message = msgspec.json.decode(data[len(self.token) :], type=Message)
                    if message.process in self.others:
                        take(message)
