"""Chunk programs under JAX: their rounds as `lax.ppermute`, inside a shard_map.

A rank's buffer holds all slots, one after the other as `collectives.layout` places them, without padding:
what moves is a window of the buffer that is as long as the longest run of its round, and where a run is
shorter the elements around it are left as they were. Offsets depend on the rank and stand in constant tables.

Rounds follow each other through the buffer, so a slice moves beside another only within a round: slices serve
programs whose rounds leave ranks idle (chain, trees), and no others.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from commplan.collectives.program import REDUCING, Bools, ChunkProgram, Ints
from commplan.lowering.jax.collectives import native
from commplan.lowering.jax.collectives.bitcast import as_bits, to_bits
from commplan.lowering.jax.typing_shim import jnp, lax
from commplan.lowering.permutes import Move, PermutePart, PermuteStep, stretches
from commplan.lowering.permutes import steps as steps_of

Array = Any


class ProgramRanks(NamedTuple):
    """The ranks that carry out a program together, of those along `axes`, counted row-major.

    places: the place of each rank in its group. members: the ranks of each group by their place,
    [groups, ranks of the program].
    """

    axes: tuple[str, ...]
    places: Ints
    members: Ints


def everyone(axes: tuple[str, ...], ranks: int) -> ProgramRanks:
    """All ranks along `axes` as one group."""
    return ProgramRanks(axes, np.arange(ranks, dtype=np.int64), np.arange(ranks, dtype=np.int64)[None])


def run(
    program: ChunkProgram, x: Array, team: ProgramRanks, op: str = "sum", *, on_cpu: bool = True
) -> Array:
    """What this rank holds after `program`, given what it holds before; one-dimensional.

    all_reduce, reduce, broadcast: [S] in and out. reduce_scatter and scatter: [n*k] in, this rank's [k] out.
    all_gather and gather: [k] in, [n*k] out. swap: [n*k] in and out. `x` must vary over the axes of
    `team`. Of what a rank holds that the collective promises nothing to (all but the root after `reduce`
    and `gather`), nothing is said.
    op: sum, max or min; booleans: or, or, and.

    Sums are made in the type of `x`. On CPUs 16-bit floats travel as integers, which XLA would widen else.
    """
    if x.dtype == jnp.bool_:
        return run(program, x.astype(jnp.uint8), team, "min" if op == "min" else "max", on_cpu=on_cpu) != 0
    if on_cpu and program.kind not in REDUCING and to_bits(x).dtype != x.dtype:
        return as_bits(lambda moved: run(program, moved, team, op, on_cpu=on_cpu), x)
    rank = _Rank(team, op, on_cpu=on_cpu)
    block, x = x.shape[0], slots(program, x, rank.place)
    steps, last = steps_of(program, x.shape[0]), None
    for rounds in stretches(steps):
        x, last = rank.round(x, last, rounds[0]) if len(rounds) == 1 else rank.rounds(x, last, rounds)
    if program.kind == "swap":
        return blocks(x, program.arrivals, rank.place)
    if program.kind not in ("reduce_scatter", "scatter"):
        return x
    if steps and not steps[-1].stores:
        return last
    own = block // program.ranks
    return lax.dynamic_slice(x, (rank.place * own,), (own,))


def slots(program: ChunkProgram, x: Array, place: Any) -> Array:
    """What the rank at `place` begins with: where blocks are gathered its own, between zeros; where they are
    swapped all, in the order of their slots."""
    if program.kind == "swap":
        return blocks(x, program.targets, place)
    if program.kind not in ("all_gather", "gather"):
        return x
    empty = jnp.zeros_like(x, shape=(program.ranks * x.shape[0],))
    return lax.dynamic_update_slice(empty, x, (place * x.shape[0],))


def blocks(x: Array, order: Ints, place: Any) -> Array:
    """The equal blocks of `x` in the order of row `place` of `order`."""
    return x.reshape(len(order), -1)[jnp.asarray(_narrow(order))[place]].reshape(-1)


class _Row(NamedTuple):
    """This rank's entries in the tables of a part."""

    take: Array
    put: Array
    low: Array
    high: Array
    adds: Array


class _Rank:
    """This rank. Its place among those of its group is known when the program runs."""

    def __init__(self, team: ProgramRanks, op: str, *, on_cpu: bool) -> None:
        self.team = team
        self.place = lax.axis_index(team.axes)
        if (team.places != np.arange(len(team.places))).any():
            self.place = jnp.asarray(_narrow(team.places))[self.place]
        self.op = op
        self.on_cpu = on_cpu

    def round(self, held: Array, last: Array | None, step: PermuteStep) -> tuple[Array, Array]:
        """One round: the slots after it, and what arrived last, as it would stand in its slot."""
        return self._round(
            held, last, step, [[self._row(part) for part in move.parts] for move in step.moves]
        )

    def rounds(self, held: Array, last: Array | None, steps: Sequence[PermuteStep]) -> tuple[Array, Array]:
        """A loop over rounds that differ in their tables alone."""
        first = steps[0]
        rows = [
            [self._rows([each.moves[i].parts[j] for each in steps]) for j in range(len(move.parts))]
            for i, move in enumerate(first.moves)
        ]

        def body(number: Array, carried: tuple[Array, Array]) -> tuple[Array, Array]:
            at = [[_Row(*(table[number] for table in row)) for row in move] for move in rows]
            return self._round(*carried, first, at)

        if not first.forwards:  # there is nothing to pass on yet: anything of its shape
            last = _window(held, 0, first.moves[-1].parts[-1].length)
        return lax.fori_loop(0, len(steps), body, (held, last))

    def _row(self, part: PermutePart) -> _Row:
        """This rank's entries in the tables; plain numbers where all ranks have the same."""
        return _Row(
            *(t[0].item() if (t == t[0]).all() else jnp.asarray(_narrow(t))[self.place] for t in part.tables)
        )

    def _rows(self, steps: Sequence[PermutePart]) -> _Row:
        """The same for several rounds: an entry for each."""
        tables = zip(*(part.tables for part in steps), strict=True)
        return _Row(*(jnp.asarray(_narrow(np.stack(each, 1)))[self.place] for each in tables))

    def _round(
        self, held: Array, last: Array | None, step: PermuteStep, rows: Sequence[Sequence[_Row]]
    ) -> tuple[Array, Array]:
        """All that is sent is read before anything is written."""
        arrived = [
            self._carry([last] if step.forwards else self._read(held, move, row), move)
            for move, row in zip(step.moves, rows, strict=True)
        ]
        for move, row, windows in zip(step.moves, rows, arrived, strict=True):
            for part, at, window in zip(move.parts, row, windows, strict=True):
                last = self._land(held, window, part, at)
                if step.stores:
                    whole = part.length == held.shape[0]
                    held = last if whole else lax.dynamic_update_slice(held, last, (at.put,))
        return held, last

    def _read(self, held: Array, move: Move, row: Sequence[_Row]) -> list[Array]:
        parts = zip(move.parts, row, strict=True)
        return [_window(held, at.take, part.length) for part, at in parts]

    def _carry(self, windows: Sequence[Array], move: Move) -> list[Array]:
        """What arrives at this rank, part by part: zeros where nothing is sent to it."""
        message = windows[0] if len(windows) == 1 else jnp.concatenate(windows)
        members = self.team.members
        pairs = [(int(group[src]), int(group[dst])) for group in members for src, dst in move.pairs]
        if self.on_cpu:
            message = as_bits(lambda moved: native.permute(moved, self.team.axes, pairs), message)
        else:
            message = native.permute(message, self.team.axes, pairs)
        ends = itertools.accumulate(part.length for part in move.parts)
        return [message[end - part.length : end] for part, end in zip(move.parts, ends, strict=True)]

    def _land(self, held: Array, message: Array, part: PermutePart, at: _Row) -> Array:
        """What is in the window after `message` has arrived."""
        old = _window(held, at.put, part.length)
        new = message
        if part.adds.all():
            new = self._combine(old, message)
        elif part.adds.any():
            new = jnp.where(at.adds, self._combine(old, message), message)
        if not part.is_whole:
            element = lax.iota(jnp.int32, part.length)
            new = jnp.where((element >= at.low) & (element < at.high), new, old)
        elif not part.is_all:
            new = jnp.where(at.high > 0, new, old)
        return new

    def _combine(self, old: Array, new: Array) -> Array:
        extreme = {"max": jnp.maximum, "min": jnp.minimum}.get(self.op)
        return _rounded(old + new) if extreme is None else extreme(old, new)


def _rounded(total: Array) -> Array:
    """A sum of 16-bit floats as what it is: else XLA keeps it wider for the sums that follow."""
    if not jnp.issubdtype(total.dtype, jnp.floating) or total.dtype.itemsize != 2:
        return total
    kind = jnp.finfo(total.dtype)
    return lax.reduce_precision(total, kind.nexp, kind.nmant)


def _window(held: Array, start: Array, length: int) -> Array:
    return held if length == held.shape[0] else lax.dynamic_slice(held, (start,), (length,))


def _narrow(table: Ints | Bools) -> Any:
    """Offsets in 32 bits, as JAX holds them, unless they need more."""
    if table.dtype == np.bool_ or table.max(initial=0) > np.iinfo(np.int32).max:
        return table
    return table.astype(np.int32)
