"""Wait for a word of shared memory to change, without spending CPU: futex(2).

Words are 32 bits, aligned to 4 bytes.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import threading

_FUTEX = {"x86_64": 202, "ppc64le": 221, "s390x": 238}.get(platform.machine(), 98)  # the system call
_WAIT, _WAKE = 0, 1  # not the private operations: several processes map the word
ALL = 0x7FFFFFFF  # the number of waiting threads that the system call wakes at most
LOOK_S = 0.25  # seconds between two checks of a waiting process that its peers are alive


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_SYSCALL = ctypes.CDLL(None, use_errno=True).syscall
_SYSCALL.argtypes = (
    ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.POINTER(_Timespec), ctypes.c_void_p,
    ctypes.c_int,
)  # fmt: skip


@functools.lru_cache(maxsize=16)  # most waits use the same time
def _limit(seconds: float) -> _Timespec:
    return _Timespec(int(seconds), int(seconds % 1 * 1e9))


def wait(word: ctypes.c_uint32, expected: int, seconds: float) -> None:
    """Return when `word` differs from `expected`, after a wake, or after `seconds`; the caller tests the word
    again."""
    if word.value == expected:
        _SYSCALL(_FUTEX, ctypes.byref(word), _WAIT, expected, _limit(seconds), None, 0)


def wake(word: ctypes.c_uint32, most: int = ALL) -> None:
    """Wake up to `most` of the waiters for `word`, in all processes."""
    _SYSCALL(_FUTEX, ctypes.byref(word), _WAKE, most, None, None, 0)


def fence() -> None:
    """Order memory accesses: other processes see those before this call before those after it.

    Acquiring a lock keeps later accesses after it, and releasing it keeps earlier accesses before it.
    Processors with weak memory ordering guarantee no more, so this function acquires the lock a second time.
    """
    once = threading.Lock()
    once.acquire(blocking=False)
    once.release()
    once.acquire(blocking=False)
