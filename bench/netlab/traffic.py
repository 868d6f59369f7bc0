"""Bytes that really crossed: the kernel's counters of every host's interface and of the uplinks."""

from __future__ import annotations

import json
from typing import Any, NamedTuple, Self

from bench.netlab import shell
from bench.netlab.lab import Lab


class Counters(NamedTuple):
    """Bytes on the wire, headers included.

    Attributes:
        sent: by each host, in the order of `Lab.hosts`.
        received: by each host, in the same order.
        uplinks: both directions of each rack's uplink together; empty on one switch.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    uplinks: tuple[int, ...]

    def since(self, before: Self) -> Counters:
        """The traffic after `before`."""
        pairs = (zip(now, then, strict=True) for now, then in zip(self, before, strict=True))
        return Counters(*(tuple(now - then for now, then in pair) for pair in pairs))


def counters(lab: Lab) -> Counters:
    """The current counters."""
    hosts = [_interfaces(host.name)["eth0"] for host in lab.hosts]
    switch = _interfaces(lab.switch) if lab.shape.racks > 1 else {}
    names = ["up1"] if lab.shape.racks == 2 else [f"up{rack + 1}" for rack in range(lab.shape.racks)]
    uplinks = [sum(switch[name]) for name in names if name in switch]
    return Counters(tuple(sent for sent, _ in hosts), tuple(got for _, got in hosts), tuple(uplinks))


def _interfaces(namespace: str) -> dict[str, tuple[int, int]]:
    """Bytes sent and received by each interface."""
    links: list[dict[str, Any]] = json.loads(shell.run("ip", "-n", namespace, "-j", "-s", "link"))
    return {
        link["ifname"]: (int(link["stats64"]["tx"]["bytes"]), int(link["stats64"]["rx"]["bytes"]))
        for link in links
    }
