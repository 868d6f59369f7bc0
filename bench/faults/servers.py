"""Faults of workers and parameter servers, under a fault-tolerant MPI.

Two workers and a server exchange gradients (`sync`: the server waits for both) or average elastically
(`async`: it waits for neither). The culprit is a worker or, as rank 2, the server. The right outcomes:

- a stopped, sleeping or killed server, or one that ends early, is named to the workers;
- a stopped or sleeping worker is named to all if the others wait for it (`sync`). Otherwise they finish, and
  then the server names a stopped one; a sleeping one blocks no other, and wakes up here;
- the server continues without a killed worker, and reports this; a worker that leaves is not reported;
- an exception of either ends all, with its text.
"""

from __future__ import annotations

import os
import random
import re
import sys
import time
from pathlib import Path
from typing import Any

from bench.faults.campaign import Fault, Outcome, Place, begin, blamed, fault_of, happen
from bench.faults.mpi import BUSY_S, FLAG, differs, job
from bench.harness.mpirun import ULFM, command

SYNC = """
plan served
axis worker = 2
server hub = 1
input params : f32[{elements}] per worker
input grads : f32[{elements}] partial worker
state weights : f32[{elements}] on hub
fn add(f32[{elements}], f32[{elements}]) -> f32[{elements}] on device elementwise
at start {{
    weights = broadcast params over worker from 0
}}
each step {{
    weights = exchange grads into weights with add over worker by {how}
    output weights
}}
"""
ASYNC = """
plan served
axis worker = 2
server hub = 1
input params : f32[{elements}] per worker
state center : f32[{elements}] on hub



at start {{
    center = broadcast params over worker from 0
}}
each step {{
    pull, center = elastic params with center over worker by async(eta = 0.5, rho = {how}) {{ chunk = 4 KiB }}
    output pull
}}
"""
LINE = {"sync": 13, "async": 14}
KINDS = ("stop", "kill", "exit", "raise", "sleep", "plan", "flag")
WORKERS, SERVER, STEPS, BOUND_S, NAP_S = 2, 2, 30, 2.0, 6.0


def add(w: Any, g: Any) -> Any:
    return w + g


def rank(fault: Fault) -> None:
    """The program of a worker or the server."""
    from mpi4py import MPI  # noqa: PLC0415

    comm = MPI.COMM_WORLD
    culprit = comm.rank == fault.culprit
    if culprit and fault.kind == "flag":
        os.environ["XLA_FLAGS"] = FLAG
    import jax  # noqa: PLC0415
    import jax.numpy as jnp  # noqa: PLC0415

    import commplan  # noqa: PLC0415

    other = culprit and fault.kind == "plan"
    hows = ("mean", "sum") if fault.via == "sync" else ("0.5", "0.25")
    text = (SYNC if fault.via == "sync" else ASYNC).format(elements=fault.elements, how=hows[other])
    functions = {"add": add} if fault.via == "sync" else {}
    program = commplan.loads(text, "served.plan").compile(comm)
    if culprit and fault.kind in ("plan", "flag"):
        begin()
    run = program.bind(comm, functions=functions, watchdog_s=BOUND_S, busy_s=BUSY_S)
    reached = Path(os.environ["COMMPLAN_RECORDS"]) / "reached"  # the step, by worker 0

    def due() -> bool:
        """Called by a server in its loop."""
        if culprit and reached.exists():
            begin()
            happen(fault.kind)
        return False

    served = run.serve(stop=due)
    if served is not None:
        print(f"served, lost {served.lost}", flush=True)
        return
    state = run.init()
    _, state = run.start(state, params=jnp.zeros(fault.elements))
    given = "grads" if fault.via == "sync" else "params"
    for number in range(STEPS):
        if comm.rank == 0 and number == fault.step:
            reached.touch()
        if culprit and number == fault.step and fault.kind not in ("plan", "flag"):
            begin()
            if fault.kind == "sleep" and fault.via == "async":
                time.sleep(NAP_S)
            elif fault.kind == "exit":
                break
            else:
                happen(fault.kind)
        out, state = run.step(state, **{given: jnp.ones(fault.elements)})
        jax.block_until_ready(out)
        time.sleep(0.1)
    run.close()
    print(f"worker {comm.rank} is done", flush=True)


def draw(drawn: random.Random, kind: str) -> Fault:
    via, culprit = drawn.choice(("sync", "async")), drawn.randrange(WORKERS + 1)
    return Fault("servers", kind, culprit, drawn.randrange(5, STEPS - 5), drawn.choice((100, 100_000)), via)


def judged(fault: Fault) -> Outcome:
    """Run a job, and judge its output."""
    seen = job(fault, command(WORKERS + 1, __name__, *fault.words, options=ULFM))
    return Outcome(fault, seen.seconds, seen.ended, seen.ended and right(fault, seen.text), seen.text)


def right(fault: Fault, text: str) -> bool:
    """See this file's beginning."""
    done = {int(number) for number in re.findall(r"worker (\d) is done", text)}
    others = set(range(WORKERS)) - {fault.culprit}
    if fault.kind in ("plan", "flag"):
        return differs(fault, text, "rank")
    server, sync = fault.culprit == SERVER, fault.via == "sync"
    named = set(re.findall(r"\(rank (\d)\) (?:has died|gave up)", text))
    named |= set(map(str, blamed(text)))
    if fault.kind == "raise":
        return "loss is not finite" in text and named <= {str(fault.culprit)}
    if server:
        return named == {str(SERVER)} and f"line {LINE[fault.via]} of" in text
    if fault.kind == "kill":
        is_lost = f"lost ({fault.culprit},)" in text
        return named <= {str(fault.culprit)} and others <= done and is_lost
    if fault.kind == "exit" or (fault.kind == "sleep" and not sync):
        return not named and others <= done and "lost ()" in text
    return named == {str(fault.culprit)} and (f"line {LINE[fault.via]} of" in text or others <= done)


PLACE = Place(KINDS, BOUND_S, draw, judged)

if __name__ == "__main__":
    rank(fault_of(sys.argv[1:]))
