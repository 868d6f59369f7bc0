"""Scripts of what hosts send each other: carried out here by all of them at once, in any order of arrival."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commplan.input.work_partition import Division, adopted, division
from commplan.runtime.input.transport.transfer_plan import Form, TransferPlan, script


@dataclass
class _Host:
    """What one host holds, and how far it has come."""

    script: TransferPlan
    arrays: list[np.ndarray]
    done: set[int] = field(default_factory=set)

    def sends(self) -> list[int]:
        return [
            i
            for i, m in enumerate(self.script.messages)
            if m.outgoing and i not in self.done and self.done.issuperset(m.waits)
        ]


def carried_out(scripts: dict[int, TransferPlan], arrays: dict[int, list[np.ndarray]], seed: int) -> int:
    """Deliver messages in a random order until none is left; returns how many. Fails where some cannot be."""
    rng = random.Random(seed)
    hosts = {host: _Host(found, arrays[host]) for host, found in scripts.items()}
    count = 0
    while ready := [(host, i) for host, at in hosts.items() for i in at.sends()]:
        host, i = rng.choice(ready)
        message = hosts[host].script.messages[i]
        other = hosts[message.host]
        ((j, taken),) = [
            (j, m)
            for j, m in enumerate(other.script.messages)
            if not m.outgoing and m.host == host and m.number == message.number
        ]
        assert j not in other.done
        assert taken.nbytes == message.nbytes
        data = np.concatenate([arrays[host][w.array][w.low : w.high] for w in message.windows])
        at = 0
        for w in taken.windows:
            other.arrays[w.array][w.low : w.high] = data[at : at + w.high - w.low]
            at += w.high - w.low
        hosts[host].done.add(i)
        other.done.add(j)
        count += 1
    assert all(len(host.done) == len(host.script.messages) for host in hosts.values())
    return count


def carry(found: Division, forms: list[Form], piece: int, seed: int, alive: list[int] | None = None) -> int:
    """Every host fills its own parts, all is carried, and every host must hold every row of every copy."""
    living = list(range(len(found.hosts))) if alive is None else alive
    hosts = sorted({found.hosts[process] for process in living})
    rng = np.random.default_rng(seed)
    whole = [rng.integers(1, 256, (f.copies, f.rows, f.row_nbytes), np.uint8) for f in forms]
    chosen = found.moves(living)
    arrays: dict[int, list[np.ndarray]] = {}
    for host in hosts:
        mine = [np.zeros_like(one) for one in whole]
        for part, reader in enumerate(found.readers):
            if found.hosts[reader] == host or found.design == "duplicate":
                for one, full, form in zip(mine, whole, forms, strict=True):
                    low, high = form.bounds[part], form.bounds[part + 1]
                    one[:, low:high] = full[:, low:high]
        arrays[host] = [one.reshape(-1) for one in mine]
    made = {host: script(chosen, host, forms, piece) for host in hosts}
    count = carried_out(made, arrays, seed)
    for host in hosts:
        for one, full, form in zip(arrays[host], whole, forms, strict=True):
            rows = one.reshape(full.shape)[:, : form.bounds[-1]]
            assert np.array_equal(rows, full[:, : form.bounds[-1]]), host
    return count


def forms_of(found: Division, rows: int, full: int, sizes: list[tuple[int, int]]) -> list[Form]:
    """Arrays of (copies, bytes of a row) with `full` rows of which `rows` are in use, and one row of notes
    a part."""
    bounds = (*tuple(found.part(rows, part)[0] for part in range(found.parts)), rows)
    notes = Form(1, found.parts, 16, tuple(range(found.parts + 1)))
    return [*(Form(copies, full, nbytes, bounds) for copies, nbytes in sizes), notes]


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
    found=divisions,
    rows=st.integers(0, 40),
    spare=st.integers(0, 3),
    sizes=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 50)), max_size=3),
    piece=st.integers(1, 400),
    seed=st.integers(0, 999),
)
def test_every_host_gets_every_row(
    found: Division, rows: int, spare: int, sizes: list[tuple[int, int]], piece: int, seed: int
):
    carry(found, forms_of(found, rows, rows + spare, sizes), piece, seed)


@settings(max_examples=50)
@given(
    found=divisions,
    dead=st.sets(st.integers(0, 6), max_size=6),
    rows=st.integers(0, 40),
    seed=st.integers(0, 999),
)
def test_whoever_dies_the_rest_have_every_row(found: Division, dead: set[int], rows: int, seed: int):
    alive = [process for process in range(len(found.hosts)) if process not in dead]
    if not alive:
        with pytest.raises(ValueError, match="no process is left"):
            adopted(found, alive)
        return
    now = adopted(found, alive)
    assert set(now.readers) <= set(alive)
    kept = [(old, new) for old, new in zip(found.readers, now.readers, strict=True) if old in alive]
    assert all(old == new for old, new in kept)
    carry(now, forms_of(now, rows, rows, [(2, 9)]), 100, seed, alive)


def test_a_host_brings_what_every_link_must_carry_and_no_more():
    """The bytes that an all-gather and broadcasts all at once take at least."""
    hosts = (0, 1, 2, 3)
    form = [Form(1, 64, 1000, (0, 16, 32, 48, 64))]
    for design in ("all_shared", "multi_broadcast"):
        chosen = division(design, hosts).moves()
        made = [script(chosen, host, form, piece=4000) for host in hosts]
        assert {one.nbytes(outgoing=True) for one in made} == {48_000}
        assert {one.nbytes(outgoing=False) for one in made} == {48_000}


def test_short_arrays_share_messages_and_long_ones_stay_in_place():
    chosen = division("all_shared", (0, 1)).moves()
    bounds = (0, 16, 32)
    small = [Form(1, 32, 4, bounds), Form(1, 32, 1, bounds), Form(1, 2, 1024, (0, 1, 2))]
    assert len(script(chosen, 0, small).messages) == 2
    large = script(chosen, 0, [*small, Form(1, 32, 150_528, bounds)])
    scattered = [message for message in large.messages if len(message.windows) > 1]
    assert len(scattered) == 2
    assert len(large.messages) >= 18


def test_a_block_is_cut_into_few_pieces_however_long():
    chosen = division("all_shared", (0, 1)).moves()
    made = script(chosen, 0, [Form(1, 2, 1 << 30, (0, 1, 2))])
    assert len(made.messages) == 1024
