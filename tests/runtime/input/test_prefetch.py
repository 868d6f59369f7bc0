"""Work ahead: bounds, order, threads that end, accounts."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
from batch_feed import batches, by_name, code, no_thread_is_left_behind, ours
from input_plans import SIDE, Counting, decode, ensemble, images

from commplan.diagnostics import CommplanError
from commplan.input.order import Order
from commplan.runtime.input.ring.units import Units
from commplan.runtime.input.shm import slots

pytestmark = pytest.mark.usefixtures(no_thread_is_left_behind.__name__)


def test_the_ring_is_bounded() -> None:
    source = Counting(images(80))
    made = ensemble("", 1, hints="{ prefetch = 3, cores = 2 }")
    with batches(made, source) as feed:
        assert ours() == [], "nothing starts before the first batch is asked for"
        next(feed)
        _settle(source, 32)
        assert len(ours()) == 3  # one of them tends the others
        next(feed)
        _settle(source, 40)


def _settle(source: Counting, expected: int) -> None:
    """Wait for the work ahead to reach its bound; then see that it goes no further."""
    until = time.monotonic() + 20
    while len(source.read) < expected and time.monotonic() < until:
        time.sleep(0.005)
    time.sleep(0.05)
    assert len(source.read) == expected


def test_order_is_kept_when_records_take_different_times() -> None:
    def slow_first(record: bytes) -> tuple[np.ndarray[Any, Any], int]:
        time.sleep(0.002 * (record[0] % 5))
        return decode(record)

    made = ensemble("", 1, hints="{ prefetch = 4, cores = 8 }")
    order = Order(64, 8, 17)
    with batches(made, images(64), functions={"decode": slow_first}) as feed:
        for step, batch in enumerate(feed):
            assert by_name(made, batch)["labels"].tolist() == order.records(0, step).tolist()


def test_a_thread_that_fails_outside_of_functions_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Units, "note", fails)
    with (
        batches(ensemble("", 1), images(80)) as feed,
        pytest.raises(RuntimeError, match=r"a thread of commplan-\S+ has failed"),
    ):
        next(feed)


def test_close_ends_the_threads_in_the_middle_of_work() -> None:
    feed = batches(ensemble("", 1), Counting(images(80), delay=0.01))
    next(feed)
    assert ours()
    feed.close()
    feed.close()
    assert ours() == []
    with pytest.raises(CommplanError) as error:
        next(feed)
    assert code(error) == "CP0916"


def test_a_forgotten_iterator_is_collected_with_its_threads() -> None:
    feed = batches(ensemble("", 1), images(80))
    next(feed)
    gone = weakref.ref(feed)
    del feed
    gc.collect()
    assert gone() is None
    assert _all_end()


def _all_end() -> bool:
    """Threads of a collected iterator end after their current record."""
    until = time.monotonic() + 20
    while ours() and time.monotonic() < until:
        time.sleep(0.005)
    return ours() == []


def test_collection_in_the_middle_of_anything_waits_for_nothing() -> None:
    """A finaliser that joined would deadlock here: the thread needs a lock of the collecting code."""
    held = threading.Lock()
    entered = threading.Event()

    def needs(record: bytes) -> tuple[np.ndarray[Any, Any], int]:
        entered.set()
        with held:
            return decode(record)

    feed = batches(ensemble("", 1), images(80), functions={"decode": needs})
    with held:
        feed._arm(0)  # pyright: ignore[reportPrivateUsage]  the work starts, and nobody waits for it
        assert entered.wait(20)
        del feed
        gc.collect()
    assert _all_end()


def test_closing_from_another_thread_ends_the_wait() -> None:
    """The records are stuck until the wait has ended: only that can end it."""
    entered, release = threading.Event(), threading.Event()
    released: list[bool] = []

    def stuck(record: bytes) -> tuple[np.ndarray[Any, Any], int]:
        entered.set()
        released.append(release.wait(60))
        return decode(record)

    feed = batches(ensemble("", 1), images(8), functions={"decode": stuck})

    def close() -> None:
        entered.wait(60)
        feed.close()

    closer = threading.Thread(target=close)
    closer.start()
    with pytest.raises(CommplanError) as error:
        next(feed)
    release.set()
    closer.join()
    assert code(error) == "CP0916"
    assert released and all(released)


def test_the_summary_accounts_for_every_line() -> None:
    made = ensemble("duplicate", 3)
    source = images(16)
    with batches(made, source) as feed:
        for _ in feed:
            pass
        summary = feed.summary()
    lines = {line.what: line for line in summary.lines}
    assert list(lines) == ["load images", "map decode", "share pixels via duplicate", "map flip"]
    assert [lines[what].records for what in ("load images", "map decode", "map flip")] == [48, 48, 48]
    assert lines["load images"].nbytes == 3 * sum(map(len, source))
    assert lines["map decode"].nbytes == 48 * (SIDE * SIDE + 4)
    assert [line.span.line for line in summary.lines] == [14, 15, 16, 17]
    assert summary.batches == 2
    assert 0 < summary.cpu_s == sum(line.cpu_s for line in summary.lines)


@pytest.mark.parametrize(("name", "is_small"), [("pixels", False), ("labels", True)])
def test_a_small_array_does_not_keep_its_slot(
    name: str, is_small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    recalled: list[int] = []
    exchange = slots.Slots._exchange

    def counted(self: slots.Slots, place: int, owner: slots.Root) -> None:
        recalled.append(place)
        exchange(self, place, owner)

    monkeypatch.setattr(slots.Slots, "_exchange", counted)
    program = ensemble("", 1)
    with batches(program, images(160)) as feed:
        arrays = [by_name(program, batch)[name] for batch in feed]
        assert len(arrays) == 20 and not any(array.flags.writeable for array in arrays)
        assert len(recalled) == 0 if is_small else len(recalled) > 10


def test_closed_batches_keep_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    owners: list[weakref.ref[Any]] = []
    owner_of = slots.owner_of

    def watched(*arguments: Any) -> Any:
        owner = owner_of(*arguments)
        owners.append(weakref.ref(owner))
        return owner

    monkeypatch.setattr(slots, "owner_of", watched)
    feed = batches(ensemble("", 1), images(32))
    next(feed)
    feed.close()
    assert owners and all(owner() is None for owner in owners)
