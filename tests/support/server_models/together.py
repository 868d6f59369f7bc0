"""Several servers at once: every combination of their states.

Servers share only workers, and a worker posts its next leg when every server has answered the one before. So
the global state is one state of each server, as found by `one_server`, and for each worker that will die the
number of legs that it posts before. An event changes the state of one server; it is possible if the leg of
its message has been posted, which the answers of the servers determine.

States are numbers in arrays, processed by rank: every event increases the rank, so no state recurs and
earlier ranks can be dropped.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from commplan.protocol.sites import Sites

from .models import Model
from .one_server import Graph, legs

Codes = NDArray[np.int64]
_WIDTH = 1 << 22  # states whose successors are made at once
_CHOICES = 32  # choices of when workers die that are explored at once


class _Table(NamedTuple):
    """The fields of a `State` in arrays, one entry for each of a graph. step: their digit in a code."""

    arrived: Codes
    lost: Codes
    leg: NDArray[np.int8]
    answered: NDArray[np.int8]
    rank: Codes
    failed: NDArray[np.bool_]
    over: NDArray[np.bool_]
    step: int

    def at(self, codes: Codes) -> Codes:
        """The state of this server in each combination."""
        return codes // self.step % len(self.rank)


def _tables(graphs: Sequence[Graph]) -> tuple[_Table, ...]:
    tables: list[_Table] = []
    step = 1
    for graph in graphs:
        columns = map(np.array, zip(*graph.states, strict=True))
        arrived, lost, leg, answered, rank, failed, over = columns
        leg, answered = leg.astype(np.int8), answered.astype(np.int8)
        tables.append(_Table(arrived, lost, leg, answered, rank, failed, over, step))
        step *= len(graph.states)
    return tuple(tables)


def explore_together(model: Model, sites: Sites, graphs: Sequence[Graph], *, most: int) -> tuple[int, str]:
    """The number of combined states of the servers of `model`, and the first error, if any.

    `graphs`: all states of each server alone.

    Raises:
        ValueError: if there are more than `most` states.
    """
    ends = len(legs(model, sites)) - 1  # the leg with which a worker leaves
    lives = ends + 1
    choices = [
        chosen
        for chosen in itertools.product(range(lives + 1), repeat=model.workers)
        if sum(posted < lives for posted in chosen) <= model.deaths
    ]
    tables, states = _tables(graphs), 0
    for first in range(0, len(choices), _CHOICES):
        posted = np.array(choices[first : first + _CHOICES], np.int8)
        product = _Together(tables, posted, lives)
        for count in product.ranks():
            states += count
            if states > most:
                raise ValueError(f"{model} has more than {most} states")
        if product.stuck:
            return states, product.stuck
    return states, ""


class _Together:
    """posted: by choice and worker, how many legs the worker posts before it dies; `lives` if it does not."""

    def __init__(self, tables: Sequence[_Table], posted: NDArray[np.int8], lives: int) -> None:
        self.tables, self.posted, self.lives = tables, posted, lives
        self.size = tables[-1].step * len(tables[-1].rank)  # of a choice
        self.waiting: dict[int, list[Codes]] = {0: [np.arange(len(posted), dtype=np.int64) * self.size]}
        self.stuck = ""

    def ranks(self) -> Iterator[int]:
        """The number of states of each rank, up to the first one with a deadlock."""
        while self.waiting and not self.stuck:
            rank = min(self.waiting)
            codes = np.unique(np.concatenate(self.waiting.pop(rank)))
            yield codes.size
            for start in range(0, codes.size, _WIDTH):
                self._go_on(rank, codes[start : start + _WIDTH])

    def _go_on(self, rank: int, codes: Codes) -> None:
        """The successors of states of one rank."""
        states = [table.at(codes) for table in self.tables]
        tables = list(zip(self.tables, states, strict=True))
        failed = np.logical_or.reduce([table.failed[at] for table, at in tables])  # then all report it
        posted = self.posted[codes // self.size]
        answered = np.minimum.reduce([table.answered[at] for table, at in tables])
        moved = failed | np.logical_and.reduce([table.over[at] for table, at in tables])
        for table, at in tables:
            # A leg is posted when the one before is answered everywhere; a worker that dies has posted all
            # its legs.
            is_answered = (table.leg[at] <= answered) & (table.leg[at] < posted)
            dead = (posted < self.lives) & (posted <= answered + 1) & (table.lost[at] >= 0)
            for after, can in ((table.arrived, is_answered), (table.lost, dead)):
                happens = can & ~failed[:, None]
                moved |= happens.any(axis=1)
                for worker in np.flatnonzero(happens.any(axis=0)):
                    who = np.flatnonzero(happens[:, worker])
                    before, then = at[who], after[at[who], worker]
                    more = table.rank[then] - table.rank[before]
                    self._add(rank, more, codes[who] + (then - before) * table.step)
        if not moved.all():
            self._wait(states, int(np.flatnonzero(~moved)[0]))

    def _add(self, rank: int, more: Codes, codes: Codes) -> None:
        for step in np.flatnonzero(np.bincount(more)):
            self.waiting.setdefault(rank + int(step), []).append(codes[more == step])

    def _wait(self, states: Sequence[Codes], which: int) -> None:
        """No event is possible, and not all workers are gone."""
        pairs = zip(self.tables, states, strict=True)
        answered = (table.answered[at[which]].tolist() for table, at in pairs)
        words = "; ".join(f"server {server} has answered {legs}" for server, legs in enumerate(answered))
        self.stuck = f"a worker waits forever: of the workers' requests {words}"
