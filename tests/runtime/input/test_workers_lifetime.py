"""Worker processes and the program that owns them: how they start, and that none outlives it."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import worker_plans as fns
from batch_feed import batches, no_thread_is_left_behind
from input_plans import ensemble, images
from support.campaign import parameters

from commplan.runtime.input.observe.wait_log import ClosedError
from commplan.runtime.input.stages import worker_pool

HERE = Path(__file__).parent
PROGRAM = HERE / "worker_program.py"
pytestmark = pytest.mark.usefixtures(no_thread_is_left_behind.__name__)


@pytest.fixture(autouse=True)
def soon_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "_FATE_S", 1.5)


def lives(pid: int) -> bool:
    """Whether a process runs; one that only waits to be counted does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def until(true: Callable[[], bool]) -> None:
    """Wait; the test's time limit ends a wait for ever."""
    while not true():
        time.sleep(0.02)


def pids(folder: Path) -> list[int]:
    return [int(file.name) for file in folder.iterdir()]


def program(*arguments: str | Path, **more: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, PROGRAM, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **more,
    )


def test_functions_of_the_program_itself_are_found() -> None:
    out, err = program("guarded").communicate(timeout=120)
    assert out == f"{sorted(range(16))}\n" and err == ""


def test_a_program_without_a_guard_is_told_so() -> None:
    process = program("unguarded")
    out, err = process.communicate(timeout=120)
    assert process.returncode != 0 and out == ""
    assert "CP0954" in err and 'below `if __name__ == "__main__":`' in err


def test_a_function_from_a_prompt_is_refused() -> None:
    text = (
        f"import sys; sys.path.insert(0, {str(HERE)!r})\n"
        "from input_plans import *\nfrom commplan.runtime.input.iterator import PhaseBatches\n"
        "def decode(record): return 1\n"
        "PhaseBatches(ensemble('', 1), 'step', {'images': images(8)}, {'decode': decode, 'flip': flip}, "
        "workers='processes')"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert "CP0952" in done.stderr and "`decode` was defined at a prompt" in done.stderr


@pytest.mark.parametrize("how", parameters([signal.SIGKILL], [signal.SIGTERM]))
def test_no_worker_outlives_its_program(tmp_path: Path, how: signal.Signals) -> None:
    process = program("guarded", tmp_path)
    until(lambda: len(pids(tmp_path)) == 2)
    workers = pids(tmp_path)
    assert process.pid not in workers and all(lives(pid) for pid in workers)
    process.send_signal(how)
    process.communicate(timeout=60)
    until(lambda: not any(lives(pid) for pid in workers))


def test_an_interrupted_program_ends_with_its_workers(tmp_path: Path) -> None:
    process = program("guarded", tmp_path, start_new_session=True)
    until(lambda: len(pids(tmp_path)) == 2)
    workers = pids(tmp_path)
    os.killpg(process.pid, signal.SIGINT)  # as the terminal does
    _, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert err.count("Traceback") == 1 and err.rstrip().endswith("KeyboardInterrupt"), "workers say nothing"
    until(lambda: not any(lives(pid) for pid in workers))


def test_closing_does_not_wait_for_a_record_that_hangs(tmp_path: Path) -> None:
    functions = {"decode": functools.partial(fns.hanging, folder=str(tmp_path))}
    feed = batches(
        ensemble("", 1, hints="{ cores = 2 }"), images(8), functions=functions, workers="processes"
    )
    seen: list[type[BaseException]] = []

    def take() -> None:
        try:
            next(feed)
        except Exception as error:  # noqa: BLE001  which one it is, is what is asked
            seen.append(type(error))

    other = threading.Thread(target=take)
    other.start()
    until(lambda: len(pids(tmp_path)) == 2)
    feed.close()
    other.join()
    assert seen and ClosedError not in seen, "the caller is told in the plan's words"
    assert not any(lives(pid) for pid in pids(tmp_path))


def test_batches_that_are_forgotten_take_their_workers_along(tmp_path: Path) -> None:
    functions = {"decode": functools.partial(fns.hanging, folder=str(tmp_path))}
    feed = batches(
        ensemble("", 1, hints="{ cores = 1 }"), images(8), functions=functions, workers="processes"
    )
    feed._arm(0)
    until(lambda: len(pids(tmp_path)) == 1)
    assert feed._window.exchange is not None
    threads = list(feed._window.exchange.producers.running)
    del feed
    for thread in threads:
        thread.join()
    until(lambda: not any(lives(pid) for pid in pids(tmp_path)))


def test_starting_and_stopping_leaves_nothing_open() -> None:
    def once() -> tuple[int, int]:
        plan = ensemble("", 1, hints="{ cores = 1 }")
        with batches(plan, images(8), workers="processes") as feed:
            assert len(list(feed)) == 1
        maps = Path("/proc/self/maps").read_text().count("commplan")
        return len(list(Path("/proc/self/fd").iterdir())), maps

    first = once()
    assert once() == first


def test_runs_take_workers_too() -> None:
    jax = pytest.importorskip("jax")
    import commplan  # noqa: PLC0415

    text = """plan p
axis data = 2
source images : u8[6]
fn decode (u8[6]) -> u8[2, 3], i32 on host
fn scale  (u8[2, 3]) -> f32[2, 3] on device
each step {
    raw       = load images batch 8 split data visit exactly_once seed 3
    x, labels = map decode(raw)
    scaled    = map scale(x)
    output scaled, labels
}
"""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    run = (
        commplan.loads(text)
        .compile()
        .bind(
            mesh,
            sources={"images": np.arange(21 * 6, dtype=np.uint8).reshape(21, 6)},
            functions={"decode": fns.split, "scale": lambda x: x / np.float32(255)},
        )
    )
    found: dict[str, list[Any]] = {}
    for kind in ("threads", "processes"):
        run.init()  # the same batches for each kind
        with run.batches(workers=kind) as feed:
            found[kind] = [jax.tree.map(np.asarray, batch) for batch in feed]
            assert feed.summary().workers.endswith(kind) or feed.summary().workers.startswith("1 ")
    assert len(found["threads"]) == 3
    assert jax.tree.all(jax.tree.map(np.array_equal, found["threads"], found["processes"]))
