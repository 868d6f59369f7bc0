"""Waiting without work: the futex, and the ring on its own."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from input_plans import images, schedule
from support.asleep import until_asleep

from commplan.diagnostics import CommplanError
from commplan.ir.schedule import Leaf
from commplan.ir.types import DType
from commplan.runtime.input.iterator import PhaseBatches
from commplan.runtime.input.layout import aligned, compacted
from commplan.runtime.input.shm import futex


def test_a_change_ends_the_wait() -> None:
    word = ctypes.c_uint32(5)
    futex.wait(word, 4, 60.0)  # already another value: no wait at all

    def change() -> None:
        time.sleep(0.05)
        word.value = 6
        futex.wake(word)

    other = threading.Thread(target=change)
    other.start()
    while word.value == 5:
        futex.wait(word, 5, 60.0)
    other.join()
    assert word.value == 6


def test_a_wait_ends_by_itself() -> None:
    futex.wait(ctypes.c_uint32(5), 5, 0.02)


def test_a_wait_reaches_across_processes(tmp_path: Path) -> None:
    """A child waits on a word of a shared file; only a wake-up can end the wait soon."""
    path = tmp_path / "memory"
    path.write_bytes(bytes(mmap.PAGESIZE))
    script = (
        "import ctypes, mmap, sys; from commplan.runtime.input.shm import futex\n"
        "file = open(sys.argv[1], 'r+b'); word = ctypes.c_uint32.from_buffer(mmap.mmap(file.fileno(), 0))\n"
        "print('waiting', flush=True); turns = 0\n"
        "while word.value == 0: futex.wait(word, 0, 50.0); turns += 1\n"
        "print(turns, word.value)"
    )
    child = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "waiting\n"
    with path.open("r+b") as file:
        word = ctypes.c_uint32.from_buffer(mmap.mmap(file.fileno(), 0))
    time.sleep(0.1)
    word.value = 7
    futex.wake(word)
    out, _ = child.communicate(timeout=40)
    turns, value = map(int, out.split())
    assert value == 7 and turns <= 2


def test_an_interrupt_leaves_no_thread_and_no_noise(tmp_path: Path) -> None:
    """Control-C while the caller waits for a slow record: a KeyboardInterrupt, and the interpreter ends."""
    script = tmp_path / "wait.py"
    script.write_text(
        "import os, sys, time\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from input_plans import FUNCTIONS, decode, ensemble, images\n"
        "from commplan.runtime.input.iterator import PhaseBatches\n"
        "def slow(record):\n"
        "    os.write(1, b'working\\n')  # whole, though several threads write\n"
        "    time.sleep(0.5)\n"
        "    return decode(record)\n"
        "functions = {**FUNCTIONS, 'decode': slow}\n"
        "feed = PhaseBatches(ensemble('', 1), 'step', {'images': images(800)}, functions)\n"
        "for _ in feed: pass\n",
        encoding="utf-8",
    )
    child = subprocess.Popen(
        [sys.executable, "-W", "error", str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None and child.stdout.readline() == "working\n"
    until_asleep(child.pid)
    os.kill(child.pid, signal.SIGINT)
    _, err = child.communicate(timeout=120)
    assert child.returncode != 0
    assert err.rstrip().endswith("KeyboardInterrupt") and err.count("Traceback") == 1


def test_an_iterator_that_is_never_closed_does_not_keep_the_interpreter() -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from input_plans import FUNCTIONS, ensemble, images\n"
        "from commplan.runtime.input.iterator import PhaseBatches\n"
        "feed = PhaseBatches(ensemble('', 2), 'step', {'images': images(8000)}, FUNCTIONS)\n"
        "print(next(feed).step)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, str(Path(__file__).parent)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


def test_aligned_arrays() -> None:
    for shape in ((1,), (7, 3), ()):
        array = aligned(shape, np.dtype(np.float32))
        assert array.shape == shape and array.dtype == np.float32 and array.ctypes.data % 64 == 0
        array[...] = 1
        assert (array == 1).all()


def test_compaction_puts_counted_rows_first_in_every_shard() -> None:
    counted = np.array([True, True, True, True, True, True, False, False, False, False])
    usable = np.array([False, True, True, False, False, True, True, False, False, False])
    assert compacted(counted, usable, 1).tolist() == [1, 2, 5, 1, 2, 5, 1, 2, 5, 1]
    assert compacted(counted, usable, 2).tolist() == [1, 2, 1, 2, 1, 5, 5, 5, 5, 5]
    assert compacted(counted, usable, 5).tolist() == [1, 1, 2, 2, 5, 5, 6, 6, -1, -1]


def test_records_of_bfloat16() -> None:
    made = schedule(
        "raw = load images batch 4 visit exactly_once seed 1\nvalues = map narrow(raw)\noutput values",
        declarations="source images : bytes\nfn narrow (bytes) -> bf16[3] on host",
    )

    def narrow(record: bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.void]]:
        return np.full(3, record[0], ml_dtypes.bfloat16)

    with PhaseBatches(made, "step", {"images": images(4)}, {"narrow": narrow}) as feed:
        item = next(feed).values["values.0"]
    assert item.dtype == ml_dtypes.bfloat16 and sorted(item[:, 0].tolist()) == [0, 1, 2, 3]


def test_trees_and_variable_lengths_have_their_refusals() -> None:
    tree = schedule(
        "raw = load images batch 4 visit exactly_once seed 1\nlength = map measure(raw)\noutput length",
        declarations="source images : tree\nfn measure (tree) -> i32 on host",
        shapes={"raw": (Leaf("w", (3,), DType.F32),)},
    )
    with pytest.raises(CommplanError) as error:
        PhaseBatches(tree, "step", {"images": images(4)}, {"measure": len})
    assert error.value.diagnostics[0].code == "CP0913"
