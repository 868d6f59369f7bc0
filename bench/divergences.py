"""Jobs of which one process differs from the others: all must be refused before their first step.

    python -m bench.divergences --count 40 --seed 0

Every job starts two processes, ranks under `mpirun` or processes of `jax.distributed`, that bind a plan and
call a training step under `run.jit`. One of them differs, in a way that is drawn: its plan, shapes, seed,
options of JAX or flags of XLA; the order of its phases, collectives of its own, how often it reduces; its
batch; what it donates or computes; or it does not come. Some jobs differ in nothing, and must run. A case is
a pure function of its seed. Exit 1 where a job that differs ran, hung or crashed, or another one was refused.

Ranks under MPI may compute what they like between their collectives: a constant that differs is drawn for
`jax.distributed` alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from bench.servers.mpirun import command, environment

DEADLINE_S = 400.0  # of a job that takes some ten seconds, and beside a load of 20 more than a hundred
ABSENT_S = 20.0  # how long a process that does not come stays away
REFUSALS = ("CP0845", "CP0854", "CP0855")
KINDS: dict[str, tuple[dict[str, Any], ...]] = {
    "none": ({},),
    "plan": (
        {"plan": ("reduce grads over data by mean", "reduce grads over data by sum")},
        {"plan": ("by max", "by min")},
        {"plan": ("reduce grads over data by mean", "reduce grads over data by mean { wire = bf16 }")},
        {"plan": ("reduce grads over data by mean", "reduce grads over data by mean via ring")},
        {"plan": ("output grads, loss", "output loss, grads")},
    ),
    "shapes": ({"size": 5}, {"size": 7}, {"size": 600}),
    "seed": ({"seed": 1}, {"seed": 99}),
    "option": (
        {"config": {"jax_enable_x64": True}},
        {"config": {"jax_default_matmul_precision": "highest"}},
        {"config": {"jax_default_prng_impl": "rbg"}},
        {"flags": "--xla_cpu_enable_fast_math=true"},
        {"flags": "--xla_cpu_multi_thread_eigen=false"},
    ),
    "order": ({"step": {"norm_first": True}},),
    "own": tuple({"step": {"extra": sizes}} for sizes in ("1", "3", "34")),
    "count": tuple({"step": {"accumulate": times}} for times in (2, 3)),
    "batch": tuple({"arguments": {"rows": rows}} for rows in (2, 4, 16)),
    "dtype": tuple({"arguments": {"dtype": dtype}} for dtype in ("int32", "uint8")),
    "donated": ({"step": {"donate_argnums": 1}},),
    "absent": ({"absent": True},),
    "constant": ({"step": {"scale": 2.0}}, {"step": {"scale": 1.001}}),
}


class Case(NamedTuple):
    """backend: mpi or jax. who: the process that differs. difference: how, for the worker."""

    backend: str
    kind: str
    who: int
    difference: dict[str, Any]


def drawn(seed: int) -> Case:
    """The case of a seed."""
    rng = random.Random(seed)
    backend = rng.choice(("mpi", "jax"))
    kind = rng.choice([kind for kind in KINDS if (backend, kind) != ("mpi", "constant")])
    return Case(backend, kind, rng.randrange(2), rng.choice(KINDS[kind]))


def worker(case: Case, number: int, port: int) -> str:
    """What one process does, and what became of it."""
    mine = case.difference if number == case.who else {}
    os.environ["XLA_FLAGS"] = mine.get("flags", "")
    from commplan.diagnostics import CommplanError  # noqa: PLC0415
    from commplan.lowering.jax.typing_shim import jax  # noqa: PLC0415
    from tests.support.preflight_steps import PLAN, Job, mesh_of_job  # noqa: PLC0415

    for name, value in mine.get("config", {}).items():
        jax.config.update(name, value)
    mesh = mesh_of_job(case.backend, port, number)
    try:
        plan = PLAN.replace(*mine["plan"]) if "plan" in mine else PLAN
        job: Any = Job(mesh, number, plan=plan, size=mine.get("size", 6), seed=mine.get("seed", 0))
        step = job.step(**mine.get("step", {}))
        if mine.get("absent"):
            time.sleep(ABSENT_S)
            return "away"
        jax.block_until_ready(step({}, *job.arguments(**mine.get("arguments", {}))))
    except CommplanError as error:
        return error.diagnostics[0].code
    return "ran"


def outcome(case: Case, port: int) -> list[str]:
    """What became of the job on its processes."""
    text = json.dumps(case)
    if case.backend == "mpi":
        commands = [command(2, "bench.divergences", "--worker", text)]
        settings = environment()
    else:
        own = [sys.executable, "-m", "bench.divergences", "--worker", text, "--port", str(port)]
        commands = [[*own, "--number", str(number)] for number in range(2)]
        settings = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    jobs = [
        subprocess.Popen(words, env=settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for words in commands
    ]
    ends: list[str] = []
    until = time.monotonic() + DEADLINE_S
    for job in jobs:
        try:
            output, _ = job.communicate(timeout=max(1.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            job.terminate()
            job.communicate()
            ends.append("hung")
            continue
        endings = [line.removeprefix("became ") for line in output.splitlines() if line.startswith("became ")]
        ends += endings or [f"crashed: {output[-2000:]}"]
    return ends


def judged(case: Case, ends: Sequence[str]) -> bool:
    """Whether all that came were refused, or ran where nothing differs."""
    if case.kind == "none":
        return list(ends) == ["ran"] * 2
    came = [end for end in ends if end != "away"]
    return bool(came) and all(end.startswith("CP") for end in came) and any(e in REFUSALS for e in came)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker is not None:
        case = Case(*json.loads(options.worker))
        number = options.number
        if number is None:
            from commplan.lowering.mpi.typing_shim import MPI  # noqa: PLC0415

            number = int(MPI.COMM_WORLD.Get_rank())
        print(f"became {worker(case, number, options.port)}", flush=True)
        return 0
    from tests.support.ports import free_port  # noqa: PLC0415

    right: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for seed in range(options.seed, options.seed + options.count):
        case = drawn(seed)
        ends = outcome(case, free_port())
        differs = "the same" if case.kind == "none" else "divergent"
        total[differs] += 1
        right[differs] += judged(case, ends)
        verdict = "" if judged(case, ends) else "  WRONG"
        print(f"{seed}: {case.backend} {case.kind} {case.difference}: {', '.join(ends)}{verdict}", flush=True)
    print(f"{right['divergent']} of {total['divergent']} divergent jobs refused before step 0")
    print(f"{right['the same']} of {total['the same']} jobs without a difference ran")
    return int(right != total)


if __name__ == "__main__":
    sys.exit(main())
