"""The producers of rows: every part once, also after deaths; after the moves every host has every part
once."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator

import pytest

from commplan.input.work_partition import Division, dealt, division, failover
from commplan.ir.remark import Design

DESIGNS: tuple[Design, ...] = ("duplicate", "all_shared", "single_broadcast", "multi_broadcast")


def layouts(most: int) -> Iterator[tuple[int, ...]]:
    """Every assignment of up to `most` processes to hosts, with hosts numbered by first appearance."""
    for count in range(1, most + 1):
        for hosts in itertools.product(range(count), repeat=count):
            if tuple(dict.fromkeys(hosts)) == tuple(range(max(hosts) + 1)):
                yield hosts


def divisions(most: int) -> Iterator[Division]:
    for hosts in layouts(most):
        for design in DESIGNS:
            reader_counts = (None, *range(1, len(hosts) + 1)) if design.endswith("broadcast") else (None,)
            for readers in reader_counts:
                yield division(design, hosts, readers)


def living(processes: int) -> Iterator[tuple[int, ...]]:
    for count in range(1, processes + 1):
        yield from itertools.combinations(range(processes), count)


def held_after(split: Division, alive: Collection[int]) -> dict[int, Counter[int]]:
    """How often each host has got each part when all moves are done, those that it makes included."""
    hosts = {split.hosts[process] for process in alive}
    parts_of = {host: Counter(p for process in alive if split.hosts[process] == host
                          for p in (split.parts_of(process) if split.design != "duplicate" else ()))
            for host in hosts}  # fmt: skip
    if split.design == "duplicate":
        return {host: Counter(range(split.parts)) for host in hosts}
    for move in split.moves(alive):
        assert set(move.hosts) <= hosts
        assert len(set(move.hosts)) == len(move.hosts)
        if move.kind == "broadcast":
            (parts,) = move.parts
            assert set(parts) <= set(parts_of[move.hosts[move.root]]), "a root sends what it does not have"
            for place, host in enumerate(move.hosts):
                if place != move.root:
                    parts_of[host].update(parts)
            continue
        for host, parts in zip(move.hosts, move.parts, strict=True):
            assert set(parts) <= set(parts_of[host])
        for host, sent in zip(move.hosts, move.parts, strict=True):
            parts_of[host].update(part for parts in move.parts if parts is not sent for part in parts)
    return parts_of


def test_rows_are_cut_without_gap_or_overlap_and_evenly() -> None:
    for parts, rows in itertools.product(range(1, 14), range(60)):
        split = division("all_shared", range(parts))
        cut = [split.part(rows, part) for part in range(parts)]
        assert [row for low, high in cut for row in range(low, high)] == list(range(rows))
        sizes = [high - low for low, high in cut]
        assert max(sizes) - min(sizes) <= 1


def test_every_part_has_one_maker_and_readers_are_the_first_processes() -> None:
    for split in divisions(5):
        makers = Counter(part for process in range(len(split.hosts)) for part in split.parts_of(process))
        if split.design == "duplicate":
            assert set(makers.values()) == {len(split.hosts)}
        else:
            assert makers == Counter(range(split.parts))
            assert sorted(split.readers) == list(range(split.parts))


def test_every_host_gets_every_part_once_in_every_design() -> None:
    for split in divisions(5):
        parts_of = held_after(split, range(len(split.hosts)))
        assert set(parts_of) == set(split.hosts)
        assert all(parts == Counter(range(split.parts)) for parts in parts_of.values()), split


def test_the_parts_of_a_host_are_a_run() -> None:
    for split in divisions(5):
        for host in set(split.hosts):
            low, high = split.part_range(host)
            assert split.parts_on(host) == tuple(range(low, high))
        for move in split.moves():
            assert [tuple(range(low, high)) for low, high in move.runs] == list(move.parts)


def test_whoever_dies_every_part_is_made_once_by_the_living() -> None:
    """All sets of survivors of up to five processes, on all layouts, in all designs."""
    for split in divisions(5):
        if split.design == "duplicate":
            continue
        for alive in living(len(split.hosts)):
            after = failover(split, alive)
            assert after.parts == split.parts
            assert set(after.readers) <= set(alive)
            for was, now in zip(split.readers, after.readers, strict=True):
                if was in alive:
                    assert now == was
                elif any(split.hosts[p] == split.hosts[was] for p in alive):
                    assert now == split.successor(was, alive)
            parts_of = held_after(after, alive)
            assert all(parts == Counter(range(split.parts)) for parts in parts_of.values())


def test_who_dies_first_makes_no_difference() -> None:
    split = division("all_shared", (0, 0, 1, 1))
    for alive in living(4):
        for more in living(4):
            both = set(alive) & set(more)
            if both:
                again = failover(split, both)
                assert [p for p in failover(split, alive).readers if p in both] == [
                    now
                    for p, now in zip(failover(split, alive).readers, again.readers, strict=True)
                    if p in both
                ]


def test_heirs_of_one_host_share_the_work_of_its_dead() -> None:
    """Two dead readers have different heirs where two others live between them."""
    split = division("all_shared", (0, 0, 0, 0))
    assert [split.successor(dead, {1, 3}) for dead in (0, 2)] == [1, 3]
    assert split.successor(3, {0, 1, 2}) == 0
    assert split.successor(0, ()) is None


def test_a_dead_host_leaves_its_parts_to_readers_elsewhere_in_turn() -> None:
    split = division("all_shared", (0, 0, 1, 1))
    assert failover(split, {2, 3}).readers == (2, 3, 2, 3)
    one_reader = division("single_broadcast", (0, 1, 1), 1)
    assert failover(one_reader, {1, 2}).readers == (1,)
    with pytest.raises(ValueError, match="no process is left"):
        failover(split, ())


def test_moves_of_the_designs() -> None:
    """Two readers on two of three hosts: the shapes as they are described."""
    hosts = (0, 1, 2)
    single = division("single_broadcast", hosts, 2).moves()
    assert [(m.kind, m.hosts, m.parts) for m in single] == [
        ("all_gather", (0, 1), ((0,), (1,))),
        ("broadcast", (1, 2), ((0, 1),)),
    ]
    multi = division("multi_broadcast", hosts, 2).moves()
    assert [(m.kind, m.hosts, m.parts) for m in multi] == [
        ("broadcast", (0, 1, 2), ((0,),)),
        ("broadcast", (1, 2, 0), ((1,),)),
    ]
    assert [m.kind for m in division("all_shared", hosts).moves()] == ["all_gather"]
    assert division("duplicate", hosts).moves() == ()
    assert division("all_shared", (4, 4)).moves() == ()
    assert division("all_shared", (0, 1, 1)).moves(alive={1, 2}) == ()


@pytest.mark.parametrize("parts", range(1, 9))
def test_parts_are_dealt_evenly_among_the_processes_of_a_host(parts: int) -> None:
    for count in range(1, 9):
        makers = [10 + process for process in range(count)]
        units = [[dealt(unit, part, parts, makers) for part in range(parts)] for unit in range(count)]
        assert Counter(maker for unit in units for maker in unit) == dict.fromkeys(makers, parts)
        assert all(len(set(unit)) == min(parts, count) for unit in units)
