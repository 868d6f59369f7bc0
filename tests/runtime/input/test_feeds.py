"""Feeds: the batches of programs that join one, and the plans and arguments that they may not have."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from typing import Any

import feed_process
import numpy as np
import pytest
from feed_members import FUNCTIONS, check_same, expected, joined
from feed_process import decode, noise, records, text
from multirate_plans import code

import commplan
from commplan.diagnostics import CommplanError
from commplan.runtime.input.feeds import status


def decode_otherwise(number: Any) -> Any:
    return decode(number + 0)


@pytest.mark.parametrize("tail", ["", "tail short"])
def test_members_of_one_process_are_given_what_each_would_read_alone(feed_name: str, tail: str) -> None:
    feed_process.STATE["decoded"] = 0
    with joined(feed_name, text(tail=tail)) as feed, joined(feed_name, text(tail=tail)) as other_feed:
        assert (feed.member, other_feed.member, feed.steps) == (0, 1, 7)
        pairs = [list(zip(feed, other_feed, strict=True)) for _ in range(2)]
        assert feed_process.STATE["decoded"] == 2 * (26 if tail else 28)
        assert feed.state() == other_feed.state() and feed.state()["epoch"] == 2
        for member in range(2):
            check_same(
                [pair[member] for epoch in pairs for pair in epoch], expected(member, epochs=2, tail=tail)
            )
        first, second = pairs[1][-1]
        assert first.mask.all() == bool(tail) and (first.mask == second.mask).all()
        assert not first["pixels"].flags.writeable
        assert (first["mine"] != second["mine"]).any()


def test_a_batch_shows_the_memory_that_all_see(feed_name: str) -> None:
    plan = text().replace("mine           = map noise(pixels) per member", "").replace(" mine,", "")
    with joined(feed_name, plan) as feed:
        batches = [next(feed) for _ in range(3)]
        copies = [batch["pixels"].copy() for batch in batches]
        assert all(batch["pixels"].ctypes.data % 64 == 0 for batch in batches)
        later_batches = list(feed)
        for batch, copy in zip(batches, copies, strict=True):  # longer than its slot lasts
            np.testing.assert_array_equal(batch["pixels"], copy)
        assert len(later_batches) == 4
        assert copies[0].shape[0] == batches[0].mask.sum() > later_batches[-1].mask.sum()
        with pytest.raises(KeyError, match="did you mean `pixels`"):
            _ = later_batches[-1]["pixel"]
        arrays = later_batches[-1].jax()
        np.testing.assert_array_equal(arrays["pixels"], later_batches[-1]["pixels"])


@pytest.mark.parametrize("batch", [12, 24])  # of three units, and of more than there are slots
@pytest.mark.parametrize("tail", ["", "tail short"])
def test_a_batch_of_its_own_is_several_units(feed_name: str, tail: str, batch: int) -> None:
    plan = text(tail=tail)
    with joined(feed_name, plan) as small, joined(feed_name, plan, batch=batch) as large:
        assert (small.steps, large.steps) == (7, -(-28 // batch))
        batches_of: dict[int, list[Any]] = {0: [], 1: []}
        for _ in range(2):
            threads = [
                threading.Thread(target=batches_of[member].extend, args=(feed,))
                for member, feed in enumerate((small, large))
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        for received in batches_of[1]:
            assert len(received["labels"]) == batch or tail
        whole = expected(1, batch=batch, epochs=2, tail=tail)
        for received, other in zip(batches_of[1], whole, strict=True):
            np.testing.assert_array_equal(received["labels"], other["labels"])
            np.testing.assert_array_equal(received["n"], other["n"])
        with pytest.raises(CommplanError) as error:
            joined(feed_name, plan, batch=6)
        assert code(error) == "CP0931"


def test_a_feed_that_is_joined_for_each_epoch_is_a_warning(feed_name: str) -> None:
    def epoch() -> None:
        with joined(feed_name) as feed:
            assert len(list(feed)) == feed.steps

    epoch()
    with pytest.warns(UserWarning, match=r"CP0949[\s\S]*commplan\.join"):
        epoch()


def test_who_comes_late_begins_with_the_next_epoch_and_a_state_goes_on(feed_name: str) -> None:
    with joined(feed_name) as feed:
        for _ in range(3):
            next(feed)
        late = joined(feed_name)
        assert late.state()["epoch"] == 1 and late.state()["step"] == 0
        received = list(feed)
        assert len(received) == 4
        state = feed.state()
        pairs = list(zip(feed, late, strict=True))
        check_same([pair[1] for pair in pairs], expected(1, epochs=2)[7:])
        late.close()
        back = joined(feed_name, member=1, state={**state, "step": 2})
        assert back.state()["step"] == 2
        check_same(list(back), expected(1, epochs=2)[9:])
        back.close()


def test_trials_with_own_epochs_have_the_same_batches_whenever_they_begin(feed_name: str) -> None:
    with joined(feed_name, epochs="own") as first:
        received = list(first)
        for _ in range(3):
            received.append(next(iter(first)))
        late = joined(feed_name, member=1, epochs="own")
        assert late.state()["epoch"] == late.state()["step"] == 0
        trial = [next(late) for _ in range(4)]
        received += list(first)  # it waits for no late member, which this thread drives too
        saved = late.state()
        late.close()
        with joined(feed_name, member=1, state=saved, epochs="own") as back:
            trial += list(back)
            assert back.state()["epoch"] == 1
            trial += list(back)
        check_same(received, expected(0, epochs=2))
        check_same(trial, expected(1, epochs=2))
        for own_batch, other in zip(received, trial, strict=True):
            for name in ("pixels", "labels", "n"):
                np.testing.assert_array_equal(own_batch[name], other[name])
    with pytest.raises(CommplanError) as error:
        joined(feed_name, epochs="mine")
    assert code(error) == "CP0928" and "not 'mine'" in str(error.value)


def test_trials_that_begin_together_read_each_record_once(feed_name: str) -> None:
    feed_process.STATE["decoded"] = 0
    with joined(feed_name, epochs="own") as first, joined(feed_name, epochs="own") as second:
        pairs = list(zip(first, second, strict=True))
        assert feed_process.STATE["decoded"] == 28
        check_same([pair[1] for pair in pairs], expected(1))


def test_where_any_record_may_come_again_one_begins_at_once(feed_name: str) -> None:
    plan = text(visit="at_least_once")
    with joined(feed_name, plan, 100) as feed:
        for _ in range(3):
            next(feed)
        with joined(feed_name, plan, 100) as late:
            assert late.state()["epoch"] == 0 and late.state()["step"] > 0
            for _ in range(late.state()["step"] - 3):
                next(feed)
            pairs = list(zip(feed, late, strict=True))
            assert pairs and all(first.step == second.step for first, second in pairs)


@pytest.mark.parametrize(
    ("other", "note"),
    [
        ({"count": 27}, "source `numbers`: 27 records here, 26 records there"),
        ({"functions": {"decode": decode_otherwise, "noise": noise}}, "function `decode`: source "),
        ({"plan": text(batch=8)}, "the plan: fed "),
    ],
)
def test_others_must_bring_the_same(feed_name: str, other: dict[str, Any], note: str) -> None:
    with joined(feed_name) as feed:
        with pytest.raises(CommplanError) as error:
            joined(feed_name, **other)
        assert code(error) == "CP0922" and note in str(error.value)
        assert len(list(feed)) == 7


def test_sources_are_told_apart_by_their_keys(feed_name: str) -> None:
    class Keyed(list[int]):
        key = "v1"

    first, second = Keyed(range(26)), Keyed(range(26))
    second.key = "v2"
    with joined(feed_name, source=first), pytest.raises(CommplanError) as error:
        joined(feed_name, source=second)
    assert "26 records, key v2 here, 26 records, key v1 there" in str(error.value)


def test_a_place_is_taken_once(feed_name: str) -> None:
    with joined(feed_name, member=3) as three, joined(feed_name) as first:
        assert (three.member, first.member) == (3, 0)
        with pytest.raises(CommplanError) as error:
            joined(feed_name, member=3)
        assert code(error) == "CP0929" and str(os.getpid()) in str(error.value)
    for member, wrong_name in ((64, feed_name), (None, "a/b")):
        with pytest.raises(CommplanError) as error:
            joined(wrong_name, member=member)
        assert code(error) in ("CP0929", "CP0928")


def test_a_feed_has_at_most_64_members(feed_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = text().replace("member = ?", "member = 100")
    with joined(feed_name, plan, member=63):
        with pytest.raises(CommplanError, match="at most 64 members, so it has no member 70") as error:
            joined(feed_name, plan, member=70)
        assert code(error) == "CP0929"
        with pytest.raises(CommplanError, match="`member` has no member 100"):
            joined(feed_name, plan, member=100)
    monkeypatch.setattr("commplan.runtime.input.feeds.joining.MEMBERS", 3)
    for size, limit in ((100, "3 members already, and a feed can"), (2, "2 members already, and the plan")):
        plan = text().replace("member = ?", f"member = {size}")
        with contextlib.ExitStack() as stack:
            for _ in range(min(size, 3)):
                stack.enter_context(joined(feed_name, plan))
            with pytest.raises(CommplanError, match=limit) as error:
                joined(feed_name, plan)
            assert code(error) == "CP0929"


def test_plans_that_share_nothing_or_need_a_device_are_refused(feed_name: str) -> None:
    bare = (
        "plan p\nensemble member = ?\nsource numbers : i64\n{fn}"
        "each step {{ x = load numbers batch 4 visit exactly_once seed 1\n{rest} }}"
    )
    for fn, body, expected_code in (
        ("", "x = share x over member via duplicate\n output x", "CP0930"),
        ("fn half(i64) -> f32 on device\n", "y = map half(x)\n output y, x", "CP0932"),
    ):
        with pytest.raises(CommplanError) as error:
            joined(feed_name, bare.format(fn=fn, rest=body), functions={"half": float})
        assert code(error) == expected_code


def test_one_thread_is_told_which_member_to_drive(feed_name: str) -> None:
    with joined(feed_name) as first, joined(feed_name) as second:
        with pytest.raises(CommplanError) as error:
            for _ in first:
                pass
        assert code(error) == "CP0946" and "would wait for member 1" in str(error.value)
        while first.state()["epoch"] == 0:  # nothing is lost: it goes on once the other has
            next(second)
            next(first)
        assert first.state()["epoch"] == 1


def test_the_command_lists_who_is_there(feed_name: str) -> None:
    with joined(feed_name) as member_feed, joined(feed_name, member=4):
        next(member_feed)
        command = [sys.executable, "-m", "commplan", "feeds", "--format", "json"]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        (feed,) = [feed for feed in json.loads(result.stdout)["feeds"] if feed["name"] == feed_name]
        assert [member["member"] for member in feed["members"]] == [0, 4]
        assert feed["members"][0]["records"] == 4 and feed["members"][0]["pid"] == os.getpid()
        assert [each.name for each in status.feeds() if each.name == feed_name] == [feed_name]
        assert feed["nbytes"] > 0
        with pytest.raises(CommplanError):  # the locks are held as before
            joined(feed_name, member=4)
        watching = subprocess.Popen([*command[:4], "--watch"], stdout=subprocess.PIPE, text=True)
        try:
            for _ in range(2):  # a list, and the next one below it
                assert any(line.startswith(f"{feed_name}: ") for line in watching.stdout or ())
            watching.send_signal(signal.SIGINT)
            watching.communicate()
            assert watching.returncode == 130
        finally:
            watching.kill()


@pytest.mark.parametrize(
    ("mistake", "expected_code"),
    [
        ({"sources": None}, "CP0900"),
        ({"sources": [1, 2]}, "CP0900"),
        ({"functions": [decode]}, "CP0908"),
        ({"member": 1.0}, "CP0929"),
        ({"member": "0"}, "CP0929"),
        ({"batch": "4"}, "CP0931"),
        ({"batch": 4.0}, "CP0931"),
    ],
)
def test_arguments_of_another_kind_are_refused(
    feed_name: str, mistake: dict[str, Any], expected_code: str
) -> None:
    arguments: dict[str, Any] = {"sources": {"numbers": records(26)}, "functions": FUNCTIONS, **mistake}
    with pytest.raises(CommplanError) as error:
        commplan.join(feed_name, commplan.loads(text()), **arguments)
    assert code(error) == expected_code


TWO_LOADS = """
plan fed
ensemble member = ?
source small : i64
source large : i64
each step {{
    x, n = load small batch {small} visit exactly_once seed 7
    y, m = load large batch {large} visit exactly_once seed 8
    output x, y, n, m
}}
"""


@pytest.mark.parametrize("sizes", [(8, 4), (4, 8)])
def test_loads_of_other_batches_are_as_long_as_they_are(feed_name: str, sizes: tuple[int, int]) -> None:
    small, large = sizes
    sources = {"small": np.arange(2 * small), "large": 100 + np.arange(2 * large)}
    plan = commplan.loads(TWO_LOADS.format(small=small, large=large))
    with commplan.join(feed_name, plan, sources=sources, timeout=30.0) as feed:
        batches: list[Any] = list(feed)
        shapes = [(batch["x"].shape, batch["y"].shape, int(batch["n"]), int(batch["m"])) for batch in batches]
        assert shapes == 2 * [((small,), (large,), small, large)]
        for name, source in (("x", "small"), ("y", "large")):
            values = np.concatenate([batch[name] for batch in batches])
            assert sorted(values.tolist()) == sources[source].tolist()
