"""Host functions in worker processes: the same batches, the same errors, and nothing that outlives its
owner."""

from __future__ import annotations

import functools
import gc
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import worker_plans as fns
from batch_feed import batches, by_name, code, no_thread_is_left_behind
from input_plans import decode, ensemble, images, schedule

import commplan
from commplan.diagnostics import CommplanError
from commplan.ir.schedule import Schedule
from commplan.runtime.input.host_batch import HostBatch
from commplan.runtime.input.iterator import PhaseBatches
from commplan.runtime.input.shm import arena
from commplan.runtime.input.stages import worker_pool as workers

HERE = Path(__file__).parent
pytestmark = pytest.mark.usefixtures(no_thread_is_left_behind.__name__)


def children() -> set[int]:
    """The living processes that this one started."""
    pids_of: set[int] = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            pids_of.add(int(stat.parent.name))
    return pids_of


@pytest.fixture(autouse=True)
def no_process_is_left_behind(small_heap: None) -> Iterator[None]:
    before = children()
    yield
    gc.collect()
    assert children() <= before


def made(feed: Any) -> list[HostBatch]:
    with feed:
        return list(feed)


def alike(first: HostBatch, second: HostBatch) -> bool:
    return (
        (first.epoch, first.step) == (second.epoch, second.step)
        and first.values.keys() == second.values.keys()
        and all(np.array_equal(first.values[ref], second.values[ref]) for ref in first.values)
        and all(np.array_equal(first.records[ref], second.records[ref]) for ref in first.records)
    )


@pytest.mark.parametrize("design", ["", "duplicate"])
@pytest.mark.parametrize("cores", [1, 3])
def test_batches_are_those_of_threads(design: str, cores: int) -> None:
    plan = ensemble(design, 2, hints=f"{{ cores = {cores} }}")
    threads = made(batches(plan, images(43)))
    with batches(plan, images(43), workers="processes") as feed:
        processes = list(feed)
        again = list(feed)
        summary = feed.summary()
    assert len(processes) == 6
    assert all(alike(first, second) for first, second in zip(threads, processes, strict=True))
    assert not np.array_equal(again[0].values["batch.0"], processes[0].values["batch.0"])
    assert summary.workers == ("1 process" if cores == 1 else "3 processes")
    lines = {line.what: line for line in summary.lines}
    assert lines["load images"].records == 2 * 48 * (2 if design else 1)
    assert lines["map decode"].cpu_s > 0


def test_one_core_is_one_process() -> None:
    def pids(hints: str) -> set[int]:
        functions = {"decode": fns.process}
        results = made(
            batches(ensemble("", 1, hints=hints), images(64), functions=functions, workers="processes")
        )
        return {int(n) for batch in results for n in batch.values["labels.0"]}

    single, several = pids("{ cores = 1 }"), pids("{ cores = 2 }")
    assert len(single) == 1 and len(several) == 2
    assert os.getpid() not in single | several


def test_batches_outlive_their_workers_and_are_never_overwritten() -> None:
    plan = ensemble("", 2, hints="{ cores = 2, prefetch = 1 }")
    expected = made(batches(plan, images(80)))
    feed = batches(plan, images(80), workers="processes")
    received = list(feed)
    feed.close()
    del feed
    assert all(alike(first, second) for first, second in zip(expected, received, strict=True))
    assert all(a.ctypes.data % 64 == 0 for batch in received for a in batch.values.values())


def test_memory_is_used_again() -> None:
    room = arena.Arena()
    first = room.fresh((3, 5), np.dtype(np.int32))
    view, at = first[1:], first.ctypes.data
    size = room.nbytes
    del first
    second = room.fresh((3, 5), np.dtype(np.int32))
    assert second.ctypes.data != at, "a view still shows it"
    grown = room.nbytes
    del view
    third = room.fresh((4, 4), np.dtype(np.int32))
    assert third.ctypes.data == at and room.nbytes == grown > size
    offset = room.find(third[2:, 1:])
    assert offset is not None and offset == (room.find(third) or 0) + 36
    assert room.find(np.zeros(3)) is None
    assert room.fresh((0, 3), np.dtype(np.float32)).shape == (0, 3)
    room.close()
    third[:] = 7
    assert int(third.sum()) == 7 * 16, "arrays outlive the arena"


def failure(workers: str, source: object = None, **functions: Any) -> CommplanError:
    plan = ensemble("", 1, hints="{ cores = 1 }")
    with (
        pytest.raises(CommplanError) as error,
        batches(plan, images(16) if source is None else source, functions=functions, workers=workers) as feed,
    ):
        list(feed)
    return error.value


@pytest.mark.parametrize(
    ("source", "functions"),
    [
        (None, {"decode": functools.partial(fns.failing, bad=(11,))}),
        (None, {"decode": functools.partial(fns.number, value=2**40)}),
        ([b"x", "y"] * 8, {}),
    ],
)
def test_errors_are_those_of_threads(source: object, functions: Any) -> None:
    in_worker, in_thread = (failure(kind, source, **functions) for kind in ("processes", "threads"))
    assert in_worker.diagnostics == in_thread.diagnostics
    assert type(in_worker.__cause__) is type(in_thread.__cause__)
    if in_worker.__cause__ is not None:
        assert "in a worker process" in in_worker.__cause__.__notes__[0]


def test_exceptions_that_cannot_travel_are_told() -> None:
    error = failure("processes", decode=fns.raising_oddly)
    assert error.diagnostics[0].code == "CP0906" and "raised OddError: odd" in str(error)
    assert "raising_oddly" in str(error.__cause__)


def test_skipped_records_are_those_of_threads() -> None:
    plan = ensemble("", 2, hints="{ on_error = skip, cores = 2 }")
    broken = {"decode": functools.partial(fns.failing, bad=(3, 4, 9))}
    expected = made(batches(plan, images(24), functions=broken))
    with batches(plan, images(24), functions=broken, workers="processes") as feed:
        received = list(feed)
        assert {line.what: line.skipped for line in feed.summary().lines}["map decode"] == 3
    assert all(alike(first, second) for first, second in zip(expected, received, strict=True))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("kill", "was ended by SIGKILL"),
        ("segfault", "was ended by SIGSEGV"),
        ("exit", "ended with exit code 3"),
        ("os._exit", "ended with exit code 4"),
    ],
)
def test_a_worker_that_ends_is_named_with_its_record(how: str, message: str) -> None:
    error = failure("processes", decode=functools.partial(fns.ending, bad=7, how=how))
    diagnostic = error.diagnostics[0]
    assert diagnostic.code == "CP0953"
    assert f"{message} while host function `decode` worked on record 7" in diagnostic.message
    assert diagnostic.span is not None and diagnostic.span.line == 15
    assert "rows 0-7: records " in diagnostic.notes[0].text


@pytest.mark.parametrize("hints", ["on_failure = continue, ", ""])
def test_a_worker_that_is_ended_while_it_starts_is_replaced(tmp_path: Path, hints: str) -> None:
    (tmp_path / "once").touch()
    plan = ensemble("", 1, hints=f"{{ {hints}cores = 1 }}")
    functions = {"decode": fns.Unready(str(tmp_path))}
    with batches(plan, images(16), functions=functions, workers="processes") as feed:
        if hints:
            assert len(list(feed)) == 2 and feed.summary().restarts == 1
            return
        with pytest.raises(CommplanError, match=r"CP0954.*SIGKILL before it was ready"):
            next(feed)


def test_a_worker_that_ends_is_replaced(tmp_path: Path) -> None:
    plan = ensemble("", 2, hints="{ on_failure = continue, cores = 2 }")
    once = functools.partial(fns.ending, bad=7, how="kill", once=str(tmp_path / "once"))
    expected = made(batches(plan, images(24)))
    with batches(plan, images(24), functions={"decode": once}, workers="processes") as feed:
        received = list(feed)
        summary = feed.summary()
    assert all(alike(first, second) for first, second in zip(expected, received, strict=True))
    assert summary.restarts == 1
    assert {line.what: line.records for line in summary.lines}["map decode"] == 24, "counted once"


def test_a_record_that_ends_every_worker_is_given_up() -> None:
    plan = ensemble("", 1, hints="{ on_failure = continue, cores = 1 }")
    always = functools.partial(fns.ending, bad=7, how="kill")
    with (
        pytest.raises(CommplanError) as error,
        batches(plan, images(16), functions={"decode": always}, workers="processes") as feed,
    ):
        list(feed)
    assert code(error) == "CP0953" and "3 processes in a row ended on this block" in str(error.value)


def test_what_cannot_travel_is_named() -> None:
    class Locked(list[bytes]):
        def __init__(self, records: list[bytes]) -> None:
            super().__init__(records)
            self.lock = threading.Lock()

    with pytest.raises(CommplanError) as error:
        batches(
            ensemble("", 1),
            Locked(images(8)),
            functions={"decode": lambda r: decode(r + b"")},
            workers="processes",
        )
    assert [d.code for d in error.value.diagnostics] == ["CP0952", "CP0952"]
    assert "source `images` cannot be sent to worker processes" in error.value.diagnostics[0].message
    assert "host function `decode` cannot be sent to worker processes" in error.value.diagnostics[1].message
    assert [d.span and d.span.line for d in error.value.diagnostics] == [14, 15]


def test_workers_are_threads_or_processes() -> None:
    with pytest.raises(CommplanError) as error:
        batches(ensemble("", 1), images(8), workers="fibres")
    assert code(error) == "CP0955"


@pytest.mark.parametrize(
    ("name", "expected"),
    [("OMP_NUM_THREADS", 1), ("MALLOC_TRIM_THRESHOLD_", 1 << 29), ("OMPI_COMM_WORLD_RANK", -1), ("MINE", 5)],
)
def test_a_worker_is_one_core_s_worth(monkeypatch: pytest.MonkeyPatch, name: str, expected: int) -> None:
    for variable, value in {"OMP_NUM_THREADS": "8", "OMPI_COMM_WORLD_RANK": "3", "MINE": "5"}.items():
        monkeypatch.setenv(variable, value)
    functions = {"decode": functools.partial(fns.variable, name=name)}
    results = made(
        batches(ensemble("", 1, hints="{ cores = 1 }"), images(8), functions=functions, workers="processes")
    )
    assert results[0].values["labels.0"].tolist() == [expected] * 8
    assert workers.environment()["JAX_PLATFORMS"] == "cpu"


COLUMNS = """
raw    = load images batch 8 visit exactly_once seed 3 { cores = 2 }
given  = load labels batch 8 visit exactly_once seed 3
pixels, first = map decode(raw)
output pixels, first, given"""


def test_columns_are_fetched_once_in_workers_too(tmp_path: Path) -> None:
    declarations = "source images : bytes\nsource labels : i32\nfn decode (bytes) -> u8[6, 6], i32 on host"
    plan: Schedule = schedule(COLUMNS, declarations=declarations)
    pairs = fns.PairsOnDisk(images(40), str(tmp_path))
    sources = {"images": commplan.column(pairs, 0), "labels": commplan.column(pairs, 1)}
    with PhaseBatches(plan, "step", sources, {"decode": decode}, workers="processes") as feed:
        received = [by_name(plan, batch) for batch in feed]
    assert [b["given"].tolist() for b in received] == [b["first"].tolist() for b in received]
    assert fns.read(tmp_path) == list(range(40))


def test_large_arrays_travel_as_shared_memory() -> None:
    plan = schedule(
        "raw = load images batch 8 visit exactly_once seed 1 { cores = 1 }\noutput raw",
        declarations="source images : u8[1000]",
    )
    source = np.arange(40_000, dtype=np.uint32).astype(np.uint8).reshape(40, 1000)
    expected = made(batches(plan, source))
    received = made(batches(plan, source, workers="processes"))
    assert all(alike(first, second) for first, second in zip(expected, received, strict=True))
    data, *buffers = workers.packed(batches(plan, source)._program, {"images": source}, {})
    assert len(data) < 10_000 and [len(memoryview(b).cast("B")) for b in buffers] == [40_000]


def test_processes_of_a_group_have_workers_of_their_own(tmp_path: Path) -> None:
    def together(kind: str) -> list[str]:
        run = f"workers-{uuid.uuid4().hex[:8]}"
        folder = tmp_path / kind
        started = [
            subprocess.Popen(
                [sys.executable, HERE / "worker_process.py", str(index), "2", run, kind, folder],
                stdout=subprocess.PIPE,
                text=True,
            )
            for index in range(2)
        ]
        outputs = [process.communicate(timeout=120)[0] for process in started]
        assert [process.returncode for process in started] == [0, 0]
        assert fns.read(folder) == list(range(40)), "each record was read once between the processes"
        return outputs

    assert together("processes") == together("threads")
