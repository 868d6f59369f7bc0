"""A server's checkpoint survives it, up to the last acknowledged push."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from support.server_jobs import Job, compiled

from commplan.diagnostics import CommplanError
from commplan.runtime.param_server.checkpoint import ServerCheckpoint, check_prompt

TEXT = """plan p
axis worker = 2
server hub = 2
input params : tree per worker
input grads : tree partial worker
state weights : tree on hub
state moment : tree on hub
fn zeros(tree) -> tree on device elementwise
fn step(tree, tree, tree) -> tree, tree on device elementwise
at start {
    weights = broadcast params over worker from 0
    moment = map zeros(weights)
}
each step {
    weights, moment = exchange grads into weights, moment with step over worker by sum { chunk = 1 KiB }
    output weights
}
"""
SHAPE = {"a": np.zeros((31, 40), np.float32), "b": np.zeros(3, np.float16)}


def step(w: Any, m: Any, g: Any) -> Any:
    m = {"count": m["count"] + 1, "mu": jax.tree.map(lambda m, g: m * 0.5 + g, m["mu"], g)}
    return jax.tree.map(lambda w, m: w - m * 0.25, w, m["mu"]), m


def values(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {name: rng.integers(-9, 9, x.shape).astype(x.dtype) for name, x in SHAPE.items()}


def job(folder: Path, text: str = TEXT) -> Job:
    start = {"count": np.int32(0), "mu": SHAPE}
    shapes = {"params": SHAPE, "grads": SHAPE, "weights": SHAPE, "moment": start}
    return Job(compiled(folder, text, shapes), {"step": step, "zeros": lambda tree: tree})


def keeping(server_job: Job, folder: Path) -> list[ServerCheckpoint]:
    """Every server checkpoints its states in `folder`, and resumes from the contents."""
    checkpoints: list[ServerCheckpoint] = []
    for server, driver in enumerate(server_job.drivers):
        keep = ServerCheckpoint(folder, driver.store, server)
        if keep.existed and keep.load([("weights", "moment")]):
            driver.restore()
        driver.checkpoint = keep
        checkpoints.append(keep)
    return checkpoints


def starting(server_job: Job) -> Any:
    moment = {"count": np.int32(0), "mu": values(1)}
    yield server_job.site("put", "start", "weights"), {"weights": values(0), "params": values(0)}
    yield server_job.site("put", "start", "moment"), {"moment": moment}


def stepping(server_job: Job, worker: int, first: int, count: int, done: list[int]) -> Any:
    for number in range(first, first + count):
        yield server_job.site("exchange", "step"), {"grads": values(100 + 10 * worker + number)}
        done.append(number)


def reference(steps: int) -> tuple[np.ndarray, np.ndarray]:
    w, m = values(0), {"count": 0, "mu": values(1)}
    for number in range(steps):
        g = {n: values(100 + number)[n] + values(110 + number)[n] for n in SHAPE}
        w, m = step(w, m, g)
    return np.asarray(w["a"]).reshape(-1), np.asarray(m["mu"]["a"]).reshape(-1)


def test_a_later_run_goes_on_where_an_earlier_one_was_killed(tmp_path: Path):
    first = job(tmp_path)
    keeps = keeping(first, tmp_path / "kept")
    done: list[list[int]] = [[], []]
    first.run({w: starting(first) for w in range(2)}, leave=False)
    first.run({w: stepping(first, w, 0, 3, done[w]) for w in range(2)}, leave=False)
    for keep in keeps:
        keep.close()
    second = job(tmp_path)
    keeping(second, tmp_path / "kept")
    assert all(driver.restored for driver in second.drivers)
    second.run({w: stepping(second, w, 3, 2, done[w]) for w in range(2)}, 1)
    w, m = reference(5)
    np.testing.assert_array_equal(second.held("weights")[0][0], w)
    np.testing.assert_array_equal(second.held("moment")[0][0], m)
    assert int(second.held("moment")[-1][0]) == 5


@pytest.mark.parametrize("steps", (0, 2))
def test_a_state_without_leaves_is_kept_with_the_weights(tmp_path: Path, steps: int):
    def plain(w: Any, m: Any, g: Any) -> Any:
        return jax.tree.map(lambda w, g: w - g, w, g), m

    def made() -> Job:
        shapes = {"params": SHAPE, "grads": SHAPE, "weights": SHAPE, "moment": {}}
        return Job(compiled(tmp_path, TEXT, shapes), {"step": plain, "zeros": lambda _: {}})

    def setting(server_job: Job) -> Any:
        yield server_job.site("put", "start", "weights"), {"weights": values(0), "params": values(0)}
        yield server_job.site("put", "start", "moment"), {"moment": {}}

    first = made()
    keeps = keeping(first, tmp_path / "kept")
    first.run({w: setting(first) for w in range(2)}, leave=False)
    first.run({w: stepping(first, w, 0, steps, []) for w in range(2)}, leave=False)
    for keep in keeps:
        keep.close()
    second = made()
    keeping(second, tmp_path / "kept")
    assert all(driver.restored for driver in second.drivers)
    second.run({w: stepping(second, w, steps, 1, []) for w in range(2)}, 1)
    grads = [values(100 + 10 * w + number)["a"] for w in range(2) for number in range(steps + 1)]
    expected = values(0)["a"] - sum(grads, np.zeros_like(SHAPE["a"]))
    np.testing.assert_array_equal(second.held("weights")[0][0], expected.reshape(-1))


@pytest.mark.parametrize("most", (40, 70, 110))
def test_what_was_answered_is_kept_whenever_a_server_is_killed(tmp_path: Path, most: int):
    first = job(tmp_path)
    keeping(first, tmp_path / "kept")
    first.run({w: starting(first) for w in range(2)}, leave=False)
    done: list[list[int]] = [[], []]
    first.run({w: stepping(first, w, 0, 3, done[w]) for w in range(2)}, most, leave=False, most=most)
    for driver in first.drivers:
        driver.checkpoint.close()  # type: ignore[union-attr]  the locks, which die with a process
    second = job(tmp_path)
    keeping(second, tmp_path / "kept")
    least = max(len(each) for each in done)  # no worker has an answer before the update
    w, m = second.held("weights")[0][0], second.held("moment")[0][0]
    for driver in second.drivers:
        for stored in driver.store.cells["weights", 0].units.values():
            unit = stored.unit
            if unit.part:
                continue
            elements = slice(unit.start, unit.start + unit.size)
            assert least <= stored.updates <= 3
            expected = reference(stored.updates)
            np.testing.assert_array_equal(w[elements], expected[0][elements])
            np.testing.assert_array_equal(m[elements], expected[1][elements])


def test_weights_and_what_is_beside_them_go_back_together(tmp_path: Path):
    """A kill between the two writes of one update."""
    first = job(tmp_path)
    keeps = keeping(first, tmp_path / "kept")
    done: list[int] = []
    first.run({w: starting(first) for w in range(2)}, leave=False)
    first.run({w: stepping(first, w, 0, 2, done) for w in range(2)}, leave=False)
    for keep, driver in zip(keeps, first.drivers, strict=True):
        cell = driver.store.cells["moment", 0]
        for stored in cell.units.values():
            stored.slots = [np.full_like(slot, 77) for slot in stored.slots if slot is not None]
            stored.version, stored.updates = stored.version + 1, stored.updates + 1
            keep.save(cell, stored)
        keep.close()
    second = job(tmp_path)
    keeping(second, tmp_path / "kept")
    np.testing.assert_array_equal(second.held("moment")[0][0], reference(2)[1])


def test_a_half_written_place_is_not_believed(tmp_path: Path):
    first = job(tmp_path)
    keeps = keeping(first, tmp_path / "kept")
    first.run({w: starting(first) for w in range(2)}, leave=False)
    first.run({w: stepping(first, w, 0, 1, []) for w in range(2)}, leave=False)
    for keep in keeps:
        keep.close()
        data = bytearray(keep.path.read_bytes())
        places = keep._places["weights", 0, min(u for n, _, u in keep._places if n == "weights")]
        versions = [int.from_bytes(data[at : at + 8], "little") for at in (places.first, places.second)]
        newest = (places.first, places.second)[versions.index(max(versions))]
        data[newest + 64 + 5] ^= 1
        keep.path.write_bytes(data)
    second = job(tmp_path)
    checkpoints = [
        ServerCheckpoint(tmp_path / "kept", driver.store, i) for i, driver in enumerate(second.drivers)
    ]
    for keep, driver in zip(checkpoints, second.drivers, strict=True):
        keep.load([("weights", "moment")])
        updates = [stored.updates for stored in driver.store.cells["weights", 0].units.values()]
        assert updates[0] == 0
        assert set(updates[1:]) == {1}


def test_what_is_answered_before_it_is_kept_is_refused(tmp_path: Path):
    """With `staleness` a worker is answered before another one's term has arrived, and no file holds that
    term."""
    for staleness in (0, 2):
        server_job = job(tmp_path, TEXT.replace("chunk = 1 KiB", f"chunk = 1 KiB, staleness = {staleness}"))
        site = server_job.site("exchange", "step")
        server_job.run({w: starting(server_job) for w in range(2)}, leave=False)
        server_job.ask(1, site, {"grads": values(1)})
        for server in range(2):
            while server_job.wires[1, server]:
                server_job.deliver(1, server)
        assert (server_job.answered(1, site) is not None) == bool(staleness)
    check_prompt(job(tmp_path).sites, "")
    with pytest.raises(CommplanError, match="remove `staleness`") as error:
        check_prompt(server_job.sites, "")
    assert error.value.diagnostics[0].code == "CP0980"
    assert error.value.diagnostics[0].span == site.span


def test_start_is_refused_on_top_of_what_was_kept(tmp_path: Path):
    first = job(tmp_path)
    keeps = keeping(first, tmp_path / "kept")
    first.run({w: starting(first) for w in range(2)}, leave=False)
    for keep in keeps:
        keep.close()
    second = job(tmp_path)
    keeping(second, tmp_path / "kept")
    with pytest.raises(CommplanError, match="CP0975"):
        second.run({w: starting(second) for w in range(2)})


def test_another_plan_is_refused_and_another_run_too(tmp_path: Path):
    keeping(job(tmp_path), tmp_path / "kept")
    with pytest.raises(CommplanError, match="CP0973"):
        keeping(job(tmp_path, TEXT.replace("1 KiB", "2 KiB")), tmp_path / "kept")
    state = tmp_path / "kept" / "server-0.state"
    state.write_bytes(state.read_bytes().replace(b'"states":["', b'"states":["../', 1))
    with pytest.raises(CommplanError, match=r"CP0974.*is damaged"):
        ServerCheckpoint(tmp_path / "kept", job(tmp_path).drivers[0].store, 0)
    (tmp_path / "kept" / "server-1.state").write_bytes(b"something else")
    with pytest.raises(CommplanError, match="CP0974"):
        ServerCheckpoint(tmp_path / "kept", job(tmp_path).drivers[1].store, 1)
    (tmp_path / "file").write_text("")
    with pytest.raises(CommplanError, match="CP0974"):
        keeping(job(tmp_path), tmp_path / "file")


def test_names_of_states_may_take_more_than_a_page(tmp_path: Path):
    long = f"weights_{'of_a_long_name_' * 600}"
    text = TEXT.replace("weights", long)

    def kept(folder: Path) -> list[ServerCheckpoint]:
        start = {"count": np.int32(0), "mu": SHAPE}
        shapes = {"params": SHAPE, "grads": SHAPE, long: SHAPE, "moment": start}
        server_job = Job(compiled(tmp_path, text, shapes), {"step": step, "zeros": lambda tree: tree})
        return [
            ServerCheckpoint(folder, driver.store, number) for number, driver in enumerate(server_job.drivers)
        ]

    for keep in kept(tmp_path / "kept"):
        assert not keep.existed
        for cell, stored in keep.store:
            stored.slots = [np.zeros(stored.unit.size, dtype.numpy_name) for dtype in stored.dtypes]
            stored.scalars = [np.zeros((), dtype.numpy_name) for dtype in stored.scalar_dtypes]
            stored.version = 1
            keep.save(cell, stored)
        keep.close()
    for keep in kept(tmp_path / "kept"):
        assert keep.existed and keep.load()
        assert all(stored.version == 1 for _, stored in keep.store)
        keep.close()
    with pytest.raises(CommplanError, match=r"CP0973(.|\n)*it contains moment, weights_of"):
        keeping(job(tmp_path), tmp_path / "kept")


def test_a_run_that_begins_beside_another_is_refused(tmp_path: Path):
    """Before it reads anything, even if the first has not created its file yet."""
    folder = tmp_path / "kept"
    folder.mkdir()
    holding = (
        "import fcntl, os, sys\n"
        "lock = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)\n"
        "fcntl.lockf(lock, fcntl.LOCK_EX)\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", holding, str(folder / "server-0.lock")]
    store = job(tmp_path).drivers[0].store
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        with pytest.raises(CommplanError, match=r"CP0974.*in use by another run"):
            ServerCheckpoint(folder, store, 0)
        assert [path.name for path in folder.iterdir()] == ["server-0.lock"]
        other.communicate()
    (folder / "server-0.new").write_bytes(b"left by a run that was killed")
    keep = ServerCheckpoint(folder, store, 0)
    assert not keep.existed
    assert {path.name for path in folder.iterdir()} == {"server-0.lock", "server-0.state"}
    keep.close()
    again = ServerCheckpoint(folder, store, 0)
    assert again.existed
    again.close()


@pytest.mark.parametrize("suffix", [".state", ".new", ".lock"])
def test_a_link_in_the_folder_is_not_followed(tmp_path: Path, suffix: str):
    link, target = tmp_path / "kept", tmp_path / "target"
    link.mkdir()
    target.write_text("of somebody else")
    (link / "server-0.state").with_suffix(suffix).symlink_to(target)
    store = job(tmp_path).drivers[0].store
    if suffix == ".new":  # of a run that was killed
        ServerCheckpoint(link, store, 0).close()
    else:
        with pytest.raises(CommplanError, match=r"CP0974.*it is a symbolic link"):
            ServerCheckpoint(link, store, 0)
    assert target.read_text() == "of somebody else"


def test_what_no_kill_can_do_is_damage(tmp_path: Path):
    """A later run would begin anew, and lose the checkpoint."""
    first = job(tmp_path)
    keeps = keeping(first, tmp_path / "kept")
    first.run({w: starting(first) for w in range(2)}, leave=False)
    first.run({w: stepping(first, w, 0, 3, []) for w in range(2)}, leave=False)
    for keep in keeps:
        keep.close()
    keep, whole = keeps[0], keeps[0].path.read_bytes()
    weights, moment = (
        next(at for key, at in keep._places.items() if key[0] == name) for name in ("weights", "moment")
    )

    def damaged(*places: int, end: int | None = None) -> None:
        data = bytearray(whole[:end])
        for at in places:
            data[at + 64 + 5] ^= 1
        keep.path.write_bytes(data)
        with pytest.raises(CommplanError, match=r"CP0974.*is damaged"):
            keeping(job(tmp_path), tmp_path / "kept")

    damaged(weights.first, weights.second)
    damaged(end=len(whole) - 1)
    newest = max(moment[:2], key=lambda at: int.from_bytes(whole[at : at + 8], "little"))
    older = min(weights[:2], key=lambda at: int.from_bytes(whole[at : at + 8], "little"))
    damaged(newest, older)
    keep.path.write_bytes(whole)
    keeping(job(tmp_path), tmp_path / "kept")


def test_an_fsync_that_fails_is_reported_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server_job = job(tmp_path)
    checkpoint = ServerCheckpoint(tmp_path, server_job.drivers[0].store, 0, every_s=60.0)

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CommplanError) as error:
        checkpoint.close()
    assert "CP0974" in str(error.value) and "No space left" in str(error.value)
    monkeypatch.undo()
    ServerCheckpoint(tmp_path, server_job.drivers[0].store, 0).close()  # the lock was released
