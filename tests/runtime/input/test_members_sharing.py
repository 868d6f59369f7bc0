"""`run.batches(member=m)` of shared values: read once for all, and the same bits as `run.batches()`."""

from __future__ import annotations

import logging
import threading
from typing import Any

import numpy as np
import pytest
from input_plans import Counting, decode, flip, images
from multirate_plans import code
from support.embedding import bind, mesh_of

from commplan.diagnostics import CommplanError
from commplan.runtime.input.group import group

PLAN = """
plan sharing
ensemble member = 3
axis     data   = 2
source images : bytes
fn decode(bytes)     -> u8[6, 6], i32 on host
fn flip(u8[6, 6])    -> u8[6, 6] on host random
each step {{
    raw, n         = load images batch 8 split data visit exactly_once seed 5
    pixels, labels = map decode(raw)
    common          = map flip(pixels)
    {share}
    own            = map flip(pixels) per member
    output own, common, labels, n
}}
"""
RECORDS = 45
STEPS = 6


ALONE = """
plan alone
axis data = 2
source numbers : u8[6]
each step { x = load numbers batch 4 split data visit exactly_once seed 1
            output x }
"""


def run_of(design: str = "") -> tuple[Any, Counting]:
    """Everything via `design`; None leaves the choice to the compiler."""
    names = ("pixels", "labels", "common") if design else ()
    share = "\n    ".join(f"{name} = share {name} over member via {design}" for name in names)
    source = Counting(images(RECORDS))
    functions = {"decode": decode, "flip": flip}
    mesh = mesh_of(member=3, data=2)
    return bind(PLAN.format(share=share), mesh, sources={"images": source}, functions=functions), source


def check_parts(parts: list[list[dict[str, Any]]], whole: list[dict[str, Any]]) -> None:
    for member, items in enumerate(parts):
        for item, expected in zip(items, whole, strict=True):
            np.testing.assert_array_equal(item["own"], expected["own"][member])
            for name in ("common", "labels", "n"):
                np.testing.assert_array_equal(item[name], expected[name])


@pytest.mark.parametrize("by", ["batches", "member"])
def test_members_of_a_process_read_each_record_once(by: str) -> None:
    run, source = run_of()
    with run.batches() as batches:
        whole = [dict(item) for _ in range(2) for item in batches]
    source.read.clear()
    feeds = [run.batches(member=m) if by == "batches" else run.member(m).batches() for m in range(3)]
    parts: list[list[dict[str, Any]]] = [[], [], []]
    for _ in range(2):
        for items in zip(*feeds, strict=True):
            for member, item in enumerate(items):
                parts[member].append(item)
    check_parts(parts, whole)
    assert len(source.read) == 2 * STEPS * 8
    for feed in feeds:
        feed.close()


def test_threads_that_drive_a_member_each_share() -> None:
    run, source = run_of("single_broadcast(readers = 1)")
    with run.batches() as batches:
        whole = [dict(item) for item in batches]
    source.read.clear()
    feeds = [run.batches(member=m) for m in range(3)]
    parts: list[list[dict[str, Any]]] = [[], [], []]
    threads = [threading.Thread(target=lambda m=m: parts[m].extend(feeds[m])) for m in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check_parts(parts, whole)
    for feed in feeds:
        feed.close()


def test_one_member_after_another_reads_again_and_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Any other thread might come to drive a member, also one that another test has left behind.
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.current_thread()])
    run, source = run_of()
    with run.batches() as batches:
        whole = [dict(item) for item in batches]
    source.read.clear()
    feeds = [run.batches(member=m) for m in range(2)]
    with caplog.at_level(logging.WARNING, "commplan.input"):
        parts = [list(feed) for feed in feeds]
    check_parts(parts, whole)
    assert "member 0 of `member` goes on without member 1, which the same thread drives" in caplog.text
    assert len(source.read) > STEPS * 8
    for feed in feeds:
        feed.close()


def test_members_that_the_plan_keeps_apart_read_for_themselves() -> None:
    run, source = run_of("duplicate")
    for m in range(2):
        with run.batches(member=m) as batches:
            assert len(list(batches)) == STEPS
    assert len(source.read) == 2 * STEPS * 8


def test_a_group_that_has_nothing_to_share_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    run = bind(ALONE, mesh_of(data=2), sources={"numbers": np.zeros((8, 6), np.uint8)})
    with pytest.raises(CommplanError) as error:
        run.batches(group=group("alone", 0, 2))
    assert code(error) == "CP0927"
    with run.batches(group=group("alone", 0, 1)) as batches:
        assert len(list(batches)) == 2
    run, _ = run_of("duplicate")
    with run.batches(group=group("apart", 0, 2)) as batches:
        assert len(list(batches)) == STEPS
    assert "process 0 of 2 reads everything itself: line" in caplog.text
