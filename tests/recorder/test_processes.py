"""The kernel's information about processes of this machine."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from commplan.recorder.processes import WATCH_THREAD, process_state, waits_for_core

NAMED = f"""
import threading, time
def run():
    open("/proc/thread-self/comm", "w").write({WATCH_THREAD!r})
    print(flush=True)
    while True: PAUSE
threading.Thread(target=run).start()
"""


@pytest.mark.parametrize(("pause", "waits"), [("pass", True), ("time.sleep(9)", False)])
def test_a_thread_that_could_run_is_told_from_one_that_sleeps(pause: str, waits: bool):
    command = [sys.executable, "-S", "-c", NAMED.replace("PAUSE", pause)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            until = time.monotonic() + 60
            while waits_for_core(process.pid) != waits and time.monotonic() < until:
                time.sleep(0.01)
            assert waits_for_core(process.pid) == waits
            process.send_signal(signal.SIGSTOP)
            # The process is stopped before its last thread is, which must come to a core for it.
            while process_state(process.pid) != "stopped" or waits_for_core(process.pid):
                assert time.monotonic() < until
                time.sleep(0.01)
        finally:
            process.kill()
    assert process_state(process.pid) == "dead" and not waits_for_core(process.pid)
