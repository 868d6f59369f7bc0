"""Runs chunk programs under JAX, each round as `lax.ppermute`, inside a shard_map.

A rank's buffer contains all slots in the order of `collectives.layout`, without padding. Each transfer moves
a window of the buffer as long as the longest transfer of its part. If a rank's transfer is shorter, the
surrounding elements stay unchanged. Offsets depend on the rank and are stored in constant tables.

Rounds run one after the other, so slices overlap only within a round. Slices therefore help only programs
whose rounds leave ranks idle (chain, trees).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from commplan.collectives.program import Bools, ChunkProgram, Ints
from commplan.ir.collective_kinds import GATHERING, REDUCING, SCATTERING
from commplan.lowering.jax.collectives import native
from commplan.lowering.jax.collectives.bitcast import as_bits, to_bits
from commplan.lowering.permutes import Permute, PermutePart, PermuteRound, permute_rounds, stretches


class RankGroups(NamedTuple):
    """The groups of ranks that run a program, out of the ranks along `axes`, counted row-major.

    Attributes:
        axes: The axes.
        places: The index of each rank in its group; int64[ranks].
        members: The ranks of each group in order; int64[groups, ranks of the program].
    """

    axes: tuple[str, ...]
    places: Ints
    members: Ints


def all_ranks(axes: tuple[str, ...], ranks: int) -> RankGroups:
    """One group of all ranks along `axes`."""
    return RankGroups(axes, np.arange(ranks, dtype=np.int64), np.arange(ranks, dtype=np.int64)[None])


def run(
    program: ChunkProgram, x: Array, groups: RankGroups, op: str = "sum", *, on_cpu: bool = True
) -> Array:
    """Run a program on this rank's one-dimensional array `x`, which must vary over the axes of `groups`.

    Sums are computed in the dtype of `x`. On CPUs 16-bit floats are moved as integers, because XLA would
    widen them.

    Args:
        program: The chunk program, over n ranks.
        x: The operand: [k] for all_gather and gather, [n*k] for reduce_scatter, scatter and swap, and any
            length for others.
        groups: The groups of n ranks each. All groups run the program at the same time.
        op: The reduction: sum, max or min. For booleans, sum and max are `or`, min is `and`.
        on_cpu: Whether the devices are CPUs.

    Returns:
        The result: [k] for reduce_scatter and scatter, [n*k] for all_gather, gather and swap, and the length
        of `x` for others. It is unspecified on ranks for which the collective defines no result, such as all
        but the root of a reduce.
    """
    if x.dtype == jnp.bool_:
        return run(program, x.astype(jnp.uint8), groups, "min" if op == "min" else "max", on_cpu=on_cpu) != 0
    if on_cpu and program.kind not in REDUCING and to_bits(x).dtype != x.dtype:
        return as_bits(lambda moved: run(program, moved, groups, op, on_cpu=on_cpu), x)
    rank = _Rank(groups, op, on_cpu=on_cpu)
    operand_size, x = x.shape[0], slots(program, x, rank.place)
    rounds = permute_rounds(program, x.shape[0])
    last: Any = None
    for stretch in stretches(rounds):
        x, last = rank.round(x, last, stretch[0]) if len(stretch) == 1 else rank.rounds(x, last, stretch)
    if program.kind == "swap":
        return blocks(x, program.arrivals, rank.place)
    if program.kind not in SCATTERING:
        return x
    if rounds and not rounds[-1].stores:
        return last
    length = operand_size // program.ranks
    return lax.dynamic_slice(x, (rank.place * length,), (length,))


def slots(program: ChunkProgram, x: Array, place: Any) -> Array:
    """The initial buffer of the rank at index `place` of its group.

    For a gathering collective, its block between zeros; for a swap, the permuted blocks of `x`; otherwise
    `x`.
    """
    if program.kind == "swap":
        return blocks(x, program.targets, place)
    if program.kind not in GATHERING:
        return x
    empty = jnp.zeros_like(x, shape=(program.ranks * x.shape[0],))
    return lax.dynamic_update_slice(empty, x, (place * x.shape[0],))


def blocks(x: Array, order: Ints, place: Any) -> Array:
    """The equal blocks of `x`, reordered.

    Args:
        x: An array of as many equal blocks as there are ranks in the group.
        order: The blocks of each rank in order; [ranks, blocks].
        place: The index of this rank in its group, which selects the row of `order`.
    """
    return x.reshape(len(order), -1)[jnp.asarray(_narrow(order))[place]].reshape(-1)


class _Row(NamedTuple):
    """This rank's entries in the tables of a part (see `PermutePart`); for a loop, one for each round.

    Attributes:
        take: The offset of the window to send, in elements of the buffer.
        put: The offset of the window to receive.
        low, high: The range of received elements to store, in the window.
        adds: Whether received elements are added.
    """

    take: Array
    put: Array
    low: Array
    high: Array
    adds: Array


class _Rank:
    """The execution of rounds on this rank.

    Args:
        groups: The groups of ranks.
        op: The reduction.
        on_cpu: Whether the devices are CPUs.

    Attributes:
        place: The index of this rank in its group, a traced scalar.
    """

    def __init__(self, groups: RankGroups, op: str, *, on_cpu: bool) -> None:
        self.groups = groups
        self.place = lax.axis_index(groups.axes)
        if (groups.places != np.arange(len(groups.places))).any():
            self.place = jnp.asarray(_narrow(groups.places))[self.place]
        self.op = op
        self.on_cpu = on_cpu

    def round(self, buffer: Array, last: Any, permute_round: PermuteRound) -> tuple[Array, Any]:
        """Run one round.

        Args:
            buffer: The buffer before it.
            last: The content of the window received last; None before the first round.
            permute_round: The round.

        Returns:
            The buffer after it, and the content of the last window that it received.
        """
        rows = [[self._row(part) for part in permute.parts] for permute in permute_round.permutes]
        return self._round(buffer, last, permute_round, rows)

    def rounds(self, buffer: Array, last: Any, rounds: Sequence[PermuteRound]) -> tuple[Array, Array]:
        """Run rounds of equal form as a loop; see `round`."""
        first = rounds[0]
        rows = [
            [self._rows([each.permutes[i].parts[j] for each in rounds]) for j in range(len(permute.parts))]
            for i, permute in enumerate(first.permutes)
        ]

        def body(number: Array, carried: tuple[Array, Array]) -> tuple[Array, Array]:
            entries = [[_Row(*(table[number] for table in row)) for row in part_rows] for part_rows in rows]
            return self._round(*carried, first, entries)

        if not first.forwards:  # not read: any array of the shape that the loop carries
            last = _window(buffer, 0, first.permutes[-1].parts[-1].length)
        return lax.fori_loop(0, len(rounds), body, (buffer, last))

    def _row(self, part: PermutePart) -> _Row:
        """This rank's entries in the tables; plain numbers if they are the same on all ranks."""
        return _Row(
            *(t[0].item() if (t == t[0]).all() else jnp.asarray(_narrow(t))[self.place] for t in part.tables)
        )

    def _rows(self, parts: Sequence[PermutePart]) -> _Row:
        """`_row` for the same part of several rounds; entries have a leading dimension."""
        tables = zip(*(part.tables for part in parts), strict=True)
        return _Row(*(jnp.asarray(_narrow(np.stack(table, 1)))[self.place] for table in tables))

    def _round(
        self, buffer: Array, last: Any, permute_round: PermuteRound, rows: Sequence[Sequence[_Row]]
    ) -> tuple[Array, Any]:
        """Run one round with the table entries `rows` of each part of each ppermute; see `round`.

        All windows are read before any is written.
        """
        arrived = [
            self._transfer([last] if permute_round.forwards else self._read(buffer, permute, row), permute)
            for permute, row in zip(permute_round.permutes, rows, strict=True)
        ]
        for permute, row, windows in zip(permute_round.permutes, rows, arrived, strict=True):
            for part, entries, window in zip(permute.parts, row, windows, strict=True):
                last = self._merge(buffer, window, part, entries)
                if permute_round.stores:
                    whole = part.length == buffer.shape[0]
                    buffer = last if whole else lax.dynamic_update_slice(buffer, last, (entries.put,))
        return buffer, last

    def _read(self, buffer: Array, permute: Permute, row: Sequence[_Row]) -> list[Array]:
        parts = zip(permute.parts, row, strict=True)
        return [_window(buffer, entries.take, part.length) for part, entries in parts]

    def _transfer(self, windows: Sequence[Any], permute: Permute) -> list[Array]:
        """The windows that this rank receives; zeros if no rank sends to it."""
        message = windows[0] if len(windows) == 1 else jnp.concatenate(windows)
        members = self.groups.members
        pairs = [(int(group[src]), int(group[dst])) for group in members for src, dst in permute.pairs]
        if self.on_cpu:
            message = as_bits(lambda moved: native.permute(moved, self.groups.axes, pairs), message)
        else:
            message = native.permute(message, self.groups.axes, pairs)
        ends = itertools.accumulate(part.length for part in permute.parts)
        return [message[end - part.length : end] for part, end in zip(permute.parts, ends, strict=True)]

    def _merge(self, buffer: Array, message: Array, part: PermutePart, entries: _Row) -> Array:
        """The content of the window after `message` has arrived."""
        old = _window(buffer, entries.put, part.length)
        new = message
        if part.adds.all():
            new = self._combine(old, message)
        elif part.adds.any():
            new = jnp.where(entries.adds, self._combine(old, message), message)
        if not part.is_whole:
            element = lax.iota(jnp.int32, part.length)
            new = jnp.where((element >= entries.low) & (element < entries.high), new, old)
        elif not part.is_all:
            new = jnp.where(entries.high > 0, new, old)
        return new

    def _combine(self, old: Array, new: Array) -> Array:
        extreme = {"max": jnp.maximum, "min": jnp.minimum}.get(self.op)
        return _round_sum(old + new) if extreme is None else extreme(old, new)


def _round_sum(total: Array) -> Array:
    """Round a sum of 16-bit floats to its dtype; otherwise XLA keeps it wider for subsequent sums."""
    if not jnp.issubdtype(total.dtype, jnp.floating) or total.dtype.itemsize != 2:
        return total
    kind = jnp.finfo(total.dtype)
    return lax.reduce_precision(total, kind.nexp, kind.nmant)


def _window(buffer: Array, start: Array | int, length: int) -> Array:
    return buffer if length == buffer.shape[0] else lax.dynamic_slice(buffer, (start,), (length,))


def _narrow(table: Ints | Bools) -> Any:
    """Offsets as 32-bit integers, if they fit. Booleans are unchanged."""
    if table.dtype == np.bool_ or table.max(initial=0) > np.iinfo(np.int32).max:
        return table
    return table.astype(np.int32)
