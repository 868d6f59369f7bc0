"""One program of a sweep: it joins, takes epochs until it is told to end, and writes down what it was given.

    python -m bench.sweep.program '{"system": "commplan", "kind": "torch", "records": "records.bin", ..}'

It says `ready` once all is imported, `joined` when it takes part and `ended`, with its CPU seconds so far.
Every batch goes to a log, so that a kill loses none; where a member goes on is saved every few batches, as a
training job saves it. Then it waits as long as an accelerator would take for a step.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.input.records import SHAPE, Packed, decode, numbers
from bench.input.team import cannot, say

BATCH, SAVE = 64, 3  # records of a batch; batches from one save to the next
ENTRY = np.dtype([("ns", "i8"), ("epoch", "i8"), ("step", "i8"), ("rows", "i8"), ("ids", "u4", (BATCH,))])
PLAN = f"""
plan sweep
ensemble member = ?
source images : bytes
fn decode(bytes) -> u8[{", ".join(map(str, SHAPE))}] on host
each step {{
    raw    = load images batch {BATCH} visit exactly_once seed 17 tail short
    pixels = map decode(raw)
    output pixels
}}
"""
Ids = npt.NDArray[np.uint32]
Given = tuple[int, int, Ids]  # epoch, step, and the numbers of the records


class Log:
    """What this member was given, over all its lives, and where it goes on. given: batches so far."""

    def __init__(self, base: Path) -> None:
        self._file = os.open(base.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._saved = base.with_suffix(".json")
        self.given = os.fstat(self._file).st_size // ENTRY.itemsize
        self.state: dict[str, int] | None = None
        if self._saved.exists():
            self.state = json.loads(self._saved.read_text())["state"]

    def add(self, epoch: int, step: int, ids: Ids) -> None:
        entry = np.zeros((), ENTRY)
        entry["ns"], entry["epoch"], entry["step"], entry["rows"] = time.monotonic_ns(), epoch, step, len(ids)
        entry["ids"][: len(ids)] = ids
        os.write(self._file, entry.tobytes())
        self.given += 1

    def save(self, state: dict[str, int] | None) -> None:
        partial = self._saved.with_suffix(".part")
        partial.write_text(json.dumps({"state": state, "given": self.given}))
        partial.rename(self._saved)


class Ending(threading.Event):
    """Set once the input of this program says so."""

    def __init__(self) -> None:
        super().__init__()
        threading.Thread(target=lambda: (sys.stdin.readline(), self.set()), daemon=True).start()


# --- commplan ---


def of_feed(options: dict[str, Any], log: Log, ending: Ending) -> Iterator[Given]:
    """A member of a feed, whose batches are taken as NumPy, JAX or PyTorch has them."""
    import commplan  # noqa: PLC0415  members of peers do without
    from commplan.runtime.input.feeds import status  # noqa: PLC0415

    epochs = EPOCHS[options["kind"]]()
    plan, records = commplan.loads(PLAN), Packed(Path(options["records"]))
    say(ready=os.getpid())
    with commplan.join(
        options["name"], plan, sources={"images": records}, functions={"decode": decode},
        member=options["number"], state=log.state, timeout=options["timeout"],
    ) as feed:  # fmt: skip
        say(joined=feed.member, cpu=time.process_time())
        while not ending.is_set():
            for ids in epochs(feed):
                place = feed.state()["epoch"] * feed.steps + feed.state()["step"] - 1
                yield *divmod(place, feed.steps), ids
                if log.given % SAVE == 0:
                    log.save(feed.state())
        log.save(feed.state())
        members = [m for each in status.feeds() if each.name == feed.name for m in each.members]
        alone = sum(member.alone for member in members if member.member == feed.member)
    say(ended=True, cpu=time.process_time(), alone=alone)


Epochs = Callable[[Any], Iterator[Ids]]


def _numpy() -> Epochs:
    return lambda feed: (numbers(batch["pixels"]) for batch in feed)


def _jax() -> Epochs:
    jax: Any = importlib.import_module("jax")
    jax.devices()
    return lambda feed: (numbers(np.asarray(batch.jax()["pixels"])) for batch in feed)


def _torch() -> Epochs:
    data: Any = importlib.import_module("torch.utils.data")

    def epochs(feed: Any) -> Iterator[Ids]:
        for tensors in data.DataLoader(feed.torch_dataset(), batch_size=None):
            yield numbers(tensors["pixels"].numpy())

    return epochs


EPOCHS: dict[str, Callable[[], Epochs]] = {"numpy": _numpy, "jax": _jax, "torch": _torch}


# --- what a member does without any input ---


class Memory:
    """Batches that lie in memory, as a feed hands them out: a member's own work, by itself."""

    def __init__(self, batches: int) -> None:
        from commplan.runtime.input.feeds.batch import Batch  # noqa: PLC0415

        pixels = np.zeros((BATCH, *SHAPE), np.uint8)
        self.name, self.steps, self._at = "memory", batches, 0
        self._batch = Batch(pixels=pixels)
        self._batch.epoch = self._batch.step = 0

    def __iter__(self) -> Iterator[Any]:
        for step in range(self.steps):
            self._at = step + 1
            yield self._batch

    def state(self) -> dict[str, int]:
        return {"epoch": 0, "step": self._at, "order": 0}

    def torch_dataset(self) -> Any:
        from commplan.runtime.input.feeds.torch_dataset import dataset  # noqa: PLC0415

        return dataset(self)  # pyright: ignore[reportArgumentType]  all of a feed that it needs


def own_work(options: dict[str, Any], log: Log, ending: Ending) -> Iterator[Given]:
    del ending
    epochs, memory = EPOCHS[options["kind"]](), Memory(options["batches"])
    say(ready=os.getpid())
    for _ in range(2):  # the first is to get warm
        say(joined=0, cpu=time.process_time())
        for ids in epochs(memory):
            yield 0, memory.state()["step"], ids
            if log.given % SAVE == 0:
                log.save(memory.state())
    say(ended=True, cpu=time.process_time(), alone=0)


# --- peers ---


def of_tensorsocket(options: dict[str, Any], log: Log, ending: Ending) -> Iterator[Given]:
    """A consumer of TensorSocket. It has no state to come back with; an epoch is over when it says so."""
    del log
    from bench.input.peers import ports  # noqa: PLC0415

    sockets: Any = importlib.import_module("tensorsocket")
    say(ready=os.getpid())
    batches: Any = sockets.TensorConsumer(batch_size=BATCH, **ports(options["port"]))
    say(joined=options["number"], cpu=time.process_time())
    epoch = 0
    while not ending.is_set():
        for step, (pixels, _) in enumerate(batches):
            yield epoch, step, numbers(pixels.numpy())
        epoch += 1
    say(ended=True, cpu=time.process_time(), alone=0)


def of_tf_service(options: dict[str, Any], log: Log, ending: Ending) -> Iterator[Given]:
    """A trainer of tf.data service, whose data set has no end: an epoch is as many batches as hold all
    records."""
    del log
    from bench.input.peers import tf_batches  # noqa: PLC0415

    path = Path(options["records"])
    steps = len(Packed(path)) // BATCH
    importlib.import_module("tensorflow")
    say(ready=os.getpid())
    batches = tf_batches(path, options["port"], options["number"])
    say(joined=options["number"], cpu=time.process_time())
    epoch = 0
    while not ending.is_set():
        for step in range(steps):
            _, ids = next(batches)
            yield epoch, step, ids.view(np.uint32)
        epoch += 1
    say(ended=True, cpu=time.process_time(), alone=0)


SYSTEMS: dict[str, Callable[[dict[str, Any], Log, Ending], Iterator[Given]]] = {
    "commplan": of_feed,
    "own_work": own_work,
    "tensorsocket": of_tensorsocket,
    "tf_service": of_tf_service,
}
MODULES = {"tensorsocket": "tensorsocket", "tf_service": "tensorflow"}


def main() -> None:
    options: dict[str, Any] = json.loads(sys.argv[1])
    module = MODULES.get(options["system"], "torch" if options["kind"] == "torch" else "numpy")
    if importlib.util.find_spec(module) is None:
        cannot(f"{module} is not installed in {sys.executable}")
        return
    log, step_s = Log(Path(options["log"])), options["step_s"]
    for given in SYSTEMS[options["system"]](options, log, Ending()):
        log.add(*given)
        if step_s:
            time.sleep(step_s)


if __name__ == "__main__":
    main()
