"""Feeds: programs that come, go and die as they like, and what each of them is given."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import feed_process
import numpy as np
import pytest
from feed_members import FUNCTIONS, Member, check_same, expected, joined
from feed_process import DEFAULTS, decode, noise, records, text, told
from multirate_plans import code

import commplan
from commplan.diagnostics import CommplanError, fail
from commplan.runtime.input.feeds import attachment, directory, maker, status
from commplan.runtime.input.feeds.feed import Feed
from commplan.runtime.input.feeds.memory import FeedMemory


def decode_otherwise(number: Any) -> Any:
    return decode(number + 0)


@pytest.mark.parametrize("tail", ["", "tail short"])
def test_members_of_one_process_are_given_what_each_would_read_alone(name: str, tail: str) -> None:
    feed_process._STATE["decoded"] = 0
    with joined(name, text(tail=tail)) as one, joined(name, text(tail=tail)) as two:
        assert (one.member, two.member, one.steps) == (0, 1, 7)
        pairs = [list(zip(one, two, strict=True)) for _ in range(2)]
        assert feed_process._STATE["decoded"] == 2 * (26 if tail else 28)
        assert one.state() == two.state() and one.state()["epoch"] == 2
        for member in range(2):
            check_same(
                [pair[member] for epoch in pairs for pair in epoch], expected(member, epochs=2, tail=tail)
            )
        first, second = pairs[1][-1]
        assert not first["pixels"].flags.writeable
        assert (first["mine"] != second["mine"]).any()


def test_a_batch_shows_the_memory_that_all_see(name: str) -> None:
    plan = text().replace("mine           = map noise(pixels) per member", "").replace(" mine,", "")
    with joined(name, plan) as feed:
        batches = [next(feed) for _ in range(3)]
        kept = [batch["pixels"].copy() for batch in batches]
        assert all(batch["pixels"].ctypes.data % 64 == 0 for batch in batches)
        rest = list(feed)
        for batch, copy in zip(batches, kept, strict=True):  # longer than its slot lasts
            np.testing.assert_array_equal(batch["pixels"], copy)
        assert len(rest) == 4
        arrays = rest[-1].jax()
        np.testing.assert_array_equal(arrays["pixels"], rest[-1]["pixels"])


@pytest.mark.parametrize("tail", ["", "tail short"])
def test_a_batch_of_its_own_is_several_units(name: str, tail: str) -> None:
    plan = text(tail=tail)
    with joined(name, plan) as small, joined(name, plan, batch=12) as large:
        assert (small.steps, large.steps) == (7, 3)
        given: dict[int, list[Any]] = {0: [], 1: []}
        for _ in range(2):
            threads = [
                threading.Thread(target=lambda f=f, m=m: given[m].extend(f))
                for m, f in enumerate((small, large))
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        for batch in given[1]:
            assert len(batch["labels"]) == 12 or tail
        whole = expected(1, batch=12, epochs=2, tail=tail)
        for batch, other in zip(given[1], whole, strict=True):
            np.testing.assert_array_equal(batch["labels"], other["labels"])
            np.testing.assert_array_equal(batch["n"], other["n"])
        with pytest.raises(CommplanError) as error:
            joined(name, plan, batch=6)
        assert code(error) == "CP0931"


def test_who_comes_late_begins_with_the_next_epoch_and_a_state_goes_on(name: str) -> None:
    with joined(name) as one:
        for _ in range(3):
            next(one)
        late = joined(name)
        assert late.state()["epoch"] == 1 and late.state()["step"] == 0
        rest = list(one)
        assert len(rest) == 4
        state = one.state()
        pairs = list(zip(one, late, strict=True))
        check_same([pair[1] for pair in pairs], expected(1, epochs=2)[7:])
        late.close()
        back = joined(name, member=1, state={**state, "step": 2})
        assert back.state()["step"] == 2
        check_same(list(back), expected(1, epochs=2)[9:])
        back.close()


def test_where_any_record_may_come_again_one_begins_at_once(name: str) -> None:
    plan = text(visit="at_least_once")
    with joined(name, plan, 100) as one:
        for _ in range(3):
            next(one)
        with joined(name, plan, 100) as late:
            assert late.state()["epoch"] == 0 and late.state()["step"] > 0
            for _ in range(late.state()["step"] - 3):
                next(one)
            pairs = list(zip(one, late, strict=True))
            assert pairs and all(first.step == second.step for first, second in pairs)


@pytest.mark.parametrize(
    ("other", "note"),
    [
        ({"count": 27}, "source `numbers`: 27 records here, 26 records there"),
        ({"functions": {"decode": decode_otherwise, "noise": noise}}, "function `decode`: source "),
        ({"plan": text(batch=8)}, "the plan: fed "),
    ],
)
def test_others_must_bring_the_same(name: str, other: dict[str, Any], note: str) -> None:
    with joined(name) as one:
        with pytest.raises(CommplanError) as error:
            joined(name, **other)
        assert code(error) == "CP0922" and note in str(error.value)
        assert len(list(one)) == 7


def test_sources_are_told_apart_by_their_keys(name: str) -> None:
    class Keyed(list[int]):
        key = "v1"

    first, second = Keyed(range(26)), Keyed(range(26))
    second.key = "v2"
    with joined(name, source=first), pytest.raises(CommplanError) as error:
        joined(name, source=second)
    assert "26 records, key v2 here, 26 records, key v1 there" in str(error.value)


def test_a_place_is_taken_once(name: str) -> None:
    with joined(name, member=3) as three, joined(name) as first:
        assert (three.member, first.member) == (3, 0)
        with pytest.raises(CommplanError) as error:
            joined(name, member=3)
        assert code(error) == "CP0929" and str(os.getpid()) in str(error.value)
    for member, name_given in ((64, name), (None, "a/b")):
        with pytest.raises(CommplanError) as error:
            joined(name_given, member=member)
        assert code(error) in ("CP0929", "CP0928")


def test_plans_that_share_nothing_or_need_a_device_are_refused(name: str) -> None:
    bare = (
        "plan p\nensemble member = ?\nsource numbers : i64\n{fn}"
        "each step {{ x = load numbers batch 4 visit exactly_once seed 1\n{rest} }}"
    )
    for fn, rest, expected_code in (
        ("", "x = share x over member via duplicate\n output x", "CP0930"),
        ("fn half(i64) -> f32 on device\n", "y = map half(x)\n output y, x", "CP0932"),
    ):
        with pytest.raises(CommplanError) as error:
            joined(name, bare.format(fn=fn, rest=rest), functions={"half": float})
        assert code(error) == expected_code


def test_one_thread_is_told_which_member_to_drive(name: str) -> None:
    with joined(name) as one, joined(name) as two:
        with pytest.raises(CommplanError) as error:
            for _ in one:
                pass
        assert code(error) == "CP0946" and "would wait for member 1" in str(error.value)
        while one.state()["epoch"] == 0:  # nothing is lost: it goes on once the other has
            next(two)
            next(one)
        assert one.state()["epoch"] == 1


def test_the_command_lists_who_is_there(name: str) -> None:
    with joined(name) as one, joined(name, member=4):
        next(one)
        command = [sys.executable, "-m", "commplan", "feeds", "--format", "json"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        (feed,) = [feed for feed in json.loads(done.stdout)["feeds"] if feed["name"] == name]
        assert [member["member"] for member in feed["members"]] == [0, 4]
        assert feed["members"][0]["records"] == 4 and feed["members"][0]["pid"] == os.getpid()
        assert [each.name for each in status.feeds() if each.name == name] == [name]
        assert feed["nbytes"] > 0
        with pytest.raises(CommplanError):  # the locks are held as before
            joined(name, member=4)


def test_a_lock_that_is_taken_twice_is_held_to_the_end(name: str) -> None:
    look = "import os, sys; from commplan.runtime.input.shm.segment import is_locked\n"
    look += "print(is_locked(os.open(sys.argv[1], os.O_RDWR), 0))"
    with joined(name) as one:
        memory = one._memory
        path = f"/proc/{os.getpid()}/fd/{memory.descriptor}"
        with memory.locked():
            with memory.locked():
                pass
            done = subprocess.run(
                [sys.executable, "-c", look, path], capture_output=True, text=True, check=True
            )
        assert done.stdout == "True\n"


def test_the_last_member_may_leave_while_a_unit_is_claimed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with joined(name) as one:
        memory = one._memory
        monkeypatch.setattr(memory, "least", lambda: 0)
        memory.members[0].set("state", 0)
        assert memory.claim() is None


def test_a_member_that_is_closed_waits_no_longer(name: str) -> None:
    with joined(name, count=200) as one, joined(name, count=200) as two:
        said: list[str] = []

        def drive() -> None:
            with pytest.raises(CommplanError) as error:
                list(one)
            said.append(code(error))

        next(two)
        thread = threading.Thread(target=drive)
        thread.start()
        while thread.is_alive() and not one._memory.members[0].get("wanted"):
            thread.join(0.01)
        one.close()
        thread.join(20)
        assert said == ["CP0916"]
        assert len(list(two)) == 49


def test_who_joins_again_waits_for_what_its_threads_still_make(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They close the file at their end, and the kernel lets go of all locks of the process then."""
    begun, go_on = threading.Event(), threading.Event()

    def held(number: Any) -> Any:
        begun.set()
        go_on.wait()
        return decode(number)

    functions = {"decode": held, "noise": noise}
    monkeypatch.setattr(attachment, "_END_S", 0.05)
    monkeypatch.setattr(directory, "MEET_S", 0.05)
    first = joined(name, functions=functions)
    iter(first)
    assert begun.wait(20)
    first.close()
    assert name not in [feed.name for feed in status.feeds()]
    with pytest.raises(CommplanError) as error:
        joined(name, functions=functions)
    assert code(error) == "CP0928" and "this process has left feed" in str(error.value)
    monkeypatch.setattr(directory, "MEET_S", 20.0)
    go_on.set()
    with joined(name, functions=functions) as again:
        assert again.state()["epoch"] == 0 and len(list(again)) == 7


def test_a_member_that_is_forgotten_leaves_while_another_comes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = joined(name)
    enter = Feed._enter

    def entered(feed: Feed, *given: Any) -> None:
        enter(feed, *given)
        first.close()

    monkeypatch.setattr(Feed, "_enter", entered)
    with joined(name) as second:
        assert len(list(second)) == 7


def test_threads_go_on_where_a_process_holds_the_feed_for_long(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks, claims, claim = threading.Semaphore(0), [1], FeedMemory.claim

    def look() -> None:
        looks.release()
        fail("CP0921", "held")

    def claimed(memory: FeedMemory) -> int | None:
        if claims:
            claims.pop()
            fail("CP0921", "process 7 holds it")
        return claim(memory)

    monkeypatch.setattr(maker, "SEATS_S", 0.01)
    monkeypatch.setattr(FeedMemory, "claim", claimed)
    with joined(name) as one:
        one._attachment.idle[99] = look
        assert len(list(one)) == 7
        assert looks.acquire(timeout=20) and looks.acquire(timeout=20)
    assert "process 7 holds it" in caplog.text


def test_a_feed_that_is_forgotten_holds_nobody(name: str) -> None:
    with joined(name) as one:
        forgotten = joined(name)
        next(iter(forgotten))
        del forgotten
        gc.collect()
        assert len(list(one)) == 7


def test_a_record_that_fails_is_told_to_all(name: str) -> None:
    feed_process._STATE["bad"] = 11
    try:
        with joined(name) as one, joined(name) as two:
            for feed in (one, two):
                with pytest.raises(CommplanError) as error:
                    list(feed)
                assert "truncated" in str(error.value) and "record 11" in str(error.value)
    finally:
        feed_process._STATE["bad"] = -1


def test_members_come_die_and_come_back(name: str) -> None:
    """The one that makes units is killed inside its function; the others make its unit anew."""
    first = Member(name, epochs=9, die_at=34, stop_at=0)
    second = Member(name, epochs=5, wait=True, pace=0.01)
    assert first.until("joined") == 0
    first.until("saved")
    second.until("ready")
    second.go_on()
    assert second.until("joined") == 1
    for _ in range(9):
        first.go_on()
    first.finish(-signal.SIGKILL)
    third = Member(name, epochs=1, member=0)
    third.until("joined")
    for member in (second, third):
        member.finish()
    begun = second.batches[0]["epoch"]
    second.check_epochs(range(begun, begun + 5))
    third.check_epochs(range(third.batches[0]["epoch"], third.batches[0]["epoch"] + 1))
    sums: dict[tuple[int, int], Any] = {}
    for batch in (*first.batches, *second.batches, *third.batches):
        shared = {key: batch["sums"][key] for key in ("pixels", "labels")}
        assert sums.setdefault((batch["epoch"], batch["step"]), shared) == shared


def test_the_slow_one_is_named_and_nothing_is_left_of_any(name: str) -> None:
    slow = Member(name, epochs=1, stop_at=1, records=200)
    assert slow.until("joined") == 0
    slow.until("saved")
    fast = Member(name, epochs=1, member=5, state={**saved_of(slow), "step": 2}, records=200, timeout=1.5)
    errors = fast.finish(1)
    assert f"member 5 of feed {name!r} has waited" in errors
    assert f"for member 0 (process {slow.process.pid})" in errors and "records behind" in errors
    assert "CP0947" in errors
    slow.kill()
    assert list(directory.found(name)) == []


def saved_of(member: Member) -> dict[str, int]:
    return next(line["saved"] for line in member.lines if "saved" in line)


def test_a_folder_of_another_user_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever made the folder's name first, nobody is kept from meeting."""
    monkeypatch.setattr(directory, "default_folder", lambda: tmp_path)
    squatted = tmp_path / f"commplan-feeds-{os.getuid()}"
    squatted.mkdir(0o755)
    with directory.meeting():
        (own,) = set(tmp_path.iterdir()) - {squatted}
        assert own.name == f"{squatted.name}.1" and own.stat().st_mode & 0o077 == 0
    assert set(tmp_path.iterdir()) == {squatted}


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
    name: str, mistake: dict[str, Any], expected_code: str
) -> None:
    given = {"sources": {"numbers": records(26)}, "functions": FUNCTIONS, **mistake}
    with pytest.raises(CommplanError) as error:
        commplan.join(name, commplan.loads(text()), **given)
    assert code(error) == expected_code


@pytest.mark.parametrize("error_type", [SystemExit, KeyboardInterrupt])
def test_a_function_that_would_end_the_process_is_told_to_all(
    name: str, error_type: type[BaseException]
) -> None:
    def leaving(number: Any) -> Any:
        if number == 11:
            raise error_type(3)
        return decode(number)

    functions = {**FUNCTIONS, "decode": leaving}
    with joined(name, functions=functions) as one, joined(name, functions=functions) as two:
        for feed in (one, two):
            with pytest.raises(CommplanError) as error:
                list(feed)
            assert code(error) == "CP0920" and f"{error_type.__name__}: 3" in str(error.value)


def test_words_of_the_defaults_are_those_of_the_plan() -> None:
    assert set(DEFAULTS) == {"batch", "visit", "tail", "hints"} and callable(told)
