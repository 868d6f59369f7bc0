"""The key-value store of the coordinator of `jax.distributed`.

Nothing here runs on devices, so it neither waits for programs that run nor delays them.
"""

from __future__ import annotations

from collections.abc import Sequence

from commplan.lowering.jax import _compat
from commplan.lowering.jax.typing_shim import jax


def address() -> str:
    """HOST:PORT of the coordinator."""
    return str(_compat.coordination().coordinator_address)


def all_gather_text(key: str, text: str, processes: Sequence[int], timeout_s: float) -> dict[int, str]:
    """The text of each of `processes`, by process. All of them call this, once for each `key`.

    Raises: JaxRuntimeError, as `barrier` does.
    """
    _compat.coordination().client.key_value_set(f"{key}/{jax.process_index()}", text)
    barrier(key, processes, timeout_s)
    return texts(key)


def texts(key: str) -> dict[int, str]:
    """The text of each process that has called `all_gather_text` so far."""
    entries = _compat.coordination().client.key_value_dir_get(key)
    return {int(name.rpartition("/")[2]): text for name, text in entries}


def barrier(key: str, processes: Sequence[int], timeout_s: float) -> None:
    """Wait for all of `processes`. Raises a JaxRuntimeError if one of them does not arrive in time."""
    _compat.coordination().client.wait_at_barrier(key, int(timeout_s * 1e3), list(processes))
