"""Messages between the sidecars of a job's hosts: greetings, states of ranks, and verdicts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from commplan.recorder.processes import silence
from commplan.recorder.rank_state import RankState
from commplan.sidecar.mail import Address, SidecarMessage
from commplan.sidecar.process_table import ProcessTable

_GREET_S = 2.0  # seconds between two greetings
_LOST_S = 30.0  # seconds until sidecars that have not sent anything are reported
_ANSWER_S = 1.5  # minimum seconds to wait for answers of other sidecars
_READINGS = 4  # the same wait as a multiple of the time to read the records here, if that is longer
_REPEAT_S = 0.5  # seconds until a query is repeated
Send = Callable[[SidecarMessage, Sequence[Address]], None]  # sends a message to sidecars


class OtherHosts:
    """The sidecars of the other hosts of a job. Times are on `time.monotonic`.

    Attributes:
        addresses: By rank of another host, the sidecar of that host.
        is_warned: Whether a rank there has died, or its program has ended.

    Args:
        job: The name of the job.
        table: The processes of the job on this host.
        send: Sends a message to sidecars.
        address: The address of the sidecar of this host.
    """

    def __init__(self, job: str, table: ProcessTable, send: Send, address: Address) -> None:
        self._job, self._table, self._send, self._address = job, table, send, address
        self.addresses: dict[int, Address] = {}
        self.is_warned = False
        self._heard: set[Address] = set()  # the sidecars that have sent anything
        self._began = time.monotonic()  # when sidecars were last added
        self._greeted = 0.0  # when greetings were last sent
        # The current query:
        self._queried_at: float | None = None  # when it began; None if there is none
        self._asked_at = 0.0  # when its question was last sent
        self._serial = 0  # the number of its question
        self._answers: dict[int, RankState] = {}  # by rank
        self._sent: set[Address] = set()  # the sidecars that have sent anything since it began

    def add(self, hosts: Mapping[tuple[int, ...], Address]) -> None:
        """Add the sidecars of hosts, each by the ranks of its host."""
        self.addresses |= {rank: address for ranks, address in hosts.items() for rank in ranks}
        self._began, self._greeted = time.monotonic(), 0.0

    def absorb(self, other: OtherHosts) -> None:
        """Add the sidecars of a job that has turned out to be this one."""
        self.addresses |= other.addresses
        self._heard |= other._heard

    def receive(self, message: SidecarMessage) -> None:
        """Handle a greeting, a warning or an answer of the sidecar of one of these hosts.

        The sender must be in `addresses`. Questions and verdicts only count as a sign of life here.
        """
        address = self.addresses[message.sender]
        if message.kind == "hello" and message.address is not None:
            # The sidecar of that host may have been replaced by another one.
            replaced, address = address, message.address
            self._heard.discard(replaced)
            self.addresses |= {n: address for n, each in self.addresses.items() if each == replaced}
            if not message.is_reply:
                self._greet([address], is_reply=True)
        self._heard.add(address)
        self._sent.add(address)
        self.is_warned |= message.kind == "gone"
        if message.kind == "answer" and message.serial == self._serial:
            self._answers |= {state.rank: state for state in message.states}

    def answer(self, question: SidecarMessage, states: tuple[RankState, ...]) -> None:
        """Send the states of the ranks on this host to the sender of an `ask` message."""
        sender, is_repeat = self.addresses[question.sender], question.is_repeat
        self._post("answer", [sender], serial=question.serial, states=states, is_repeat=is_repeat)

    def broadcast(self, kind: str, **content: object) -> None:
        """Send a message with these fields of `SidecarMessage` to the sidecars of all other hosts."""
        if self.addresses:
            self._post(kind, [*{*self.addresses.values()}], **content)

    def _post(self, kind: str, to: Sequence[Address], **content: object) -> None:
        """Send a message with these fields of `SidecarMessage`."""
        message = SidecarMessage(self._job, kind, self._table.lowest, **content)  # pyright: ignore[reportArgumentType]
        self._send(message, to)

    def _greet(self, addresses: Sequence[Address], *, is_reply: bool = False) -> None:
        self._post("hello", addresses, address=self._address, is_reply=is_reply)

    def greet_unheard(self, now: float) -> str:
        """Send greetings to the sidecars that have not sent anything, every `_GREET_S`.

        Returns:
            After `_LOST_S`, once, a message about these sidecars, for the user; else empty.
        """
        unheard = {*self.addresses.values()} - self._heard
        if not unheard or now < self._greeted + _GREET_S or self._greeted > self._began + _LOST_S:
            return ""
        self._greeted = now
        self._greet([*unheard])
        if now <= self._began + _LOST_S:
            return ""
        names = ", ".join(sorted({each.host for each in unheard}))
        return f"no datagrams from {names}: ranks there that block others are not reported"

    def end_query(self) -> None:
        """Cancel the current query, if there is one."""
        self._queried_at = None

    def query(self, now: float, *, begins: bool) -> dict[int, RankState] | None:
        """Query the states of the ranks of other hosts. Called repeatedly, until it returns them.

        Args:
            now: The time.
            begins: Whether to begin a query if there is none.

        Returns:
            The states by rank; None if the other hosts have not answered yet, or if there is no query. Hosts
            that do not answer in time are omitted, or `silent` if they have sent nothing at all since the
            query began.
        """
        if self._queried_at is None:
            if not begins:
                return None
            self._queried_at, self._serial = now, self._serial + 1
            self._answers.clear()
            self._sent.clear()
            self._ask(self.addresses, now)
        missing = self._known() - self._answers.keys()
        if not missing or now > self._queried_at + max(_ANSWER_S, _READINGS * self._table.reading_s):
            self._queried_at = None
            return self._answers | self._silent()
        if now > self._asked_at + _REPEAT_S:  # datagrams may be lost, especially in large jobs
            self._ask(missing, now, is_repeat=True)
        return None

    def _known(self) -> set[int]:
        """The ranks of hosts whose sidecars have sent anything."""
        return {rank for rank, address in self.addresses.items() if address in self._heard}

    def _ask(self, ranks: Iterable[int], now: float, *, is_repeat: bool = False) -> None:
        """Send the current question to the sidecars of these ranks."""
        self._asked_at = now
        if addresses := [*{self.addresses[rank] for rank in ranks}]:
            self._post("ask", addresses, serial=self._serial, is_repeat=is_repeat)

    def _silent(self) -> dict[int, RankState]:
        """The states of the ranks of hosts whose sidecars have sent nothing since the query began."""
        return {
            rank: RankState(rank, "silent", silence("unknown", self.addresses[rank].host))
            for rank in sorted(self._known() - self._answers.keys())
            if self.addresses[rank] not in self._sent  # otherwise answers are lost or late
        }
