"""The tests behave alike if their parent ignores or blocks signals."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

STATE = """
import signal
print(*sorted(n for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN))
print(*sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""
SESSION = f"""
import signal, subprocess, sys
ignored, blocked = map(eval, sys.argv[1:])
for number in ignored:
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
state = [sys.executable, "-c", {STATE!r}]
print(subprocess.run(state, capture_output=True, text=True).stdout.split("\\n")[:2])
import conftest
exec({STATE!r}, {{}})
sys.stdout.flush()
subprocess.run(state)
"""
USED = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1, signal.SIGALRM)


def session(ignored: tuple[int, ...], blocked: tuple[int, ...]) -> list[str]:
    """The settings that a child inherits before conftest.py is imported; then the state of the session and of
    a child."""
    words = [repr(tuple(map(int, numbers))) for numbers in (ignored, blocked)]
    done = subprocess.run(
        [sys.executable, "-c", SESSION, *words], cwd=Path(__file__).parent,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.splitlines()


@pytest.mark.parametrize("how", ["ignored", "blocked"])
def test_signals_that_tests_use_are_neither_ignored_nor_blocked(how: str):
    ignored, blocked = (USED, ()) if how == "ignored" else ((), USED)
    before, *after = session(ignored, blocked)
    assert str(int(signal.SIGINT)) in before
    usual = session((), ())[1:]
    assert after == usual
    assert usual[1:3] == ["", "True"]
    assert not set(map(str, map(int, USED))) & set(usual[0].split())


def test_a_run_under_nohup_outlives_its_terminal():
    assert str(int(signal.SIGHUP)) in session((signal.SIGHUP,), ())[1].split()
