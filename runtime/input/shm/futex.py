"""Wait for a word of shared memory to change, without spending CPU: futex(2).

Words are 32 bits, aligned to 4 bytes.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import threading

_FUTEX = {"x86_64": 202, "ppc64le": 221, "s390x": 238}.get(platform.machine(), 98)  # the system call
# FUTEX_WAIT and FUTEX_WAKE, not their private variants, because several processes map the word.
_WAIT = 0
_WAKE = 1
ALL = 0x7FFFFFFF  # the largest number of waiters that the system call can wake
LOOK_S = 0.25  # seconds between two checks of a waiting process that its peers are alive


class _Timespec(ctypes.Structure):
    """struct timespec of clock_gettime(2)."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_SYSCALL = ctypes.CDLL(None, use_errno=True).syscall
_SYSCALL.argtypes = (
    ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.POINTER(_Timespec), ctypes.c_void_p,
    ctypes.c_int,
)  # fmt: skip


@functools.lru_cache(maxsize=16)  # most waits use the same time
def _limit(seconds: float) -> _Timespec:
    """The relative timeout of a wait."""
    return _Timespec(int(seconds), int(seconds % 1 * 1e9))


def wait(word: ctypes.c_uint32, expected: int, seconds: float) -> None:
    """Wait until another thread or process wakes this one, up to `seconds`.

    Returns at once if `word` is not `expected`. It may also return without a reason, so the caller tests its
    condition again.

    Args:
        word: the word, in memory that all processes map.
        expected: the value that the caller has read before it tested its condition.
        seconds: the timeout, not negative.
    """
    if word.value == expected:
        _SYSCALL(_FUTEX, ctypes.byref(word), _WAIT, expected, _limit(seconds), None, 0)


def wake(word: ctypes.c_uint32, most: int = ALL) -> None:
    """Wake up to `most` of the threads that wait for `word`, in all processes."""
    _SYSCALL(_FUTEX, ctypes.byref(word), _WAKE, most, None, None, 0)


def fence() -> None:
    """Order memory accesses: other processes see the earlier ones of this thread before the later ones.

    Acquiring a lock keeps later accesses after it, and releasing it keeps earlier accesses before it.
    Processors with weak memory ordering guarantee no more, so this function acquires the lock a second time.
    """
    once = threading.Lock()
    once.acquire(blocking=False)
    once.release()
    once.acquire(blocking=False)
