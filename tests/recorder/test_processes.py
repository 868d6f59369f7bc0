"""The kernel's information about processes of this machine."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

from commplan.recorder.processes import process_state


def test_a_process_is_alive_then_stopped_then_dead():
    command = [sys.executable, "-S", "-c", "import time; print(flush=True); time.sleep(60)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            assert process_state(process.pid) == process_state(process.pid, 0.5) == "alive"
            assert process_state(process.pid, 3600) == "dead", "another process has its number now"
            process.send_signal(signal.SIGSTOP)
            until = time.monotonic() + 60
            while process_state(process.pid) != "stopped":
                assert time.monotonic() < until
                time.sleep(0.01)
        finally:
            process.kill()
    assert process_state(process.pid) == "dead"
