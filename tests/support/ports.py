"""Ports for the servers of tests: below those that the kernel gives to connections, which it may do at once.

A port that was bound as number 0 and let go again is one of the kernel's, and the next connection of any
process may get it before the server does.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

FIRST, LAST = 10_000, 32_768  # the kernel's range begins at LAST or above by default
WORKERS = 64  # of one run of the tests; each has the ports of one remainder


def own_ports() -> Iterator[int]:
    """Each port of this worker once. Concurrent runs begin at different ones."""
    end = LAST
    with contextlib.suppress(OSError):
        end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if end < FIRST + 1000:  # almost nothing below
        end = LAST
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    ports = range(FIRST + worker % WORKERS, end, WORKERS)
    begin = zlib.crc32(run.encode()) % len(ports)
    yield from ports[begin:]
    yield from ports[:begin]


PORTS, _LOCK = own_ports(), threading.Lock()


def free_port() -> int:
    """A free port that no other call returns, in any thread."""
    with _LOCK:
        for port in PORTS:
            with socket.socket() as place, contextlib.suppress(OSError):
                place.bind(("", port))
                return port
    raise AssertionError("no port is left")
