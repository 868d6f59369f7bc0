"""Exchange texts through the key-value store of the coordinator of `jax.distributed`.

Nothing here runs on devices, so it neither waits for running programs nor delays them.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence

import jax

from commplan.lowering.jax import _compat

_ANSWER_MS = 10_000  # Milliseconds to wait for the coordinator's answer.


def job() -> str:
    """A random name of this job, which is the same in all processes and all calls.

    Raises:
        JaxRuntimeError: if the coordinator does not answer.
    """
    client, key = _compat.coordination().client, "commplan/job"
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # Another process has set it.
        client.key_value_set(key, secrets.token_hex(4))
    return str(client.blocking_key_value_get(key, _ANSWER_MS))


def all_gather_text(key: str, text: str, processes: Sequence[int], timeout_s: float) -> dict[int, str]:
    """Exchange a text between processes.

    All of `processes` call this once for each `key`, which no other call may use.

    Args:
        key: The name of the exchange.
        text: The text of this process.
        processes: The numbers of all processes that take part.
        timeout_s: Seconds to wait for the others.

    Returns:
        The text of each process, by its number.

    Raises:
        JaxRuntimeError: if a process does not arrive within `timeout_s` seconds.
    """
    _compat.coordination().client.key_value_set(f"{key}/{jax.process_index()}", text)
    barrier(key, processes, timeout_s)
    return texts(key)


def texts(key: str) -> dict[int, str]:
    """The texts of the processes that have called `all_gather_text` so far, by process."""
    entries = _compat.coordination().client.key_value_dir_get(key)
    return {int(name.rpartition("/")[2]): text for name, text in entries}


def barrier(key: str, processes: Sequence[int], timeout_s: float) -> None:
    """Wait until all of `processes` have called this with `key`, which no other barrier may use.

    Raises:
        JaxRuntimeError: if a process does not arrive within `timeout_s` seconds.
    """
    _compat.coordination().client.wait_at_barrier(key, int(timeout_s * 1e3), list(processes))
