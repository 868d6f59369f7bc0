"""Transfers between hosts over JAX: a mesh of one device per host, and one program for all moves of a batch.

Every process must launch collectives in the same order, and only the user's program determines that order.
`carry` therefore runs inside `next()`, in the caller's thread, and launches one program per batch, for all
its transfers. The rows of a host are packed into one array of bytes. It has room for the maximum number of
rows that any host makes. One program therefore serves all batches, including short ones.

If all hosts contribute to an all-gather, XLA's own all-gather does it (Gloo's ring, which is already
optimal). If only some contribute, and for broadcasts (XLA has none on CPUs), rounds of `ppermute` carry out
chunk programs: `ring`, and `chain` in slices. Slices follow each other from host to host, which keeps every
link busy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from commplan.collectives.layout import MESSAGE
from commplan.collectives.program import ChunkProgram
from commplan.diagnostics import CommplanError
from commplan.input.work_partition import Division, HostTransfer
from commplan.lowering.jax import _compat
from commplan.lowering.jax.collectives import order, programs
from commplan.lowering.programs import program_named
from commplan.runtime.input.group import Blame
from commplan.runtime.input.layout import aligned, rounded
from commplan.runtime.input.observe.wait_log import ClosedError
from commplan.runtime.input.transport.transport import Bytes, RowSlices
from commplan.wait import Wait, run_in_thread

AXIS = "host"  # the axis of the mesh
# Slices of a chain for each hop after the first, unless they would be shorter than `MESSAGE`. The time until
# the last host receives the first slice is then a sixteenth of the transfer time.
SLICES_PER_HOP = 16
CHECK_S = 0.05  # seconds between two checks whether this process has stopped
_WORD = 4  # bytes of a word. Words instead of bytes reduce the elements of loops and the range of indices.

Words = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class _PackedRows:
    """The location of a value's rows in the packed bytes of a host.

    Attributes:
        offset: the first byte.
        copies: the number of copies of the value.
        rows: the maximum number of rows that a host makes, for which each copy has room.
        row_nbytes: the bytes of a row.
    """

    offset: int
    copies: int
    rows: int
    row_nbytes: int

    def view(self, packed: Bytes) -> Bytes:
        """The rows in `packed`, u8 [copies, rows, row_nbytes]."""
        nbytes = self.copies * self.rows * self.row_nbytes
        return packed[self.offset : self.offset + nbytes].reshape(self.copies, self.rows, self.row_nbytes)


@dataclass(frozen=True)
class _Compiled:
    """The program of all batches.

    Attributes:
        layout: the location of each value's rows.
        packed: u8 [bytes], the packed rows of this host, which every batch reuses.
        sharding: the sharding of the packed rows of all hosts, u32 [hosts, words].
        run: maps these packed rows to those that each host receives, u32 [hosts, makers, words].
    """

    layout: tuple[_PackedRows, ...]
    packed: Bytes
    sharding: Any
    run: Callable[[Array], Array]


@dataclass(eq=False)
class JaxCarrier:
    """A carrier over JAX (see `commplan.runtime.input.transport.transport.Carrier`).

    Only the leader of each host calls `carry`. The arrays have the same shapes in all batches; only their
    bounds may differ.

    Attributes:
        division: the makers of parts. All hosts take part.
        host: the host of this process.
        devices: a CPU of each host's leader, in the order in which hosts first appear in the division.
        timeout: seconds to wait for a live but silent host.
        blame: the place in the plan that errors refer to.
        launched: the number of programs that were launched, one per batch.

    Raises:
        CommplanError: from `carry`: CP0940 if a host died, CP0941 if one is silent.
        ClosedError: from `carry`, once stopped.
    """

    division: Division
    host: int
    devices: tuple[Any, ...]
    timeout: float
    blame: Blame
    launched: int = 0
    _compiled: _Compiled | None = None
    _stopped: bool = False

    @property
    def by_caller(self) -> bool:
        """See `Carrier.by_caller`."""
        return True

    def carry(
        self, number: int, row_slices: Sequence[RowSlices], before: Sequence[RowSlices] = (), count: int = 1,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:  # fmt: skip
        """See `Carrier.carry`. Uses only `row_slices` and `count`: the caller waits, so no host is behind."""
        del number, before, is_wanted
        if self._stopped:
            raise ClosedError
        if self._compiled is None:
            self._compiled = self._compile(row_slices)
        compiled = self._compiled
        self._pack(row_slices, compiled)
        self.launched += 1
        received = self._result_of(lambda: self._run(compiled), count)
        self._unpack(row_slices, compiled, received)

    def stop(self) -> None:
        """See `Carrier.stop`."""
        self._stopped = True

    def close(self) -> None:
        """Stop the carrier. A program that is already launched cannot be canceled and runs to its end."""
        self.stop()

    # --- once ---

    def _compile(self, row_slices: Sequence[RowSlices]) -> _Compiled:
        """The program for all batches, from the arrays of the first one."""
        layout: list[_PackedRows] = []
        nbytes = 0
        part_ranges = [self.division.part_range(host) for host in _makers(self.division)]
        most_parts = max(high - low for low, high in part_ranges)
        for slices in row_slices:
            copies, rows, row_nbytes = slices.cells.shape
            first_rows = max(slices.bounds[high] - slices.bounds[low] for low, high in part_ranges)
            # In a batch of any length, `most_parts` parts have at most this number of rows.
            most_rows = min(rows, max(first_rows, -(-most_parts * rows // self.division.parts)))
            layout.append(_PackedRows(nbytes, copies, most_rows, row_nbytes))
            nbytes = rounded(nbytes + copies * most_rows * row_nbytes)
        packed = aligned((nbytes,), np.dtype(np.uint8))
        packed[:] = 0
        return _Compiled(tuple(layout), packed, *_program(self.division, self.devices, nbytes // _WORD))

    # --- for every batch ---

    def _pack(self, row_slices: Sequence[RowSlices], compiled: _Compiled) -> None:
        """Copy the rows that this host has made to its packed rows."""
        low, high = self.division.part_range(self.host)
        for slices, rows in zip(row_slices, compiled.layout, strict=True):
            first, last = slices.bounds[low], slices.bounds[high]
            rows.view(compiled.packed)[:, : last - first] = slices.cells[:, first:last]

    def _run(self, compiled: _Compiled) -> Words:
        """Run the program. Returns the packed rows of all makers, [makers, words].

        JAX aliases the packed rows of this host, which do not change until the program has finished.
        """
        words: Words = compiled.packed.view(np.uint32)[None]
        local_rows = jax.device_put(words, self.devices[_hosts(self.division).index(self.host)])
        shape = (len(self.devices), words.shape[1])
        all_rows = jax.make_array_from_single_device_arrays(shape, compiled.sharding, [local_rows])
        received = compiled.run(all_rows).addressable_shards[0].data
        return np.asarray(received)[0]

    def _unpack(self, row_slices: Sequence[RowSlices], compiled: _Compiled, received: Words) -> None:
        """Copy the received rows of other hosts to the slot."""
        for index, host in enumerate(_makers(self.division)):
            if host == self.host:
                continue
            low, high = self.division.part_range(host)
            packed = received[index].view(np.uint8)
            for slices, rows in zip(row_slices, compiled.layout, strict=True):
                first, last = slices.bounds[low], slices.bounds[high]
                slices.cells[:, first:last] = rows.view(packed)[:, : last - first]

    def _result_of(self, work: Callable[[], Words], count: int) -> Words:
        """The result of `work`, which runs in another thread: this one can then stop to wait.

        JAX may run a program in the thread that calls it, without a timeout. The order of programs is still
        that of the caller, which launches nothing while it waits.

        Raises:
            CommplanError: CP0940 if the program fails, CP0941 after `timeout`.
            ClosedError: After `stop`.
        """

        def check(_: float) -> None:
            if self._stopped:
                raise ClosedError

        def on_timeout(_: float) -> NoReturn:
            self.blame.fail(
                "CP0941",
                f"a host was silent for {self.timeout:g} s: batch {count} of the shared input did not arrive",
                "all processes must take the same batches, in the same order",
                "what JAX has launched cannot be called back: end this process, and start again from the last"
                " saved state",
            )

        try:
            return run_in_thread(work, Wait(self.timeout, on_timeout, check, CHECK_S))
        except (CommplanError, ClosedError):
            raise
        except Exception as error:  # noqa: BLE001  XLA may raise anything
            self._fail_lost(count, error)

    def _fail_lost(self, count: int, error: BaseException) -> NoReturn:
        """Raise CP0940, with the first line of JAX's error."""
        lines = str(error).strip().splitlines() or [type(error).__name__]
        self.blame.fail(
            "CP0940",
            f"batch {count} of the shared input did not arrive: another host died, or cannot be reached",
            f"JAX says: {lines[0][:300]}",
            "restart from the last saved state",
        )


def cpu_devices(processes: Sequence[int]) -> tuple[Any, ...]:
    """The first CPU device of each of these JAX processes, in their order."""
    first_devices: dict[int, Any] = {}
    for device in _compat.cpu_devices():
        first_devices.setdefault(int(device.process_index), device)
    return tuple(first_devices[process] for process in processes)


def _hosts(division: Division) -> tuple[int, ...]:
    """All hosts, in the order of their devices."""
    return tuple(dict.fromkeys(division.hosts))


def _makers(division: Division) -> tuple[int, ...]:
    """The hosts that make rows, in the order of their packed rows."""
    return tuple(dict.fromkeys(division.hosts[reader] for reader in division.readers))


@functools.lru_cache(maxsize=16)
def _program(
    division: Division, devices: tuple[Any, ...], words: int
) -> tuple[NamedSharding, Callable[[Array], Array]]:
    """The sharding of packed rows [hosts, words], and the program that maps them to [hosts, makers, words].

    Args:
        division: the makers of parts.
        devices: see `JaxCarrier`.
        words: the 32-bit words of the packed rows of a host.
    """
    mesh = Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))
    hosts, makers = _hosts(division), len(_makers(division))

    def body(local_rows: Array) -> Array:
        """The program of a host: [1, words] to [1, makers, words]."""
        packed = local_rows.reshape(-1)
        if division.design == "multi_broadcast":
            received: list[Array] = []
            for move in division.moves():
                # CPUs may run independent collectives in any order, which differs between hosts.
                operand = order.tie(packed, received[-1], AXIS, on_cpu=True) if received else packed
                received.append(_broadcast(move, hosts, operand))
            return jnp.stack(received)[None]
        rows = packed  # with several makers, the first move gathers their rows
        for move in division.moves():
            transfer = _all_gather if move.kind == "all_gather" else _broadcast
            rows = transfer(move, hosts, rows)
        return rows.reshape(1, makers, words)

    spec = PartitionSpec(AXIS)
    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec))
    return NamedSharding(mesh, spec), run


def _all_gather(move: HostTransfer, hosts: Sequence[int], words: Array) -> Array:
    """Gather u32 [words] of each host of the move to [hosts of the move * words]. Undefined on the others."""
    if move.hosts == tuple(hosts):
        return lax.all_gather(words, AXIS, tiled=True)
    ranks = len(move.hosts)
    program = program_named("ring", "all_gather", ranks, 0, words.nbytes * ranks, None)
    return programs.run(program, words, _rank_groups(move, hosts))


def _broadcast(move: HostTransfer, hosts: Sequence[int], words: Array) -> Array:
    """The root's u32 [words] on all hosts of the move. The other hosts keep theirs."""
    program = chain(len(move.hosts), move.root, words.nbytes)
    return programs.run(program, words, _rank_groups(move, hosts))


def chain(ranks: int, root: int, nbytes: int) -> ChunkProgram:
    """A broadcast from host to host, in slices if there is more than one hop.

    Args:
        ranks: the number of hosts.
        root: the index of the host that has the value.
        nbytes: the bytes of the value.
    """
    hops = ranks - 1
    chunk = None if hops < 2 else max(MESSAGE, -(-nbytes // (SLICES_PER_HOP * (hops - 1))))
    return program_named("chain", "broadcast", ranks, root, nbytes, chunk)


def _rank_groups(move: HostTransfer, hosts: Sequence[int]) -> programs.RankGroups:
    """The hosts of a move, as groups over all hosts.

    A host outside the move runs the same instructions as the root, which receives nothing.
    """
    ranks = [move.hosts.index(host) if host in move.hosts else move.root for host in hosts]
    members = [[hosts.index(host) for host in move.hosts]]
    return programs.RankGroups((AXIS,), np.array(ranks, np.int64), np.array(members, np.int64))
