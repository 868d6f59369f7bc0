"""The slots of a ring as one process maps them, and the lifetime of arrays over them.

Arrays of a batch are views of the slot. Each one (an `np.ndarray`, a JAX array, a pending computation) keeps
its root alive, the owner of the memory of all views, and the slot is released when its root dies. A process
that keeps more slots than allowed must not block the others. In that case the pages under its arrays are
replaced by private pages with the same content at the same addresses, which frees the slot.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from commplan.diagnostics import fail

if TYPE_CHECKING:
    from commplan.runtime.machines.pinned import Pinning

Root = Any  # a ctypes array of bytes

# Arguments and results of mmap(2) and mremap(2).
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_FAILED = ctypes.c_void_p(-1).value  # MAP_FAILED
_MOVE_TO = 1 | 2  # MREMAP_MAYMOVE | MREMAP_FIXED

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
)  # fmt: skip
_LIBC.munmap.restype = ctypes.c_int
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_LIBC.mremap.restype = ctypes.c_void_p
_LIBC.mremap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p,
)  # fmt: skip


def mapped(nbytes: int, flags: int, descriptor: int, offset: int) -> int:
    """Map memory for reading and writing, as mmap(2).

    Args:
        nbytes: the size of the mapping.
        flags: such as `mmap.MAP_SHARED`.
        descriptor: the file; -1 for anonymous memory.
        offset: the offset in the file, a multiple of the page size.

    Returns:
        The address.

    Raises:
        OSError: if the memory cannot be mapped.
    """
    address = _LIBC.mmap(None, nbytes, _READ_WRITE, flags, descriptor, offset)
    if address is None or address == _FAILED:
        raise OSError(ctypes.get_errno(), "memory cannot be mapped")
    return address


def give_back_freed() -> None:
    """Return freed memory of the C library's heap to the system: about 1 MB after modules were loaded."""
    if hasattr(_LIBC, "malloc_trim"):  # glibc
        _LIBC.malloc_trim(0)


def owner_of(address: int, nbytes: int, pinning: Pinning | None = None) -> Root:
    """A mapping as bytes, which is unmapped when the last view of them is gone.

    Args:
        address: the address, as `mapped` returns it.
        nbytes: the size of the mapping.
        pinning: has registered the mapping with devices; None if it is not registered.
    """
    # This class and not Python's `mmap`, which would duplicate the descriptor of the file: closing the
    # duplicate would release every lock of this process on the file.
    buffer = (ctypes.c_ubyte * nbytes).from_address(address)
    weakref.finalize(buffer, _unmap, address, nbytes, pinning).atexit = False
    return buffer


def _unmap(address: int, nbytes: int, pinning: Pinning | None) -> None:
    """Finalize a mapping."""
    if pinning is not None:
        pinning.unpin(address)
    _LIBC.munmap(address, nbytes)


def privatize_pages(address: int, nbytes: int) -> None:
    """Replace the pages at `address` by private pages with the same content.

    Readers of the memory see the same bytes at any time.

    Args:
        address: the address, a multiple of the page size.
        nbytes: the size, a multiple of the page size.

    Raises:
        OSError: if there is no memory for the copy.
    """
    fresh = mapped(nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    ctypes.memmove(fresh, address, nbytes)
    if _LIBC.mremap(fresh, nbytes, nbytes, _MOVE_TO, address) != address:
        error = OSError(ctypes.get_errno(), "pages cannot be exchanged")
        _LIBC.munmap(fresh, nbytes)
        raise error


class _Loan(weakref.ref[Root]):
    """A weak reference to the root of a batch.

    A finalizer of the root would double the cost of lending.

    Attributes:
        number: the number of the batch.
        owner: the mapping that the root views.
    """

    __slots__ = ("number", "owner")
    number: int
    owner: Root


@dataclass
class Slots:
    """One mapping of the slots of a ring. Batch q is in slot q modulo the number of slots.

    Attributes:
        descriptor: the file.
        start: the offset of slot 0 in the file, a multiple of the page size.
        nbytes: the size of each slot in bytes, a multiple of the page size.
        count: the number of slots.
        returned: called with the number of each released batch, in any thread and at any point of it, so it
            must not take a lock.
        pinning: registers slots with devices; None without devices.
        is_private: whether the slots are memory of this process instead of the file. A forked process then
            has a copy, which does not change when the slots are reused.
    """

    descriptor: int
    start: int
    nbytes: int
    count: int
    returned: Callable[[int], None] = lambda number: None
    pinning: Pinning | None = None
    is_private: bool = False
    _owners: list[Root] = field(default_factory=list[Root])  # the mapping of each slot
    _loans: dict[int, _Loan] = field(default_factory=dict[int, _Loan])  # by the number of the batch

    def __post_init__(self) -> None:
        self._type: Any = type("Root", (ctypes.c_ubyte * self.nbytes,), {"__slots__": ("owner",)})
        self._owners = [self._fresh(slot) for slot in range(self.count)]

    def _fresh(self, slot: int) -> Root:
        """A new mapping of slot `slot`. Raises OSError."""
        if self.is_private:
            address = mapped(self.nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        else:
            offset = self.start + slot * self.nbytes
            address = mapped(self.nbytes, mmap.MAP_SHARED, self.descriptor, offset)
        if self.pinning is not None:
            self.pinning.pin(address, self.nbytes)
        return owner_of(address, self.nbytes, self.pinning)

    def memory(self, number: int) -> Root:
        """The slot of batch `number`, for writing."""
        return self._owners[number % self.count]

    def offset(self, address: int) -> int | None:
        """The offset in the file of `address`; None for memory that is in no slot."""
        for slot, owner in enumerate(self._owners):
            base = ctypes.addressof(owner)
            if base <= address < base + self.nbytes:
                return self.start + slot * self.nbytes + address - base
        return None

    def lend(self, number: int, roots: dict[int, Root]) -> Root:
        """The slot of batch `number`, for reading.

        The slot is released when the returned root dies, or by `recall`.

        Args:
            number: the number of the batch.
            roots: the roots of the caller by number. The root is added to them. An interrupted caller may
                call again with the same `roots`.

        Returns:
            The root, which all views of the slot keep alive.
        """
        root = roots.get(number)
        if root is None:
            owner = self._owners[number % self.count]
            root = self._type.from_address(ctypes.addressof(owner))  # `from_buffer` takes far longer
            root.owner = owner
            roots[number] = root
        loan = _Loan(root, self._dead)  # pyright: ignore[reportArgumentType]  called with the loan
        loan.number, loan.owner = number, root.owner
        self._loans[number] = loan
        return root

    def recall_before(self, number: int) -> None:
        """Recall the slots of all batches before `number`."""
        if min(self._loans, default=number) < number:
            for old in self.lent():
                if old < number:
                    self.recall(old)

    def lent(self) -> list[int]:
        """The numbers of the batches that are lent now, ascending."""
        return sorted(self._loans)

    def _dead(self, loan: _Loan) -> None:
        """Take back the slot of a root that has died, unless it is lent again."""
        number = loan.number
        if self._loans.get(number) is loan:
            self.recall(number)

    def recall(self, number: int) -> None:
        """Take back the slot of batch `number`. Views of it keep their content, as private memory.

        After an error or an interruption the slot stays lent, and the caller may call again.

        Raises:
            CommplanError: CP0923 if memory is exhausted.
        """
        loan = self._loans.get(number)
        if loan is None:
            return
        try:
            if self._loans.pop(number, None) is None:  # another thread recalls it
                return
            root = loan()  # keeps the mapping alive until the end of this function
            if root is not None:
                self._exchange(number % self.count, loan.owner)
            self.returned(number)
        except OSError as error:
            self._loans[number] = loan
            fail(
                "CP0923",
                f"{self.nbytes} bytes for a batch in use cannot be allocated: {error.strerror}",
                "release batches sooner, or make them smaller",
            )
        except BaseException:
            self._loans[number] = loan
            raise

    def _exchange(self, slot: int, owner: Root) -> None:
        """Map slot `slot` anew, and make `owner`, its former mapping, private memory.

        Raises:
            OSError: if there is no memory. This function may then be called again.
        """
        if self.pinning is not None:  # copies from it have finished: their arrays were handed out
            self.pinning.unpin(ctypes.addressof(owner))
        if self._owners[slot] is owner:
            self._owners[slot] = self._fresh(slot)
        if not self.is_private:
            privatize_pages(ctypes.addressof(owner), self.nbytes)

    def detach(self, number: int) -> None:
        """Make this mapping of the slot of batch `number` private memory, with the same content.

        Writes through it no longer reach other processes.

        Raises:
            OSError: if there is no memory for the copy.
        """
        if not self.is_private:
            privatize_pages(ctypes.addressof(self.memory(number)), self.nbytes)

    def close(self) -> None:
        """Recall all slots, and release mappings without views.

        Raises:
            CommplanError: CP0923 as `recall`. The slots then stay open.
        """
        for number in self.lent():
            self.recall(number)
        self._owners = []


@dataclass
class CompletionCounter:
    """Counts numbers without gaps, from any thread and at any point of it, including garbage collection.

    A finalizer may run in a thread that already holds the lock, so `add` does not wait for it: the thread
    that holds the lock delivers the remaining numbers. If `add` is interrupted, it may be called again.

    Attributes:
        advance: called with the new `upto` whenever it grows.
        upto: the first number that has not been added.
    """

    advance: Callable[[int], None]
    upto: int = 0
    _is_due: bool = False  # `advance` has not been called with `upto`
    _back: set[int] = field(default_factory=set[int])  # numbers from `upto` on that have been added
    _new: deque[int] = field(default_factory=deque[int])  # numbers that have not been delivered
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, number: int) -> None:
        """Add a number, in any order."""
        self._new.append(number)
        while self._new:
            is_held = False
            try:
                is_held = self._lock.acquire(blocking=False)
                if not is_held:
                    return
                self._deliver()
            finally:
                if is_held:
                    self._lock.release()

    def _deliver(self) -> None:
        """Deliver all new numbers. The calling thread holds the lock; it may be interrupted at any point."""
        while self._new:
            self._back.add(self._new[0])
            self._new.popleft()
        while self.upto in self._back:
            self._is_due = True
            self.upto += 1
            self._back.discard(self.upto - 1)
        if self._is_due:
            self.advance(self.upto)
            self._is_due = False
