"""A process of `bench.lifecycle`: it takes batches and writes down each one before it takes the next.

    python -m bench.lifecycle.member '{"kind": "feed", "index": 0, ..}'

Kinds: `feed` joins a feed; `group` shares batches with the processes that were named to it; `mpirun` and
`jax` are processes of a launcher; with `clocks` behind them, members have batches of different sizes. A line
of the log is JSON and is written by one call: the process id, then for each batch its place, its records and
the state after it, then `ended`, or the code of the error that ended it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import commplan
from commplan.runtime.input import group

FINE, REFUSED, WRONG = 0, 3, 4
COLUMNS = 32
PLAN = """
plan lifecycle
ensemble member = {members}
source numbers : i32
fn decode(i32) -> i32[32], i32 on host
each step {{
    raw = load numbers batch {batch} visit exactly_once seed {seed} {{ on_failure = {failure}, cores = 2 }}
    rows, labels = map decode(raw)
    {share}
    output rows, labels
}}
"""
SHARE = """rows = share rows over member via {design}
    labels = share labels over member via {design}"""


class Log:
    """Lines that are on disk as soon as they are written, however the process ends."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def say(self, **words: Any) -> None:
        os.write(self._file, json.dumps(words).encode() + b"\n")


def decode(number: Any) -> Any:
    return number * 7 + np.arange(COLUMNS, dtype=np.int32), np.int32(number)


def text(orders: Mapping[str, Any]) -> str:
    share = SHARE.format(design=orders["design"]) if orders["design"] else ""
    return PLAN.format(**{**orders, "share": share})


@contextlib.contextmanager
def opened(orders: Mapping[str, Any]) -> Generator[Any]:
    """The batches of this process, by the public interface alone."""
    kind, index, count, state = (orders[name] for name in ("kind", "index", "count", "state"))
    plan = commplan.loads(text(orders), "lifecycle.plan")
    numbers = np.arange(orders["base"], orders["base"] + orders["records"], dtype=np.int32)
    given: dict[str, Any] = {"sources": {"numbers": numbers}, "functions": {"decode": decode}}
    timeout = orders["timeout"]
    if kind == "feed":
        options = {"batch": orders["own_batch"]} if orders["own_batch"] else {}
        member = {"member": index, "state": state, "timeout": timeout}
        with commplan.join(orders["name"], plan, **given, **member, **options) as feed:
            yield feed
        return
    options = {"member": index} if kind.endswith("clocks") else {}
    machine: Any
    if kind.startswith("mpirun"):
        machine = importlib.import_module("mpi4py.MPI").COMM_WORLD
    else:
        if kind.startswith("group"):
            options["group"] = group(orders["name"], index, count, timeout=timeout)
        jax: Any = importlib.import_module("jax")
        machine = jax.sharding.Mesh(np.array(jax.devices()), ("member",))
    run = plan.compile(machine).bind(machine, **given)
    with run.batches(state=state, timeout=timeout, **options) as batches:
        yield batches


def initialize(orders: Mapping[str, Any]) -> None:
    """Join the other processes of a launcher, which wait for one that dies during the join."""
    if orders["kind"].startswith("mpirun"):
        importlib.import_module("mpi4py.MPI")
    elif orders["kind"].startswith("jax"):
        address = f"localhost:{orders['port']}"
        importlib.import_module("jax").distributed.initialize(address, orders["count"], orders["index"])


def local(array: Any) -> Any:
    """This process's part of an array, without the dimension of members that a mask has."""
    shards = getattr(array, "addressable_shards", None)
    return np.asarray(array if shards is None else shards[0].data)


def main(orders: dict[str, Any]) -> int:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    initialize(orders)
    log = Log(orders["log"])
    log.say(pid=os.getpid(), index=orders["index"])
    code = FINE
    try:
        with opened(orders) as batches:
            before, taken = batches.state(), 0
            goal = orders["goal"] or before["epoch"] + orders["epochs"]
            log.say(joined=before, goal=goal)
            while before["epoch"] < goal and taken != orders["close"]:
                for batch in batches:
                    rows, labels, mask = map(local, (batch["rows"], batch["labels"], batch.mask))
                    if not np.array_equal(rows, labels[:, None] * 7 + np.arange(COLUMNS)):
                        log.say(wrong=f"rows of {labels.tolist()} at {before}: {rows[:, 0].tolist()}")
                        code = WRONG
                    counted = (labels - orders["base"])[mask.reshape(-1)[: len(labels)]].tolist()
                    after, taken = batches.state(), taken + 1
                    log.say(epoch=before["epoch"], step=before["step"], records=counted, state=after)
                    before = after
                    if taken == orders["close"]:
                        break
                    time.sleep(orders["pace"])
    except commplan.CommplanError as error:
        log.say(error=error.diagnostics[0].code, text=str(error))
        code = REFUSED
    else:
        log.say(ended=True)
    if orders["kind"].startswith("jax"):
        if orders["index"] == 0:
            wait_for_others(Path(orders["log"]))
        os._exit(code)  # its shutdown waits for processes that are dead
    return code


def wait_for_others(own: Path) -> None:
    """The first process of a job of JAX ends last: the others end with it."""
    deadline = time.monotonic() + 20.0
    others = [log for log in own.parent.glob(f"*{own.suffixes[0]}.log") if log != own]
    while others and time.monotonic() < deadline:
        time.sleep(0.02)
        others = [log for log in others if is_running(log)]


def is_running(log: Path) -> bool:
    """Whether the process of a log has yet to end."""
    lines = [json.loads(line) for line in log.read_bytes().splitlines()]
    return "ended" not in lines[-1] and "error" not in lines[-1] and Path(f"/proc/{lines[0]['pid']}").exists()


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
