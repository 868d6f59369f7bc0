"""Wait for a word of shared memory to change, without spending CPU.

Uses futex(2) on Linux; elsewhere it polls with a back-off. Words are 32 bits, aligned to 4 bytes.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
import threading
import time

_SYSCALLS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "loongarch64": 98, "ppc64le": 221, "s390x": 238}
_WAIT, _WAKE = 0, 1  # not the private operations: several processes map the word
ALL = 0x7FFFFFFF  # the number of waiting threads that the system call wakes at most
_SLEEP_FIRST, _SLEEP_MOST = 0.0005, 0.02  # seconds
LOOK_S = 0.25  # seconds between two checks of a waiting process that its peers are alive


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _number() -> int | None:
    """The number of the futex system call; None if it is unavailable."""
    number = _SYSCALLS.get(platform.machine())
    if not sys.platform.startswith("linux") or number is None or sys.maxsize < 2**32:
        return None
    word = ctypes.c_uint32(0)
    answer = _call(number, word, _WAKE, 1, None)
    return number if answer == 0 else None


def _call(number: int, word: ctypes.c_uint32, operation: int, value: int, wait: _Timespec | None) -> int:
    """Call the system without the interpreter lock. Returns -1 on any error."""
    return _SYSCALL(number, ctypes.byref(word), operation, value, wait, None, 0)


_SYSCALL = ctypes.CDLL(None, use_errno=True).syscall
_SYSCALL.argtypes = (
    ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.POINTER(_Timespec), ctypes.c_void_p,
    ctypes.c_int,
)  # fmt: skip
_FUTEX = _number()


@functools.lru_cache(maxsize=16)  # most waits use the same time
def _limit(seconds: float) -> _Timespec:
    return _Timespec(int(seconds), int(seconds % 1 * 1e9))


def wait(word: ctypes.c_uint32, expected: int, seconds: float, *, futex: bool = True) -> None:
    """Return when `word` differs from `expected`, after a wake, or after `seconds`; the caller tests the word
    again."""
    if word.value != expected:
        return
    if _FUTEX is not None and futex:
        _SYSCALL(_FUTEX, ctypes.byref(word), _WAIT, expected, _limit(seconds), None, 0)
        return
    until, sleep = time.monotonic() + seconds, _SLEEP_FIRST
    while word.value == expected and time.monotonic() < until:
        time.sleep(sleep)
        sleep = min(2 * sleep, _SLEEP_MOST)


def wake(word: ctypes.c_uint32, most: int = ALL) -> None:
    """Wake up to `most` of the waiters for `word`, in all processes."""
    if _FUTEX is not None:
        _call(_FUTEX, word, _WAKE, most, None)


def fence() -> None:
    """Order memory accesses: other processes see those before this call before those after it.

    Acquiring a lock keeps later accesses after it, and releasing it keeps earlier accesses before it.
    Processors with weak memory ordering guarantee no more, so this function acquires the lock a second time.
    """
    once = threading.Lock()
    once.acquire(blocking=False)
    once.release()
    once.acquire(blocking=False)
