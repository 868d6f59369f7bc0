"""Datagrams between the processes of a job: the queries and answers of watchdogs."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Mapping, Sequence

import msgspec

from commplan.hang_limits import UNWATCHED, HangLimits
from commplan.lowering.mpi.job.watchdog import job
from commplan.recorder.file import machine
from commplan.recorder.processes import identity, process_state, silence, waits_for_core
from commplan.recorder.verdict import RankState
from commplan.runtime.observe.joint_calls import JointReport

_LONGEST = 60_000  # bytes of a datagram
DOWN = ("dead", "stopped", "stuck in the kernel")  # states in which a process cannot answer


class Peer(msgspec.Struct, frozen=True, array_like=True):
    """A process and the address of its watchdog.

    Attributes:
        token: The prefix of the datagrams that it accepts.
        space: See `recorder.file.machine`.
        limits: See `Program.bind`.
    """

    process: int
    address: str
    port: int
    token: str
    pid: int
    host: str
    space: str
    limits: HangLimits = UNWATCHED

    @property
    def state(self) -> str:
        """See `recorder.blame.Rank`."""
        return process_state(self.pid) if self.space == machine() else "unknown"

    @property
    def waits_for_core(self) -> bool:
        """See `recorder.processes`; False for a process of another machine."""
        return self.space == machine() and waits_for_core(self.pid)

    def silence(self, state: str) -> str:
        """The condition of a process that does not answer, for a message."""
        if state == "alive" and self.waits_for_core:
            return "does not answer: its process lives, and gets no core: the machine is too busy"
        return silence(state, self.host)

    def identity(self, state: str, who: str = "process") -> str:
        """See `recorder.processes.identity`."""
        return identity(who, self.process, self.pid, self.host, state)


class Message(msgspec.Struct, frozen=True, array_like=True):
    """A message between watchdogs.

    Attributes:
        kind: `hello`, `ask`, `answer`, `verdict` or `left`.
        serial: The number of a query, and of its answers.
        state: The state of the sender.
        code: The code of a verdict.
        joint: The progress of the sender's joint calls, by the key of the processes that make them.
    """

    process: int
    kind: str
    serial: int = 0
    text: str = ""
    state: RankState | None = None
    code: str = ""
    joint: Mapping[str, JointReport] = {}


class Endpoint:
    """The socket of process `own`, at the address from which it reaches `coordinator`, HOST:PORT.

    Attributes:
        others: The other processes, by number.

    Raises:
        OSError, ValueError: If there is no such address.
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

    def peer(self, limits: HangLimits) -> Peer:
        """This process, for other processes that query it."""
        address, port = self._socket.getsockname()[:2]
        host = socket.gethostname()
        return Peer(self.own, address, port, self.token, os.getpid(), host, machine(), limits)

    def send(self, message: Message, processes: Sequence[int]) -> None:
        """Send a message to `processes`. It may be lost."""
        data = msgspec.json.encode(message)
        for peer in map(self.others.__getitem__, processes):
            with contextlib.suppress(OSError):
                self._socket.sendto(peer.token.encode() + data, (peer.address, peer.port))

    def receive(self, take: Callable[[Message], None], seconds: float) -> None:
        """Pass all messages that have arrived to `take`. Waits up to `seconds` for the first one."""
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
