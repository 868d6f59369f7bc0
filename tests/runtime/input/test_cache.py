"""`{ cache = SIZE }`: results of host functions are kept across epochs, without mixing functions."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import cache_process as program
import numpy as np
import pytest
from batch_feed import no_thread_is_left_behind
from support import interpreter

import commplan
from commplan.diagnostics import CommplanError
from commplan.runtime.input.cache import record_cache, table
from commplan.runtime.input.cache.table import Column, Shape, in_file
from commplan.runtime.input.iterator import PhaseBatches

pytestmark = pytest.mark.usefixtures(no_thread_is_left_behind.__name__)
RECORDS = 40
NUMBERS = np.arange(RECORDS)


@pytest.fixture(autouse=True)
def no_cache_is_left() -> Iterator[None]:
    yield
    record_cache._LAST.clear()  # pyright: ignore[reportPrivateUsage]
    for process in Program.started:
        process.close()
    Program.started.clear()


class Program:
    """A process of `cache_process`."""

    started: ClassVar[list[Program]] = []

    def __init__(self, **orders: Any) -> None:
        words = [*interpreter.words(jax=False), program.__file__ or "", json.dumps(orders)]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.started.append(self)
        self.epochs: list[tuple[dict[str, int], int]] = []
        self.pid: int = self.until("ready")

    def until(self, key: str) -> Any:
        for line in self.process.stdout or ():
            report = json.loads(line)
            if "sums" in report:
                self.epochs.append((report["sums"], report["calls"]))
            if key in report:
                return report[key]
        return None

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.until("ended")
        return self.process.wait(60)

    def close(self) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, signal.SIGKILL)
        self.process.wait()
        for file in (self.process.stdin, self.process.stdout):
            if file is not None:
                file.close()


def opened(functions: dict[str, Any] | None = None, source: Any = NUMBERS, **options: Any) -> PhaseBatches:
    workers = options.pop("workers", "threads")
    functions = functions or program.functions()
    compiled = program.schedule(**options)
    return PhaseBatches(compiled, "step", {"numbers": source}, functions, workers=workers)


def epochs(functions: dict[str, Any], count: int = 2, **options: Any) -> list[tuple[dict[str, int], int]]:
    """Checksums and calls of `decode`, by epoch."""
    states: list[tuple[dict[str, int], int]] = []
    with opened(functions, **options) as batches:
        for _ in range(count):
            before = functions["decode"].calls
            states.append((program.epoch(batches), functions["decode"].calls - before))
    return states


@functools.cache
def uncached(order: str = "") -> list[dict[str, int]]:
    return [sums for sums, _ in epochs(program.functions(), cache="", order=order)]


@pytest.fixture(params=["memory", "file"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[int], str]:
    """The option for so many KiB, in memory or in a file."""
    if request.param == "memory":
        return lambda size: f"cache = {size} KiB"
    return lambda size: f'cache = disk("{tmp_path / "rows"}", {size} KiB)'


def test_the_second_epoch_calls_nothing_and_gives_the_same_bits(cache: Callable[[int], str]) -> None:
    functions = program.functions()
    results = epochs(functions, cache=cache(100))
    assert [calls for _, calls in results] == [RECORDS, 0] and functions["widen"].calls == RECORDS
    assert [sums for sums, _ in results] == uncached()


def test_the_account_tells_what_was_copied() -> None:
    with opened() as batches:
        for _ in range(3):
            program.epoch(batches)
        lines = {line.what: line for line in batches.summary().lines}
        assert (lines["map decode"].records, lines["map decode"].cached) == (RECORDS, 2 * RECORDS)
        assert lines["load numbers"].records == RECORDS and lines["map noise"].cached == 0
        assert lines["map decode"].nbytes == 3 * RECORDS * 516 and "cached" in str(batches.summary())


def test_a_cache_that_is_full_keeps_what_it_has(cache: Callable[[int], str]) -> None:
    results = epochs(program.functions(), 3, cache=cache(20))
    capacity = (20 * 1024 - 4 * 4096) // (8 + 512 + 4)
    assert capacity > 0 and [calls for _, calls in results] == [
        RECORDS,
        RECORDS - capacity,
        RECORDS - capacity,
    ]
    assert [sums for sums, _ in results[:2]] == uncached()


def test_the_next_batches_of_a_process_find_it() -> None:
    assert [calls for _, calls in epochs(program.functions(), 1)] == [RECORDS]
    assert [calls for _, calls in epochs(program.functions(), 1)] == [0]


def test_members_with_orders_of_their_own_share_it() -> None:
    results = epochs(program.functions(), order="per member")
    assert results[0][1] < 2 * RECORDS and results[1][1] == 0
    assert [sums for sums, _ in results] == uncached("per member")


def test_a_changed_function_makes_its_rows_anew(cache: Callable[[int], str]) -> None:
    (old,), (new,) = (epochs(program.functions(factor), 1, cache=cache(100)) for factor in (3, 4))
    assert old[0]["rows.0"] != new[0]["rows.0"] and old[1] == new[1] == RECORDS


def test_so_does_a_changed_source() -> None:
    (old,), (new,) = (epochs(program.functions(), 1, source=NUMBERS + more) for more in (0, 1))
    assert old[0]["rows.0"] != new[0]["rows.0"] and old[1] == new[1] == RECORDS


def test_a_record_that_is_skipped_is_tried_again() -> None:
    functions = program.functions(bad=5)
    results = epochs(functions, hints="{ on_error = skip }")
    assert [calls for _, calls in results] == [RECORDS, 1]


def test_worker_processes_use_it() -> None:
    with opened(workers="processes", hints="{ cores = 1 }") as batches:
        sums = [program.epoch(batches) for _ in range(2)]
        lines = {line.what: line for line in batches.summary().lines}
    assert sums == uncached() and lines["map decode"].records == lines["map decode"].cached == RECORDS


def test_feeds_use_it() -> None:
    functions, plan = program.functions(), commplan.loads(program.text())
    with commplan.join("cached", plan, sources={"numbers": NUMBERS}, functions=functions) as feed:
        labels = [[batch["labels"].tolist() for batch in feed] for _ in range(2)]
    assert functions["decode"].calls == RECORDS and sorted(itertools.chain(*labels[1])) == NUMBERS.tolist()


def test_late_trials_read_from_it() -> None:
    functions, plan = program.functions(), commplan.loads(program.text())
    options: dict[str, Any] = {"sources": {"numbers": NUMBERS}, "functions": functions, "epochs": "own"}
    with commplan.join("trials", plan, **options) as first:
        labels = [batch["labels"].tolist() for batch in first]
        _ = list(first)
        with commplan.join("trials", plan, **options) as late:
            assert [batch["labels"].tolist() for batch in late] == labels
    assert functions["decode"].calls == RECORDS


# --- several processes ---


def test_a_member_of_a_feed_keeps_it_from_the_time_that_it_joins() -> None:
    other = Program(wait=True, cache="cache = 1 MiB")
    other.until("waits")
    functions, plan = program.functions(), commplan.loads(program.text())
    with commplan.join("kept", plan, sources={"numbers": NUMBERS}, functions=functions) as feed:
        assert other.end() == 0  # the member has made no unit
        assert sum(len(batch["labels"]) for batch in feed) == RECORDS
    assert functions["decode"].calls == 0


def test_processes_share_it(cache: Callable[[int], str]) -> None:
    first = Program(cache=cache(100), wait=True)
    first.until("waits")
    second = Program(cache=cache(100))
    second.until("ended")
    assert [calls for _, calls in (*first.epochs, *second.epochs)] == [RECORDS, 0]
    assert first.epochs[0][0] == second.epochs[0][0] == uncached()[0]
    assert first.end() == 0


def test_memory_ends_with_the_last_process(tmp_path: Path) -> None:
    for _ in range(2):
        program = Program(cache="cache = 100 KiB", wait=True)
        program.until("waits")
        program.close()
        assert program.epochs[0][1] == RECORDS


def test_a_file_is_there_in_the_next_run(tmp_path: Path) -> None:
    option = f'cache = disk("{tmp_path / "rows"}", 100 KiB)'
    for calls in (RECORDS, 0):
        program = Program(cache=option)
        program.until("ended")
        assert program.epochs == [(uncached()[0], calls)]


@pytest.mark.parametrize("write", [1, 4, 6])  # in the row of a result, then in a word
def test_a_writer_that_is_killed_leaves_no_wrong_row(cache: Callable[[int], str], write: int) -> None:
    functions = program.functions()
    with opened(functions, cache=cache(100)) as batches:
        killed = Program(cache=cache(100), die=write)
        killed.until("ended")
        assert killed.process.wait(60) == -signal.SIGKILL
        sums = [program.epoch(batches) for _ in range(2)]
    assert sums == uncached() and RECORDS - 3 <= functions["decode"].calls <= RECORDS


def test_programs_that_begin_at_once_divide_the_work(cache: Callable[[int], str]) -> None:
    programs = [Program(cache=cache(100), start=True, pace=0.005) for _ in range(2)]
    for each in programs:
        each.until("opened")
    for each in programs:
        each.go_on()
    for each in programs:
        each.until("ended")
    calls = [calls for each in programs for _, calls in each.epochs]
    assert sum(calls) == RECORDS and all(calls)
    assert [sums for each in programs for sums, _ in each.epochs] == [uncached()[0]] * 2


def test_a_stopped_process_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch, cache: Callable[[int], str]
) -> None:
    monkeypatch.setattr(record_cache, "_PATIENCE_S", 0.1)
    stopped = Program(cache=cache(100), start=True, stop=True, hints="{ cores = 2 }")
    stopped.until("opened")
    functions = program.functions()
    with opened(functions, cache=cache(100)) as batches:
        stopped.go_on()
        stopped.until("stops")
        assert program.epoch(batches) == uncached()[0]
    os.kill(stopped.pid, signal.SIGCONT)
    stopped.until("ended")
    ((sums, calls),) = stopped.epochs
    assert sums == uncached()[0]
    computed_twice = calls + functions["decode"].calls - RECORDS
    assert 0 <= computed_twice <= 2  # a row for each thread of the stopped process


def test_threads_write_and_read_at_once(tmp_path: Path) -> None:
    rows = in_file(str(tmp_path / "rows"), Shape.of("00", [Column(np.dtype("i8"), (512,))], 64, 1 << 20))
    wrong: list[int] = []

    def write() -> None:
        for record in range(64):
            rows.write(record, [np.full(512, record)])

    def read() -> None:
        out, numbers = np.empty((64, 512), np.int64), np.arange(64)
        is_cached = np.zeros(64, bool)
        while not is_cached.all():
            is_cached = rows.has(numbers)
            rows.read(numbers, is_cached, [out])
            wrong.extend(np.flatnonzero(is_cached & (out != numbers[:, None]).any(1)).tolist())

    threads = [threading.Thread(target=target) for target in (read, write, write, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong


# --- files that are not as they were left ---


def in_the_file(tmp_path: Path, functions: dict[str, Any] | None = None) -> list[tuple[dict[str, int], int]]:
    return epochs(functions or program.functions(), 1, cache=f'cache = disk("{tmp_path / "rows"}", 100 KiB)')


@pytest.mark.parametrize(
    ("at", "lost"),
    [(2 * 4096 + 700, 1), (4096 + 8 * 5 + 4, 1), (100, RECORDS), (4096 + 8 * 5, 0)],
    ids=["row", "checksum", "header", "generation"],
)
def test_a_damaged_file_gives_no_wrong_rows(tmp_path: Path, at: int, lost: int) -> None:
    in_the_file(tmp_path)
    with (tmp_path / "rows").open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 0x55]))
    assert in_the_file(tmp_path) == [(uncached()[0], lost)]


def test_a_file_that_was_cut_is_filled_again(tmp_path: Path) -> None:
    in_the_file(tmp_path)
    os.truncate(tmp_path / "rows", 2 * 4096 + 10 * 512)
    ((sums, calls),) = in_the_file(tmp_path)
    assert sums == uncached()[0] and calls >= RECORDS - 1  # the labels were at the end; one may be zero


def refused(tmp_path: Path, match: str) -> None:
    with pytest.raises(CommplanError, match=match) as error:
        in_the_file(tmp_path)
    assert error.value.diagnostics[0].code == "CP0958"


def test_files_of_something_else_are_left_alone(tmp_path: Path) -> None:
    rows = tmp_path / "rows"
    rows.write_text("a thesis")
    refused(tmp_path, "is not a cache file")
    assert rows.read_text() == "a thesis"
    rows.rename(tmp_path / "thesis")
    rows.symlink_to(tmp_path / "thesis")
    refused(tmp_path, "symbolic link")
    rows.unlink()
    os.mkfifo(rows)
    refused(tmp_path, "not a regular file")
    rows.unlink()
    rows.mkdir()
    refused(tmp_path, "cannot be opened")


def test_a_file_in_use_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    option = f'cache = disk("{tmp_path / "rows"}", 100 KiB)'
    with opened(cache=option) as batches:
        with pytest.raises(CommplanError, match="in use with other functions or sources") as error:
            epochs(program.functions(4), 1, cache=option)
        assert error.value.diagnostics[0].code == "CP0958"
        record_cache._TABLES.clear()  # pyright: ignore[reportPrivateUsage]
        monkeypatch.setattr(table, "_boot", lambda: "another host")
        with pytest.raises(CommplanError, match="in use on another host"):
            epochs(program.functions(), 1, cache=option)
        assert program.epoch(batches) == uncached()[0]


def test_a_full_disk_keeps_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = table._write  # pyright: ignore[reportPrivateUsage]

    def full(descriptor: int, data: Any, offset: int) -> None:
        if offset > 2 * 4096 + 9 * 512 and len(data) == 512:
            raise OSError(28, "No space left on device")
        write(descriptor, data, offset)

    monkeypatch.setattr(table, "_write", full)
    functions = program.functions()
    results = epochs(functions, cache=f'cache = disk("{tmp_path / "rows"}", 100 KiB)')
    assert [sums for sums, _ in results] == uncached() and 0 < results[1][1] <= RECORDS


# --- functions and sources that cannot be identified ---


class Locked(list[int]):
    def __init__(self) -> None:
        super().__init__(range(RECORDS))
        self.lock = threading.Lock()


def test_what_has_no_digest_needs_a_key(tmp_path: Path) -> None:
    lock = threading.Lock()
    functions = program.functions()

    def decode(row: Any) -> Any:
        with lock:
            return row, np.int32(0)

    with pytest.raises(CommplanError, match="`lock` of it is a lock") as error:
        epochs({**functions, "decode": decode}, 1)
    assert error.value.diagnostics[0].code == "CP0957"
    source = Locked()
    with pytest.raises(CommplanError, match="cannot detect changes of source `numbers`"):
        epochs(functions, 1, source=source)
    source.key = "numbers to forty"  # pyright: ignore[reportAttributeAccessIssue]
    assert epochs(functions, 1, source=source) == [(uncached()[0], RECORDS)]


def test_a_file_needs_to_know_its_source(tmp_path: Path) -> None:
    class Odd:
        def __len__(self) -> int:
            return RECORDS

        def __getitem__(self, index: int) -> int:
            return index

    assert epochs(program.functions(), 1, source=Odd())[0][1] == RECORDS
    with pytest.raises(CommplanError, match="may change between runs, and it has no `key`"):
        epochs(program.functions(), 1, source=Odd(), cache=f'cache = disk("{tmp_path / "rows"}", 1 MiB)')
