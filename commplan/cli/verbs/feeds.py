"""`commplan feeds`: list this user's feeds on this host, and their members."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from typing import Any

import msgspec

from commplan.cli.console import Console, fold_table
from commplan.diagnostics import plural
from commplan.ir.types import sized
from commplan.runtime.input.feeds.status import FeedStatus, feeds

_EVERY_S = 1.0  # seconds between two updates of --watch


def run(args: Namespace, console: Console) -> int:
    """List the feeds once, or repeatedly under --watch until SIGINT."""
    if not console.is_human:
        console.document(feeds=[msgspec.to_builtins(feed, str_keys=True) for feed in feeds()])
        return 0
    if not args.watch:
        _show(feeds(), console)
        return 0
    if not sys.stdout.isatty():
        while True:  # append further lists
            console.put(f"{time.strftime('%H:%M:%S')}\n")
            _show(feeds(), console)
            console.flush()
            time.sleep(_EVERY_S)
    from rich.console import Console as Rich
    from rich.console import Group
    from rich.live import Live

    screen = Rich(no_color=not console.color(sys.stdout))
    with Live(console=screen, refresh_per_second=4) as live:
        while True:
            live.update(Group(*_drawn(feeds())))
            time.sleep(_EVERY_S)


def _show(statuses: list[FeedStatus], console: Console) -> None:
    """Print the feeds once."""
    if not statuses:
        console.put("no feed of this user runs on this host\n")
    for part in _drawn(statuses):
        console.show(lambda screen, part=part: screen.print(part), 120)


def _drawn(statuses: list[FeedStatus]) -> list[Any]:
    """A title and a table of members for each feed, as rich renderables."""
    parts: list[Any] = []
    for feed in statuses:
        members = plural(len(feed.members), "member")
        parts.append(f"{feed.name}: plan {feed.plan}, phase {feed.phase}, {members}, {sized(feed.nbytes)}")
        titles = (
            "member",
            "process",
            "batch",
            "epoch",
            "records",
            "records/s",
            "waited",
            "made",
            "waits for",
        )
        table = fold_table(*titles)
        for member in feed.members:
            table.add_row(
                str(member.member), str(member.pid), str(member.batch), str(member.epoch),
                str(member.records), f"{member.rate:.0f}", f"{member.waited_s:.1f} s",
                str(feed.made.get(member.pid, 0)),
                member.waits_for or ("" if member.is_held else "nothing (it reads alone)"),
            )  # fmt: skip
        parts.append(table)
    return parts
