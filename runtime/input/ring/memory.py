"""The memory of a ring in one process: its words, its lock, its bells, and the liveness of processes.

Each process holds a record lock on one byte of the file until it ends, so the locks show which processes are
alive. Record locks belong to a process, not to a descriptor: closing any descriptor of the file releases all
of them. Therefore each process opens the file only once (`meeting.visited`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar, NoReturn, TypeVar

import msgspec

from commplan.diagnostics import CommplanError, fail
from commplan.runtime.input.observe.wait_log import ClosedError, log_warning
from commplan.runtime.input.ring import words
from commplan.runtime.input.ring.words import PROCESS_LOCK, RING_LOCK, Record, Shape
from commplan.runtime.input.shm import futex
from commplan.runtime.input.shm.futex import fence
from commplan.runtime.input.shm.locks import is_locked, lock_byte, lock_holder, unlock_byte
from commplan.runtime.input.shm.slots import Slots, mapped, owner_of
from commplan.wait import Wait, until

if TYPE_CHECKING:
    from commplan.runtime.machines.pinned import Pinning

_LOCK_S = 30.0  # seconds to wait for the lock, which a process holds for less than a millisecond
_Result = TypeVar("_Result")


def close_file(descriptor: int, key: tuple[int, int], process: int) -> None:
    """Close a descriptor, unless it belongs to another file or to another process now.

    Args:
        descriptor: the descriptor. It stays open if another file has its number now.
        key: the device and inode of its file.
        process: the PID of the process that opened it. It stays open in a process forked from that one.
    """
    with contextlib.suppress(OSError):
        status = os.fstat(descriptor)
        if os.getpid() == process and (status.st_dev, status.st_ino) == key:
            os.close(descriptor)


class SharedMemory:
    """The memory of a ring.

    A bell is a 32-bit word that changes to wake the threads that wait for it (`ring_bell`, `futex.wait`).
    Cursors wait for `made`, supervisors and joining processes for `changed`, and the makers of a process for
    the bell of its place.

    Args:
        descriptor: the open file; closed by `close`.
        key: the device and inode of the file.
        title: the name of the ring in messages, such as "feed 'a'".
        shape: the sizes of the ring.

    Attributes:
        opened: all objects of this class in this process; some may have been closed.
        descriptor: the open file; -1 after `close`.
        key: the device and inode of the file.
        title: the name of the ring in messages.
        shape: the sizes of the ring.
        is_stopped: whether this process is leaving the ring.
        header: the words of the ring (`words.HEADER`).
        processes: the words of each place of a process (`words.PROCESS`).
        cursors: the words of each place of a cursor (`words.CURSOR`).
        slots: the words of each slot (`words.SLOT`), and last those of a slot that has just been opened.
    """

    opened: ClassVar[weakref.WeakSet[SharedMemory]] = weakref.WeakSet()

    def __init__(self, descriptor: int, key: tuple[int, int], title: str, shape: Shape) -> None:
        self.descriptor, self.key, self.title, self.shape = descriptor, key, title, shape
        self.is_stopped = False
        self._place = -1  # the place that this process has locked
        self._is_private = shape.processes == 1  # then a lock between threads suffices
        # Python's `mmap` would duplicate the descriptor, and closing the duplicate would release all locks.
        nbytes = shape.data_at
        self._root = owner_of(mapped(nbytes, mmap.MAP_SHARED, descriptor, 0), nbytes)
        self._table = memoryview(self._root).cast("B").cast("Q")  # reading an item is as fast as for a list
        (self.header,) = self._records(0, 1, words.HEADER, words.BELLS["made"])
        offset, record_nbytes = words.PAGE, words.RECORD_NBYTES
        self.processes = self._records(offset, shape.processes, words.PROCESS)
        bells = (offset + place * record_nbytes + words.WORK_BELL for place in range(shape.processes))
        self._work = [self._bell(bell) for bell in bells]
        offset += shape.processes * record_nbytes
        self.cursors = self._records(offset, shape.cursors, words.CURSOR)
        offset += shape.cursors * record_nbytes
        self.slots = self._records(offset, shape.slots + 1, words.SLOT, shape.slot_record_nbytes)
        self._bells = {name: self._bell(bell) for name, bell in words.BELLS.items()}
        self._lock, self._closing = threading.RLock(), threading.Lock()
        SharedMemory.opened.add(self)
        self._finalizer = weakref.finalize(  # if the caller is interrupted
            self, close_file, descriptor, key, os.getpid()
        )
        self._finalizer.atexit = False

    def _records(
        self, offset: int, count: int, indices: Mapping[str, int], nbytes: int = words.RECORD_NBYTES
    ) -> list[Record]:
        """`count` records of `nbytes` each, from the byte `offset` on."""
        starts = ((offset + number * nbytes) // 8 for number in range(count))
        return [Record(self._table[start : start + nbytes // 8], indices) for start in starts]

    def _bell(self, offset: int) -> ctypes.c_uint32:
        """The bell at the byte `offset`."""
        return ctypes.c_uint32.from_buffer(self._root, offset)

    def lay_out(self, facts: Mapping[str, str], **values: int) -> None:
        """Write the header of a new ring.

        Args:
            facts: descriptions that must be equal in all processes, by subject.
            **values: words of the header other than `magic`, `facts` and those of the shape.

        Raises:
            CommplanError: CP0928 if `facts` are too long.
        """
        data = msgspec.json.encode(facts)
        if len(data) > words.FACTS_NBYTES:
            fail(
                "CP0928",
                f"the names and digests of {self.title} take {len(data)} bytes",
                f"{words.FACTS_NBYTES} at most: shorter or fewer names of sources and functions",
            )
        ctypes.memmove(ctypes.addressof(self._root) + self.shape.facts_at, data, len(data))
        self.header.set(**self.shape._asdict(), facts=len(data), **values)
        fence()  # a process that reads `magic` must see all other words
        self.header.set(magic=words.MAGIC)

    def facts(self) -> dict[str, str]:
        """The facts of `lay_out`.

        Raises:
            ValueError: if they cannot be decoded.
        """
        nbytes = min(self.header.get("facts"), words.FACTS_NBYTES)
        data = ctypes.string_at(ctypes.addressof(self._root) + self.shape.facts_at, nbytes)
        return msgspec.json.decode(data, type=dict[str, str])

    def plan(self) -> bytes | None:
        """The compiled plan that `keep_plan` stored; None if there is none."""
        nbytes = min(self.header.get("plan"), words.PLAN_NBYTES)
        fence()  # the plan must be read after its size
        address = ctypes.addressof(self._root) + self.shape.facts_at + words.FACTS_NBYTES
        return ctypes.string_at(address, nbytes) if nbytes else None

    def keep_plan(self, data: bytes) -> None:
        """Store the compiled plan for other processes, unless it is too long. The caller holds the lock."""
        if len(data) <= words.PLAN_NBYTES:
            address = ctypes.addressof(self._root) + self.shape.facts_at + words.FACTS_NBYTES
            ctypes.memmove(address, data, len(data))
            fence()  # a process that reads the size must see the plan
            self.header.set(plan=len(data))

    def add_cores(self, cores: Iterable[int]) -> int:
        """Add the cores of this process to the set of all processes; returns the size of the set.

        Numbers of cores beyond the size of the bit set wrap around. The caller excludes other processes.
        """
        bits = memoryview(self._root).cast("B")[words.CORES_AT : words.CORES_AT + words.CORES_NBYTES]
        mine = sum(1 << core for core in {core % (8 * len(bits)) for core in cores})
        bits[:] = (int.from_bytes(bits, "little") | mine).to_bytes(len(bits), "little")
        return int.from_bytes(bits, "little").bit_count()

    def mapped_slots(self, pinning: Pinning | None = None, *, is_private: bool = False) -> Slots:
        """Create a mapping of the slots for one cursor or for the producers.

        Args:
            pinning: registers the mapping with devices; None without devices.
            is_private: see `Slots`.

        Raises:
            CommplanError: CP0923 if the slots cannot be mapped.
        """
        shape = self.shape
        try:
            return Slots(
                self.descriptor, shape.data_at, shape.slot_nbytes, shape.slots, pinning=pinning,
                is_private=is_private,
            )  # fmt: skip
        except OSError as error:
            fail(
                "CP0923",
                f"{shape.slots} batches of {shape.slot_nbytes} bytes cannot be mapped: {error.strerror}",
                "make the batch or `prefetch` smaller",
            )

    def close(self) -> None:
        """Close the file and release all locks. The mapping exists until no array references it."""
        with self._closing:
            descriptor, self.descriptor = self.descriptor, -1
            self._finalizer.detach()
        if descriptor >= 0:
            os.close(descriptor)

    # --- locks ---

    def locked(self) -> Hold:
        """Hold the ring's lock during a `with` block.

        The lock protects claims, new units, joins and the words of dead processes.

        The holder may die at any point, so each write under the lock must leave the words consistent.

        Raises:
            CommplanError: CP0921 if another process holds the lock for 30 s; it is probably stopped.
            ClosedError: if this process is leaving the ring.
        """
        return Hold(self)

    def is_held(self) -> bool:
        """Whether the calling thread holds the lock."""
        return self._lock._is_owned()  # type: ignore[attr-defined]

    def acquire_lock(self) -> None:
        """Acquire the lock. The calling thread does not hold it. See `locked`."""
        while not self._lock.acquire(timeout=futex.LOOK_S):  # the holder may wait for a stopped process
            self._check_open()
        if not self._locked_now():
            _ = until(
                lambda seconds: self._locked_now() or bool(time.sleep(min(seconds, 0.0005))),
                Wait(_LOCK_S, self._locked_late),
            )

    def release_lock(self) -> None:
        """Release the lock, which the calling thread holds."""
        descriptor = self.descriptor
        if descriptor >= 0 and not self._is_private:
            with contextlib.suppress(OSError):  # another thread has closed the file
                unlock_byte(descriptor, RING_LOCK)
        self._lock.release()

    def _check_open(self) -> None:
        """Raise `ClosedError` if the file is closed or this process is leaving the ring."""
        if self.descriptor < 0 or self.is_stopped:  # a leaving process must not wait for a stopped one
            raise ClosedError

    def _locked_now(self) -> bool:
        """Lock the byte of the file, if it is free. A ring of a single process needs only the thread lock."""
        descriptor = self.descriptor
        self._check_open()
        return self._is_private or lock_byte(descriptor, RING_LOCK)

    def _locked_late(self, waited: float) -> NoReturn:
        """Raise CP0921 after `waited` seconds."""
        holder = self.lock_holder()
        fail(
            "CP0921",
            f"process {holder} has held the lock of {self.title} for {waited:.0f} s",
            f"expected: less than a millisecond. If the process is stopped, kill -CONT {holder} continues it",
        )

    def lock_holder(self) -> int:
        """The PID of another process that holds the ring's lock; 0 if there is none.

        Raises:
            ClosedError: after `close`.
        """
        with self._opened_file() as descriptor:
            return lock_holder(descriptor, RING_LOCK)

    def lock_place(self, place: int) -> bool:
        """Lock `place` for this process until `close`. Returns False if another process has locked it."""
        if not lock_byte(self.descriptor, PROCESS_LOCK + place):
            return False
        self._place = place
        return True

    def lives(self, place: int) -> bool:
        """Whether the process at `place` is alive.

        Raises:
            ClosedError: after `close`.
        """
        if place == self._place:  # the kernel does not report a process's own locks
            return True
        with self._opened_file() as descriptor:
            return is_locked(descriptor, PROCESS_LOCK + place)

    @contextlib.contextmanager
    def _opened_file(self) -> Generator[int]:
        """The descriptor. Raises `ClosedError` if the file is closed before or during the block."""
        descriptor = self.descriptor
        if descriptor < 0:
            raise ClosedError
        try:
            yield descriptor
        except OSError as error:
            if error.errno == errno.EBADF:
                raise ClosedError from None
            raise

    # --- bells ---

    def bell(self, name: str) -> ctypes.c_uint32:
        """The bell `name`: "made" or "changed"."""
        return self._bells[name]

    def work_bell(self, place: int) -> ctypes.c_uint32:
        """The bell of the producers of the process at `place`."""
        return self._work[place]


class Hold:
    """A `with` block that holds the lock of a ring; see `SharedMemory.locked`.

    Args:
        memory: the memory of the ring.

    An interruption of the block releases the lock, even if its traceback is kept. The exception is an
    interruption on entry of `__exit__`: then the lock is released when the traceback is dropped. A suspended
    generator would keep the lock after any interruption.
    """

    _holds = False

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory

    def __enter__(self) -> None:
        if self._memory.is_held():  # in an outer block, which releases the lock
            return
        self._holds = True
        try:
            self._memory.acquire_lock()
        except BaseException:
            self._release()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._release()
        finally:
            self._release()  # if the first call was interrupted

    def _release(self) -> None:
        """Release the lock if this block holds it. May be called again after an interruption."""
        if self._holds:
            if self._memory.is_held():
                self._memory.release_lock()
            self._holds = False

    def __del__(self) -> None:
        if self._holds:  # interrupted on entry of `__exit__`
            self._release()


def persistent(change: Callable[[], _Result]) -> _Result:
    """Return `change()`, which acquires a ring's lock. Log CP0921 and retry if another process holds it.

    Raises:
        ClosedError: if this process is leaving the ring.
    """
    while True:
        try:
            return change()
        except CommplanError as error:
            log_warning("%s", error.diagnostics[0].message)


def ring_bell(bell: ctypes.c_uint32, most: int = futex.ALL) -> None:
    """Wake the threads that wait for `bell`, or `most` of them.

    The increment is not atomic: two processes may write the same value, and a thread that begins to wait
    between these writes may miss the second. Therefore all waits are short, and the condition is tested again
    after each.
    """
    bell.value = (bell.value + 1) & 0xFFFFFFFF
    futex.wake(bell, most)


os.register_at_fork(after_in_child=SharedMemory.opened.clear)
