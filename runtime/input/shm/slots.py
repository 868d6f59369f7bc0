"""The slots of a ring as one process maps them, and the arrays that show them.

Arrays that are handed over show the slot itself. Whoever keeps one (an `np.ndarray`, a JAX array, a
computation that is still to run) keeps its root alive, the owner of the memory that all views of it lead to,
and a slot is let go when its root dies. A process that keeps more than it may must not stop the others: then
the pages under its arrays are exchanged for private ones with the same content, at the same addresses, and
the slot is free.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from commplan.diagnostics import fail

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
)  # fmt: skip
_LIBC.munmap.restype = ctypes.c_int
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_NOWHERE = ctypes.c_void_p(-1).value
_MOVE_TO = 1 | 2  # MREMAP_MAYMOVE | MREMAP_FIXED of mremap(2)

if TYPE_CHECKING:
    from commplan.runtime.machines.pinned import Pinning

Root = Any  # a ctypes array of bytes

_LIBC.mremap.restype = ctypes.c_void_p
_LIBC.mremap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p,
)  # fmt: skip


def mapped(nbytes: int, flags: int, descriptor: int, offset: int) -> int:
    address = _LIBC.mmap(None, nbytes, _READ_WRITE, flags, descriptor, offset)
    if address is None or address == _NOWHERE:
        raise OSError(ctypes.get_errno(), "memory cannot be mapped")
    return address


def give_back_freed() -> None:
    """Let the system have what was freed and lies in the C library's heap: a megabyte, where modules were
    just loaded."""
    if hasattr(_LIBC, "malloc_trim"):  # glibc
        _LIBC.malloc_trim(0)


def owner_of(address: int, nbytes: int, pinning: Pinning | None = None) -> Root:
    """The mapping as bytes; it is unmapped when the last view of them is gone.

    Mapped by the system's own call: Python's `mmap` opens the file a second time, and closing that lets go of
    every lock that the process holds on it.
    """
    buffer = (ctypes.c_ubyte * nbytes).from_address(address)
    weakref.finalize(buffer, _unmap, address, nbytes, pinning).atexit = False
    return buffer


def _unmap(address: int, nbytes: int, pinning: Pinning | None) -> None:
    if pinning is not None:
        pinning.unpin(address)
    _LIBC.munmap(address, nbytes)


def copy_on_recall(address: int, nbytes: int) -> None:
    """Exchange the pages at `address` for private ones with the same content.

    Readers of the old pages see the same bytes before, meanwhile and after. Raises OSError.
    """
    fresh = mapped(nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    ctypes.memmove(fresh, address, nbytes)
    if _LIBC.mremap(fresh, nbytes, nbytes, _MOVE_TO, address) != address:
        error = OSError(ctypes.get_errno(), "pages cannot be exchanged")
        _LIBC.munmap(fresh, nbytes)
        raise error


class _Loan(weakref.ref[Root]):
    """The root of batch `number`, and the mapping that it shows; a finaliser of its own would cost as much as
    all else of a loan."""

    __slots__ = ("number", "owner")
    number: int
    owner: Root


@dataclass
class Slots:
    """The slots: batch q lies in slot q modulo their number.

    start, nbytes: of slot 0 in the file, and of each; multiples of the page. returned: is told the numbers of
    batches that were lent and are let go, in any thread and at any point of it: it takes no lock. pinning:
    what registers slots with devices.
    """

    descriptor: int
    start: int
    nbytes: int
    count: int
    returned: Callable[[int], None] = lambda number: None
    pinning: Pinning | None = None
    _owners: list[Root] = field(default_factory=list[Root])
    _loans: dict[int, _Loan] = field(default_factory=dict[int, _Loan])

    def __post_init__(self) -> None:
        self._type: Any = type("Root", (ctypes.c_ubyte * self.nbytes,), {"__slots__": ("owner",)})
        self._owners = [self._fresh(place) for place in range(self.count)]

    def _fresh(self, place: int) -> Root:
        address = mapped(self.nbytes, mmap.MAP_SHARED, self.descriptor, self.start + place * self.nbytes)
        if self.pinning is not None:
            self.pinning.pin(address, self.nbytes)
        return owner_of(address, self.nbytes, self.pinning)

    def memory(self, number: int) -> Root:
        """The slot of batch `number`, to write to."""
        return self._owners[number % self.count]

    def offset(self, address: int) -> int | None:
        """Where in the file `address` lies; None for memory that is not in it (any more)."""
        for place, owner in enumerate(self._owners):
            base = ctypes.addressof(owner)
            if base <= address < base + self.nbytes:
                return self.start + place * self.nbytes + address - base
        return None

    def lend(self, number: int, roots: dict[int, Root]) -> Root:
        """The slot of batch `number` to read from. It is let go when the root that this returns is dead, or
        with `recall`. Who is interrupted finds the root in `roots`, and may ask again with them."""
        owner = self._owners[number % self.count]
        root = roots.get(number)
        if root is None:
            root = self._type.from_address(ctypes.addressof(owner))  # `from_buffer` takes far longer
            root.owner = owner
            roots[number] = root
        loan = _Loan(root, self._dead)
        loan.number, loan.owner = number, owner
        self._loans[number] = loan
        return root

    def recall_before(self, number: int) -> None:
        """Take back the slots of all batches before `number`."""
        if min(self._loans, default=number) < number:
            for old in self.lent():
                if old < number:
                    self.recall(old)

    def lent(self) -> list[int]:
        """Batches that are lent now."""
        return sorted(self._loans)

    def _dead(self, loan: weakref.ref[Root]) -> None:
        number = cast("_Loan", loan).number
        # Another thread may recall it meanwhile: whoever takes it out says that it is back.
        if self._loans.get(number) is loan and self._loans.pop(number, None) is not None:
            self.returned(number)

    def recall(self, number: int) -> None:
        """Take the slot of batch `number` back: what shows it keeps its content, as private memory. Errors:
        CP0923 where there is none; the slot is lent as before."""
        loan = self._loans.pop(number, None)
        if loan is None:
            return
        root = loan()  # alive until the end of this function: its pages stay where they are
        if root is not None:
            if self.pinning is not None:  # the copies from it are over: their arrays were handed out
                self.pinning.unpin(ctypes.addressof(loan.owner))
            try:
                self.detach(number)
            except OSError as error:
                self._loans[number] = loan
                fail(
                    "CP0923",
                    f"{self.nbytes} bytes for a batch that is still shown cannot be had: {error.strerror}",
                    "let go of batches sooner, or make them smaller",
                )
            self._owners[number % self.count] = self._fresh(number % self.count)
        self.returned(number)

    def detach(self, number: int) -> None:
        """The slot of batch `number` is private memory in this process from now on, with the same content:
        whoever writes to it here writes to that. Raises OSError."""
        copy_on_recall(ctypes.addressof(self.memory(number)), self.nbytes)

    def close(self) -> None:
        """Recall all, and let go of the mappings that nobody shows. Errors: as `recall`."""
        for number in self.lent():
            self.recall(number)
        self._owners = []


@dataclass
class CompletionCounter:
    """Counts numbers without a gap, from any thread and at any point of it, a collector's run included.

    A finaliser may run in a thread that already holds the lock, so none ever waits for it: what it cannot
    deliver is delivered by whoever holds it.
    """

    advance: Callable[[int], None]  # is told the first number that is not back
    upto: int = 0
    _back: set[int] = field(default_factory=set[int])
    _new: deque[int] = field(default_factory=deque[int])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, number: int) -> None:
        self._new.append(number)
        while self._new and self._lock.acquire(blocking=False):
            try:
                start = self.upto
                while self._new:
                    self._back.add(self._new.popleft())
                while self.upto in self._back:
                    self._back.remove(self.upto)
                    self.upto += 1
                if self.upto > start:
                    self.advance(self.upto)
            finally:
                self._lock.release()
