"""Running `ip` and `tc`, and their prerequisites."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

from commplan.diagnostics import fail


def require() -> None:
    """Raises CP1120 unless namespaces can be made here: root, `ip` and `tc`."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        fail(
            "CP1120",
            f"the emulated cluster needs {' and '.join(f'`{tool}`' for tool in missing)}",
            "they come with the package iproute2",
        )
    if os.geteuid() != 0:
        fail("CP1120", "the emulated cluster needs root: it makes network namespaces", "run it with sudo")


def run(*words: str, check: bool = True) -> str:
    """The standard output of a command. Raises CP1120 with its message if it fails and `check` is set."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if check and done.returncode:
        output = (done.stderr or done.stdout).strip()
        fail(
            "CP1120", f"`{' '.join(words)}` failed: {output}", "this kernel may lack namespaces, veth or tbf"
        )
    return done.stdout


def inside(namespace: str, command: Sequence[str], hostname: str | None = None) -> list[str]:
    """The command prefix that runs `command` in `namespace`, and under `hostname` if given."""
    words = ["ip", "netns", "exec", namespace]
    if hostname is None:
        return [*words, *command]
    script = 'hostname "$0"; exec "$@"'
    return [*words, "unshare", "--uts", "sh", "-c", script, hostname, *command]
