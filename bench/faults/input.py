"""Faults of processes of one host that share their input through memory, by some design (`via`).

Three members take the same batches, and wait three seconds for one another. One is stopped, killed, ends, or
closes its batches early (`skip`); its `decode` raises or does not return; it runs another plan or begins at
another place in the order: those two are refused when all meet, with both sides named.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from typing import Any

import numpy as np

from bench.faults.campaign import Fault, Outcome, Place, begin, fault_of, happen, observed

PLAN = """
plan shared
ensemble member = 3
source numbers : i32
fn decode(i32) -> i32[{elements}] on host
each step {{
    raw = load numbers batch {batch} visit exactly_once seed 5 {{ cores = 1 }}
    values = map decode(raw)
    values = share values over member via {via}
    output values
}}
"""
DESIGNS = {"all_shared": 3, "single_broadcast(readers = 1)": 1, "multi_broadcast(readers = 2)": 2}
MEMBERS, RECORDS, BOUND_S = 3, 360, 3.0
MEETING_S = 60.0  # for the join of all processes, unless it fails on purpose: the machine may be busy
MAPS, SHARES = 8, 9  # lines
KINDS = ("stop", "kill", "exit", "raise", "sleep", "skip", "order", "plan")
MEETING = ("order", "plan")  # faults from the start


def member(fault: Fault, run: str, index: int) -> None:
    """The program of one process."""
    from commplan import compiler  # noqa: PLC0415
    from commplan.dsl import load  # noqa: PLC0415
    from commplan.runtime.input import PhaseBatches  # noqa: PLC0415
    from commplan.runtime.input.group import group  # noqa: PLC0415

    culprit = index == fault.culprit
    asleep: list[str] = []

    def decode(record: Any) -> Any:
        if asleep:
            happen(asleep[0])
        return np.full(fault.elements, record, np.int32)

    batch = 15 if culprit and fault.kind == "plan" else 12
    plan, problems = load(PLAN.format(elements=fault.elements, via=fault.via, batch=batch), "shared.plan")
    assert plan is not None, problems
    schedule = compiler.compile_plan(plan, {}, passes="")
    source, functions = {"numbers": np.arange(RECORDS, dtype=np.int32)}, {"decode": decode}
    state = None
    if culprit and fault.kind == "order":
        with PhaseBatches(schedule, "step", source, functions) as alone:
            state = alone.state() | {"step": fault.step}
    if culprit and fault.kind in MEETING:
        begin()
    team = group(run, index, MEMBERS, timeout=BOUND_S if fault.kind in MEETING else MEETING_S)
    local = {"member": (index,)}
    with PhaseBatches(schedule, "step", source, functions, local=local, group=team, state=state) as feed:
        if feed.exchange is not None:  # now that all have come
            feed.exchange.group = dataclasses.replace(feed.exchange.group, timeout=BOUND_S)
        for number, _ in enumerate(feed):
            if culprit and number == fault.step:
                begin()
                if fault.kind == "skip":
                    return
                if fault.kind in ("raise", "sleep"):
                    asleep.append(fault.kind)
                else:
                    happen(fault.kind)
            time.sleep(0.005)


def members(fault: Fault) -> int:
    """Start the members as copies of this process, and wait for all but one that is stopped."""
    importlib.import_module("commplan.runtime.input")  # once for all
    run, children = uuid.uuid4().hex[:12], dict[int, int]()
    for index in range(MEMBERS):
        child = os.fork()
        if not child:
            try:
                member(fault, run, index)
            except Exception as error:  # noqa: BLE001  what is looked at
                text = f"member {index}: error after all: {type(error).__name__}: {error}\n"
                os.write(2, text.encode())
            sys.stdout.flush()
            sys.exit(0)
        children[index] = child
    for index, child in children.items():
        if fault.kind != "stop" or index != fault.culprit:
            os.waitpid(child, 0)
    if fault.kind == "stop":
        os.kill(children[fault.culprit], signal.SIGKILL)
    return 0


def draw(drawn: random.Random, kind: str) -> Fault:
    """Only a producer of batches can fail to make one."""
    via = drawn.choice(list(DESIGNS))
    makers = DESIGNS[via] if kind in ("raise", "sleep") else MEMBERS
    return Fault("input", kind, drawn.randrange(makers), drawn.randrange(2, 12), drawn.choice((4, 4096)), via)


def judged(fault: Fault) -> Outcome:
    """Run a job, and judge the output of its members."""
    words = [sys.executable, "-u", "-m", __name__, *fault.words]
    with tempfile.TemporaryFile("w+") as output:
        job = subprocess.Popen(words, stdout=output, stderr=output, start_new_session=True)
        seen = observed([job], output)
    return Outcome(fault, seen.seconds, seen.ended, seen.ended and right(fault, seen.text), seen.text)


def right(fault: Fault, text: str) -> bool:
    """Whether all others name the culprit and the waiting line, and nothing else."""
    errors = {int(index): words for index, words in re.findall(r"member (\d): error after all: (.*)", text)}
    others = set(range(MEMBERS)) - {fault.culprit}
    if fault.kind in ("order", "plan"):
        pairs = re.findall(r"error\[CP0922\]: process (\d) is not doing the same as process (\d)", text)
        return bool(pairs) and all(str(fault.culprit) in pair for pair in pairs)
    if fault.kind == "raise":
        line = rf"shared\.plan:{MAPS}:\d+: error\[CP09\d\d\]: .*"
        return errors.keys() == {0, 1, 2} and len(re.findall(line, text)) == MEMBERS and "not finite" in text
    if not others <= errors.keys():
        return False
    if fault.kind == "sleep" and "`decode`" not in errors.get(fault.culprit, ""):
        return False
    state = {"stop": "is stopped", "kill": "died", "exit": "left", "skip": "left", "sleep": "is alive"}[
        fault.kind
    ]
    return all(
        set(re.findall(r"process (\d) of 3", errors[index])) == {str(fault.culprit)}
        and state in errors[index]
        and f"shared.plan:{SHARES}:" in errors[index]
        for index in others
    )


PLACE = Place(KINDS, BOUND_S, draw, judged)

if __name__ == "__main__":
    sys.exit(members(fault_of(sys.argv[1:])))
