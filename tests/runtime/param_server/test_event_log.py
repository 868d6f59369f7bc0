"""A recording replays bitwise, whatever the order of messages; any other difference is reported."""

from __future__ import annotations

import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.server_jobs import Job, compiled

from commplan.diagnostics import CommplanError
from commplan.runtime.param_server.event_log import LOST, Recorder, Replay, log_header, read_events

TEXT = """plan p
axis worker = 3
server master = 1
input params : f32[1000] per worker
state center : f32[1000] on master
at start {
    center = broadcast params over worker from 0
}
each step {
    pull, center = elastic params with center over worker by MODE(eta = 0.5, rho = 0.5) { chunk = 1 KiB }
    output pull
}
"""


def values(*seed: int) -> np.ndarray:
    return np.float32(np.random.default_rng(seed).standard_normal(1000))


def averaging(server_job: Job, worker: int, steps: int) -> Any:
    yield server_job.site("put", "start"), {"center": values(0)}
    w = values(1, worker)
    for step in range(steps):
        (pull,) = yield server_job.site("elastic", "step"), {"params": w}
        w = w - pull + np.float32(0.1) * values(2, worker, step)


def recording(server_job: Job, path: Path, seed: int, dies: int | None = None) -> None:
    recorder = Recorder(path, log_header(server_job.sites, 0))

    def hear(server: int, worker: int, tag: int, buffer: Any) -> None:
        recorder.add(worker, tag)
        server_job.drivers[server].arrive(worker, tag, buffer)

    server_job.hear = hear
    programs = {worker: averaging(server_job, worker, 5) for worker in range(3)}
    if dies is not None:
        server_job.run(programs, seed, most=60)
        recorder.add(dies, LOST)
        server_job.kill(dies)
        del programs[dies]
        recorder.close()
        return
    server_job.run(programs, seed)
    recorder.close()


def replaying(server_job: Job, path: Path, seed: int, steps: int = 5) -> list[int]:
    """The same job again in another order; the workers that were lost then."""
    lost: list[int] = []

    def lose(worker: int) -> None:
        lost.append(worker)
        server_job.drivers[0].lost(worker)

    replay = Replay(read_events(path, log_header(server_job.sites, 0)), server_job.drivers[0].arrive, lose)
    server_job.hear = lambda server, worker, tag, buffer: replay.arrive(worker, tag, buffer)
    server_job.run({worker: averaging(server_job, worker, steps) for worker in range(3)}, seed)
    return lost


@pytest.mark.parametrize("mode", ["async", "hogwild", "round_robin"])
def test_a_replay_ends_with_the_recorded_weights(tmp_path: Path, mode: str):
    program = compiled(tmp_path, TEXT.replace("MODE", mode), {})
    ends: set[bytes] = set()
    for seed in range(4):
        first = Job(program, {})
        recording(first, tmp_path / "x.order", seed)
        expected = first.held("center")[0][0].tobytes()
        ends.add(expected)
        for other in range(3):
            again = Job(program, {})
            assert replaying(again, tmp_path / "x.order", 100 + other) == []
            assert again.held("center")[0][0].tobytes() == expected
            assert again.drivers[0].all_departed
    assert (len(ends) == 1) == (mode == "round_robin")  # else orders differ, and weights with them


def test_a_run_that_goes_on_after_the_recording_is_told(tmp_path: Path):
    program = compiled(tmp_path, TEXT.replace("MODE", "async"), {})
    recording(Job(program, {}), tmp_path / "x.order", 0)
    with pytest.raises(CommplanError, match="CP0977"):
        replaying(Job(program, {}), tmp_path / "x.order", 0, steps=6)


def test_a_recording_that_was_cut_short_is_followed_to_its_last_whole_block(tmp_path: Path):
    program = compiled(tmp_path, TEXT.replace("MODE", "async"), {})
    server_job = Job(program, {})
    recorder = Recorder(tmp_path / "x.order", log_header(server_job.sites, 0))
    events = [(0, 16), (1, 17), (2, 1), (0, LOST)]
    for event in events[:2]:
        recorder.add(*event)
    recorder.flush()
    for event in events[2:]:
        recorder.add(*event)
    recorder.close()
    assert list(read_events(tmp_path / "x.order", log_header(server_job.sites, 0))) == events
    data = (tmp_path / "x.order").read_bytes()
    (tmp_path / "x.order").write_bytes(data[:-1])
    assert list(read_events(tmp_path / "x.order", log_header(server_job.sites, 0))) == events[:2]
    for at, bit in ((-1, 1), (data.index(b"\n", data.index(b"{")) + 1, 2)):  # an event; how many there are
        damaged = bytearray(data)
        damaged[at] ^= bit
        (tmp_path / "x.order").write_bytes(damaged)
        with pytest.raises(CommplanError, match=r"CP0976.*is damaged at byte"):
            list(read_events(tmp_path / "x.order", log_header(server_job.sites, 0)))


@pytest.mark.parametrize(("count", "size"), [(3, 2**24), (2**32 - 1, 2**24), (2**21, 2**24), (0, 0)])
def test_a_recording_unpacks_to_no_more_than_it_says(tmp_path: Path, count: int, size: int):
    server_job, path = Job(compiled(tmp_path, TEXT.replace("MODE", "async"), {}), {}), tmp_path / "x.order"
    Recorder(path, log_header(server_job.sites, 0)).close()
    packed = zlib.compress(bytes(size))
    with path.open("ab") as file:
        file.write(struct.pack("<III", count, len(packed), zlib.crc32(packed)) + packed)
    events = read_events(path, log_header(server_job.sites, 0))
    tracemalloc.start()
    with pytest.raises(CommplanError, match=r"CP0976.*is damaged at byte"):
        next(events)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_a_recorded_death_happens_again_at_its_place(tmp_path: Path):
    program = compiled(tmp_path, TEXT.replace("MODE", "async"), {})
    first = Job(program, {})
    recording(first, tmp_path / "x.order", 3, dies=1)
    expected = first.held("center")[0][0].tobytes()
    again = Job(program, {})
    lost: list[int] = []

    def lose(worker: int) -> None:
        lost.append(worker)
        again.kill(worker)

    events = read_events(tmp_path / "x.order", log_header(again.sites, 0))
    replay = Replay(events, again.drivers[0].arrive, lose)
    again.hear = lambda server, worker, tag, buffer: replay.arrive(worker, tag, buffer)
    with pytest.raises(CommplanError, match="CP0977"):  # the recording ends with the death, this run does not
        again.run({worker: averaging(again, worker, 5) for worker in range(3)}, 9)
    assert lost == [1]
    assert again.held("center")[0][0].tobytes() == expected


def test_recordings_of_something_else_are_refused(tmp_path: Path):
    program = compiled(tmp_path, TEXT.replace("MODE", "async"), {})
    server_job = Job(program, {})
    recording(server_job, tmp_path / "x.order", 0)
    other = Job(compiled(tmp_path, TEXT.replace("MODE", "async").replace("1000", "1001"), {}), {})
    (tmp_path / "text").write_text("hello")
    for path, sites in ((tmp_path / "x.order", other.sites), (tmp_path / "text", server_job.sites),
                        (tmp_path / "missing", server_job.sites)):  # fmt: skip
        with pytest.raises(CommplanError, match="CP0976"):
            list(read_events(path, log_header(sites, 0)))
    with pytest.raises(CommplanError, match="CP0976"):
        Recorder(tmp_path / "no" / "folder", log_header(server_job.sites, 0))
