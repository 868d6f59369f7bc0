"""Datagrams between the sidecars of a job's hosts: their addresses, their content, and the socket.

A datagram is the key of its receiver and a compressed `SidecarMessage`. Datagrams may be lost.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import socket
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec

from commplan.recorder.rank_state import RankState

_LONGEST = 60_000  # maximum bytes of a datagram; the protocol allows 64 kB
_SHORT = 1400  # maximum bytes of a repeated datagram, which fits in a packet: some networks drop larger ones
_KEY = 64  # maximum bytes of a key
_BUFFER = 1 << 23  # bytes of the receive buffer, if the system allows it
_LARGEST = 1 << 22  # maximum bytes of a message that is not compressed
_GET_ADDRESS = 0x8915  # SIOCGIFADDR: the IPv4 address of a network interface


class Address(NamedTuple):
    """The address of a sidecar.

    Attributes:
        host: The name of its host.
        port: The UDP port of its socket.
        key: A secret of the sidecar with which messages to it begin.
        addresses: The IPv4 addresses of its host. Not all of them need to be reachable.
    """

    host: str
    port: int
    key: str
    addresses: tuple[str, ...]


class SidecarMessage(msgspec.Struct, frozen=True, array_like=True):
    """A message about a job.

    Attributes:
        job: The name of the job, as in its records.
        kind: One of:

            - `hello`: a greeting.
            - `ask`: a question for the states of ranks.
            - `answer`: an answer to a question.
            - `gone`: a rank on the sender's host has died, or its program has ended.
            - `verdict`: a verdict for the records of all ranks.
        sender: The lowest rank of the job on the sender's host.
        serial: The number of a question, and of its answers.
        states: In an answer, the states of ranks on the sender's host, or some of them.
        text, line, abandoned: In a verdict, see `recorder.live.write_verdict`.
        address: In a greeting, the address of the sender, which may replace a killed sidecar; else None.
        is_reply: Whether a greeting answers another one.
        is_repeat: Whether a question is repeated, or an answer belongs to a repeated question.
    """

    job: str
    kind: Literal["hello", "ask", "answer", "gone", "verdict"]
    sender: int
    serial: int = 0
    states: tuple[RankState, ...] = ()
    text: str = ""
    line: str = ""
    abandoned: bool = False
    address: Address | None = None
    is_reply: bool = False
    is_repeat: bool = False


def open_socket() -> socket.socket:
    """A new socket for datagrams on any free port, for IPv6 and IPv4 if the host has both, else for IPv4.

    Raises:
        OSError: If it cannot be created.
    """
    with contextlib.suppress(OSError):
        both = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
        try:
            both.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
            both.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            both.bind(("::", 0))
        except OSError:
            both.close()
            raise
        return both
    single = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    single.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
    single.bind(("", 0))
    return single


def own_addresses() -> tuple[str, ...]:
    """The IPv4 addresses of the network interfaces of this host, without loopback addresses."""
    addresses: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                addresses.append(socket.inet_ntoa(fcntl.ioctl(probe, _GET_ADDRESS, request)[20:24]))
    return tuple(address for address in addresses if not address.startswith("127."))


def send(line: socket.socket, message: SidecarMessage, to: Sequence[Address]) -> None:
    """Send a message to sidecars, which may be lost, also if a datagram cannot be sent.

    If the message is too long for a datagram, its states are distributed over several messages.
    """
    data = zlib.compress(msgspec.json.encode(message), 1)
    longest = _SHORT if message.is_repeat else _LONGEST
    if len(data) > longest - _KEY and len(message.states) > 1:
        middle = len(message.states) // 2
        for states in (message.states[:middle], message.states[middle:]):
            send(line, msgspec.structs.replace(message, states=states), to)
        return
    prefix = "::ffff:" if line.family == socket.AF_INET6 else ""
    for address in to:
        for host in address.addresses:
            with contextlib.suppress(OSError):
                line.sendto(address.key.encode() + data, socket.MSG_DONTWAIT, (prefix + host, address.port))


def received(line: socket.socket, key: str) -> Iterator[SidecarMessage]:
    """The messages to the sidecar with this key that have arrived. Other datagrams are dropped."""
    with contextlib.suppress(OSError):
        while True:
            data = line.recv(_LONGEST, socket.MSG_DONTWAIT)
            if hmac.compare_digest(data[: len(key)], key.encode()):
                with contextlib.suppress(msgspec.DecodeError, zlib.error):
                    text = zlib.decompressobj().decompress(data[len(key) :], _LARGEST)
                    yield msgspec.json.decode(text, type=SidecarMessage)
