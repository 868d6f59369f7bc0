"""Messages between the sidecars of a job's hosts: greetings, states of ranks, and verdicts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from commplan.recorder.processes import silence
from commplan.recorder.rank_state import RankState
from commplan.sidecar.mail import Address, SidecarMessage
from commplan.sidecar.process_table import ProcessTable

_GREET_S, _LOST_S = 2.0, 30.0  # between two greetings; until an unheard sidecar is reported
_ANSWER_S, _REPEAT_S = 1.5, 0.5  # minimum wait for answers of other sidecars; until the query is repeated
_READINGS = 4  # wait for answers, as a multiple of the time to read the records here
Send = Callable[[SidecarMessage, Sequence[Address]], None]


class OtherHosts:
    """The sidecars of the other hosts of a job.

    Attributes:
        addresses: By rank of another host, the sidecar of that host.
        is_warned: Whether ranks there have died, or their program has ended.

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
        self._heard: set[Address] = set()
        self._began, self._greeted = time.monotonic(), 0.0
        self._queried_at: float | None = None
        self._asked_at, self._serial = 0.0, 0
        self._answers: dict[int, RankState] = {}
        self._sent: set[Address] = set()  # the sidecars that have sent anything since the query

    def add(self, hosts: Mapping[tuple[int, ...], Address]) -> None:
        """Add the sidecars of hosts, by their ranks."""
        self.addresses |= {rank: address for ranks, address in hosts.items() for rank in ranks}
        self._began, self._greeted = time.monotonic(), 0.0

    def absorb(self, other: OtherHosts) -> None:
        self.addresses |= other.addresses
        self._heard |= other._heard

    def take(self, message: SidecarMessage) -> None:
        """Take a message of the sidecar of one of these hosts."""
        address = self.addresses[message.sender]
        if message.kind == "hello" and message.address is not None:
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
        """Send the states of the ranks on this host to the sidecar that asks for them."""
        to, is_repeat = self.addresses[question.sender], question.is_repeat
        self._post("answer", [to], serial=question.serial, states=states, is_repeat=is_repeat)

    def tell(self, kind: str, **content: object) -> None:
        """Send a message to the sidecars of all other hosts."""
        if self.addresses:
            self._post(kind, [*{*self.addresses.values()}], **content)

    def _post(self, kind: str, to: Sequence[Address], **content: object) -> None:
        message = SidecarMessage(self._job, kind, self._table.lowest, **content)  # pyright: ignore[reportArgumentType]
        self._send(message, to)

    def _greet(self, addresses: Sequence[Address], *, is_reply: bool = False) -> None:
        self._post("hello", addresses, address=self._address, is_reply=is_reply)

    def greet_unheard(self, now: float) -> str:
        """Find out which sidecars can be reached. Returns a message about those that cannot, once."""
        unheard = {*self.addresses.values()} - self._heard
        if not unheard or now < self._greeted + _GREET_S or self._greeted > self._began + _LOST_S:
            return ""
        self._greeted = now
        self._greet([*unheard])
        if now <= self._began + _LOST_S:
            return ""
        names = ", ".join(sorted({each.host for each in unheard}))
        return f"no datagrams from {names}: ranks there that block others are not reported"

    # A query.

    def end_query(self) -> None:
        self._queried_at = None

    def query(self, now: float, *, begins: bool) -> dict[int, RankState] | None:
        """The states of the ranks of other hosts; None until they have answered. Must be repeated then.

        begins: whether to begin a query if none is under way.
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
        """The ranks of hosts whose sidecars were heard."""
        return {rank for rank, address in self.addresses.items() if address in self._heard}

    def _ask(self, ranks: Iterable[int], now: float, *, is_repeat: bool = False) -> None:
        """Ask the sidecars of these ranks for states."""
        self._asked_at = now
        if addresses := [*{self.addresses[rank] for rank in ranks}]:
            self._post("ask", addresses, serial=self._serial, is_repeat=is_repeat)

    def _silent(self) -> dict[int, RankState]:
        """The states of the ranks of hosts whose sidecars send nothing."""
        return {
            rank: RankState(rank, "silent", silence("unknown", self.addresses[rank].host))
            for rank in sorted(self._known() - self._answers.keys())
            if self.addresses[rank] not in self._sent  # otherwise answers are lost or late
        }
