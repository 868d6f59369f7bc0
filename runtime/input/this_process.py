"""This process's number, which forked ones have to be told from; asking the system for it costs more than the
rest of handing out a batch."""

from __future__ import annotations

import os

pid = os.getpid()


def _forked() -> None:
    global pid  # noqa: PLW0603
    pid = os.getpid()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
