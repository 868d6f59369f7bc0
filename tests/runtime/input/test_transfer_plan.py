"""Transfers between hosts: executed here by all of them at once, in any order of arrival."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commplan.input.work_partition import Division, division, failover
from commplan.lowering.mpi.instructions import COPY, OUTPUT, RECEIVE, SCRATCH, SEND, Instructions
from commplan.runtime.input.transport.transfer_plan import Form, transfer_list


class _Host:
    """One host: its rows and its progress."""

    def __init__(self, instructions: Instructions, slot: np.ndarray) -> None:
        self.made, self.slot = instructions, slot
        self.scratch = np.zeros(instructions.scratch, np.uint8)
        self.done: set[int] = set()
        self.missing = [set(waits) for waits in instructions.waits]
        self.waiters: dict[int, list[int]] = defaultdict(list)
        for i, waits in enumerate(self.missing):
            for earlier in waits:
                self.waiters[earlier].append(i)
        receives = [(instructions.peers[row.peer], row.message, i) for i, row in self.rows(RECEIVE)]
        self.receives = {(peer, message): i for peer, message, i in receives}
        assert len(self.receives) == len(receives)

    def rows(self, *kinds: int) -> list[tuple[int, Any]]:
        return [(i, row) for i, row in enumerate(self.made.code) if row.kind in kinds]

    def at(self, buffer: int, offset: int, nbytes: int) -> np.ndarray:
        return {OUTPUT: self.slot, SCRATCH: self.scratch}[buffer][offset : offset + nbytes]

    def finish(self, i: int) -> list[int]:
        """Mark instruction `i` as done; return the sends and copies that waited for it last."""
        assert i not in self.done
        self.done.add(i)
        ready: list[int] = []
        for later in self.waiters[i]:
            self.missing[later].remove(i)
            if not self.missing[later] and self.made.code[later].kind != RECEIVE:
                ready.append(later)
        return ready


def carried_out(lists: dict[int, Instructions], slots: dict[int, np.ndarray], seed: int) -> int:
    """Deliver messages in a random order until none is left; returns their number. Fails if some cannot be
    sent."""
    rng = random.Random(seed)
    hosts = {host: _Host(instructions, slots[host]) for host, instructions in lists.items()}
    ready = [(host, i) for host, at in hosts.items() for i, _ in at.rows(SEND, COPY) if not at.missing[i]]
    count = 0
    while ready:
        chosen = rng.randrange(len(ready))
        ready[chosen], ready[-1] = ready[-1], ready[chosen]
        host, i = ready.pop()
        at = hosts[host]
        row = at.made.code[i]
        source = at.at(row.src, row.src_offset, row.nbytes)
        if row.kind == COPY:
            at.at(row.dst, row.dst_offset, row.nbytes)[:] = source
        else:
            to = at.made.peers[row.peer]
            other = hosts[to]
            j = other.receives[host, row.message]
            instruction = other.made.code[j]
            assert instruction.nbytes == row.nbytes
            other.at(instruction.dst, instruction.dst_offset, row.nbytes)[:] = source
            ready += [(to, later) for later in other.finish(j)]
            count += 1
        ready += [(host, later) for later in at.finish(i)]
    assert all(len(host.done) == len(host.made.code) for host in hosts.values())
    return count


def nbytes(instructions: Instructions, opcode: int) -> int:
    return sum(row.nbytes for row in instructions.code if row.kind == opcode)


def carry(
    division: Division, forms: list[Form], piece: int, seed: int, alive: list[int] | None = None
) -> int:
    """Every host fills its own parts, all is carried, and every host must hold every row of every copy."""
    living = list(range(len(division.hosts))) if alive is None else alive
    hosts = sorted({division.hosts[process] for process in living})
    rng = np.random.default_rng(seed)
    whole = [rng.integers(1, 256, (f.copies, f.rows, f.row_nbytes), np.uint8) for f in forms]
    chosen = division.moves(living)
    slots: dict[int, np.ndarray] = {}
    for host in hosts:
        slots[host] = np.zeros(sum(each.nbytes for each in whole), np.uint8)
        for part, reader in enumerate(division.readers):
            if division.hosts[reader] == host or division.design == "duplicate":
                for mine, full, form in zip(arrays(slots[host], forms), whole, forms, strict=True):
                    low, high = form.bounds[part], form.bounds[part + 1]
                    mine[:, low:high] = full[:, low:high]
    instructions_of = {host: transfer_list(chosen, host, forms, piece) for host in hosts}
    count = carried_out(instructions_of, slots, seed)
    for host in hosts:
        for mine, full, form in zip(arrays(slots[host], forms), whole, forms, strict=True):
            assert np.array_equal(mine[:, : form.bounds[-1]], full[:, : form.bounds[-1]]), host
    return count


def arrays(slot: np.ndarray, forms: list[Form]) -> list[np.ndarray]:
    shapes = [(form.copies, form.rows, form.row_nbytes) for form in forms]
    return [
        slot[form.offset : form.offset + math.prod(shape)].reshape(shape)
        for form, shape in zip(forms, shapes, strict=True)
    ]


def forms_of(division: Division, rows: int, full: int, sizes: list[tuple[int, int]]) -> list[Form]:
    """Arrays of (copies, bytes of a row) with `full` rows, `rows` of them in use, and one row of notes a
    part."""
    bounds = (*tuple(division.part(rows, part)[0] for part in range(division.parts)), rows)
    notes = Form(1, division.parts, 16, tuple(range(division.parts + 1)))
    return in_a_row([*(Form(copies, full, nbytes, bounds) for copies, nbytes in sizes), notes])


def in_a_row(forms: list[Form]) -> list[Form]:
    """The arrays of a slot one behind the other."""
    starts = itertools.accumulate((f.copies * f.rows * f.row_nbytes for f in forms), initial=0)
    return [dataclasses.replace(form, offset=start) for form, start in zip(forms, starts, strict=False)]


divisions = st.builds(
    division,
    st.sampled_from(["all_shared", "single_broadcast", "multi_broadcast"]),
    st.lists(st.integers(0, 4), min_size=1, max_size=7).map(
        lambda hosts: tuple(list(dict.fromkeys(hosts)).index(host) for host in hosts)
    ),
    st.none() | st.integers(1, 7),
)


@settings(max_examples=50)
@given(
    division=divisions,
    rows=st.integers(0, 40),
    spare=st.integers(0, 3),
    sizes=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 50)), max_size=3),
    piece=st.integers(1, 400),
    seed=st.integers(0, 999),
)
def test_every_host_gets_every_row(
    division: Division, rows: int, spare: int, sizes: list[tuple[int, int]], piece: int, seed: int
):
    carry(division, forms_of(division, rows, rows + spare, sizes), piece, seed)


@settings(max_examples=50)
@given(
    division=divisions,
    dead=st.sets(st.integers(0, 6), max_size=6),
    rows=st.integers(0, 40),
    seed=st.integers(0, 999),
)
def test_whoever_dies_the_rest_have_every_row(division: Division, dead: set[int], rows: int, seed: int):
    alive = [process for process in range(len(division.hosts)) if process not in dead]
    if not alive:
        with pytest.raises(ValueError, match="no process is left"):
            failover(division, alive)
        return
    now = failover(division, alive)
    assert set(now.readers) <= set(alive)
    surviving = [(old, new) for old, new in zip(division.readers, now.readers, strict=True) if old in alive]
    assert all(old == new for old, new in surviving)
    carry(now, forms_of(now, rows, rows, [(2, 9)]), 100, seed, alive)


def test_a_host_brings_what_every_link_must_carry_and_no_more():
    """The bytes that an all-gather and broadcasts all at once take at least."""
    hosts = (0, 1, 2, 3)
    form = [Form(1, 64, 1000, (0, 16, 32, 48, 64))]
    for design in ("all_shared", "multi_broadcast"):
        chosen = division(design, hosts).moves()
        lists = [transfer_list(chosen, host, form, piece=4000) for host in hosts]
        assert {nbytes(instructions, SEND) for instructions in lists} == {48_000}
        assert {nbytes(instructions, RECEIVE) for instructions in lists} == {48_000}


def test_short_arrays_share_messages_and_long_ones_stay_in_place():
    chosen = division("all_shared", (0, 1)).moves()
    bounds = (0, 16, 32)
    small = in_a_row([Form(1, 32, 4, bounds), Form(1, 32, 1, bounds), Form(1, 2, 1024, (0, 1, 2))])
    assert messages(transfer_list(chosen, 0, small)) == 2
    large = transfer_list(chosen, 0, in_a_row([*small, Form(1, 32, 150_528, bounds)]))
    scattered = [row for row in large.code if row.kind != COPY and SCRATCH in (row.src, row.dst)]
    assert len(scattered) == 2
    assert large.scratch == sum(row.nbytes for row in scattered)
    assert messages(large) >= 18


def messages(instructions: Instructions) -> int:
    return sum(row.kind != COPY for row in instructions.code)


def test_a_block_is_cut_into_few_pieces_however_long():
    chosen = division("all_shared", (0, 1)).moves()
    instructions = transfer_list(chosen, 0, [Form(1, 2, 1 << 30, (0, 1, 2))])
    assert messages(instructions) == 1024
