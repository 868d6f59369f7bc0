"""Steps that ranks or processes are about to run, not all alike; each prints what became of it.

`mpirun -n RANKS python preflight_steps.py mpi CASE,..`, `python preflight_steps.py jax CASE,.. PORT INDEX`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import commplan
from commplan.diagnostics import CommplanError
from commplan.runtime.preflight import preflight

PLAN = """plan two
axis data = 2
input grads : tree partial data
input loss  : f32 per data
input norm  : f32[5] per data
each step {
    grads = reduce grads over data by mean
    loss  = reduce loss over data by mean
    output grads, loss
}
phase norms {
    norm = reduce norm over data by max
    output norm
}
"""
SHORT_S = 3.0
Words = list[str]


class Job:
    """The program of a rank or a process: with a run over MPI, or on a mesh of all processes."""

    def __init__(
        self,
        mesh: Any,
        index: int,
        *,
        plan: str = PLAN,
        size: int = 6,
        seed: int = 0,
        watchdog_s: float | None = 10.0,
    ) -> None:
        self.over_mpi = not hasattr(mesh, "devices")
        self.index, self.mesh, self.count = index, mesh, int(mesh.size)
        plan = plan.replace("data = 2", f"data = {self.count}")
        self.size, tree = size, {"w": jax.ShapeDtypeStruct((size,), jnp.float32)}
        self.run = (
            commplan.loads(plan)
            .compile(mesh, shapes={"grads": tree})
            .bind(mesh, seed=seed, watchdog_s=watchdog_s)
        )

    def step(
        self,
        *,
        norm_first: bool = False,
        extra: str = "",
        scale: float = 1,
        prints: bool = False,
        accumulate: int = 1,
        bare: bool = False,
        check_s: float = 0.0,
        timeout: float = SHORT_S,
        during_trace: Callable[[], None] = lambda: None,
        **options: Any,
    ) -> Callable[..., Any]:
        """A training step. extra: sizes of the user's own collectives, in order. accumulate: reductions."""

        def own(x: Any, size: int) -> Any:
            piece = jnp.tile(x[0, :1], size)
            if not self.over_mpi:
                return jax.lax.psum(piece, "data").sum()
            import mpi4jax  # noqa: PLC0415
            from mpi4py import MPI  # noqa: PLC0415

            return mpi4jax.allreduce(piece, op=MPI.SUM, comm=MPI.COMM_WORLD).sum()

        @self.run.spmd(params="same", x="split data", returns=("same", "same", "same"))
        def train(state: Any, params: Any, x: Any) -> Any:
            def loss(params: Any) -> Any:
                return jnp.mean((x @ params["w"]) ** 2) * scale

            value, grads = jax.value_and_grad(loss)(self.run.varying(params))
            added = jnp.zeros(())
            if prints:
                jax.debug.print("a loss of {}", value)
            during_trace()
            if norm_first:
                norms, state = self.run.norms(state, norm=x[0, :5])
                value += 0 * norms.norm[0]
            for _ in range(accumulate):
                out, state = self.run.step(state, grads=grads, loss=value)
                grads = jax.tree.map(jnp.add, grads, self.run.varying(out.grads))
            if not norm_first:
                norms, state = self.run.norms(state, norm=x[0, :5] + 0 * out.loss)
            for size in extra:
                added = added + own(x, int(size))
            params = jax.tree.map(lambda p, g: p - 0.1 * g, params, out.grads)
            return state, params, out.loss + 0 * added, norms.norm

        return train if bare else self.run.jit(train, timeout=timeout, check_s=check_s, **options)

    def arguments(self, rows: int = 8, dtype: str = "float32") -> tuple[Any, Any]:
        params = {"w": np.linspace(1, 2, self.size, dtype=np.float32)}
        x = np.random.default_rng(3).standard_normal((rows, self.size)).astype(dtype)
        if self.over_mpi:
            share = rows // self.count
            return params, x[self.index * share : (self.index + 1) * share]
        sharding = jax.sharding.NamedSharding(self.mesh, jax.P("data"))
        return params, jax.make_array_from_callback(x.shape, sharding, lambda at: x[at])


def outcome(call: Callable[[], Any]) -> str:
    try:
        jax.block_until_ready(call())
    except CommplanError as error:
        return str(error)
    return "ran"


def same(job: Job) -> Words:
    """Trains as `jax.jit` does, and continues with another batch; a known step is not compared again."""
    step, plain, before = job.step(), jax.jit(job.step(bare=True)), compared(job)
    for rows in (8, 16, 8, 8):
        params, x = job.arguments(rows)
        for _ in range(3):
            _, trained, loss, _ = step({}, params, x)
            _, expected, plain_loss, _ = plain({}, params, x)
            np.testing.assert_array_equal(local(trained["w"]), local(expected["w"]))
            np.testing.assert_array_equal(local(loss), local(plain_loss))
            params = trained
    return [f"ran, compared {compared(job) - before} times"]


def compared(job: Job) -> int:
    """How often processes have exchanged something."""
    from commplan.runtime.machines import gather  # noqa: PLC0415

    gathers = job.run.context.machine.gathers if job.over_mpi else gather._counts
    return gathers.total()


def local(x: Any) -> np.ndarray:
    return np.asarray(x.addressable_shards[0].data)


def differing(**differences: Any) -> Callable[[Job], Words]:
    """The step of process 1 differs; `rows`: in its batch."""

    def case(job: Job) -> Words:
        mine = differences if job.index else {}
        rows = mine.get("rows", 8)
        step = job.step(**{key: value for key, value in mine.items() if key != "rows"})
        return [outcome(lambda: step({}, *job.arguments(rows))) for _ in range(2)]

    return case


def later(job: Job) -> Words:
    """The first batches are alike, the second ones are not."""
    step = job.step()
    second = 16 if job.index else 12
    return [outcome(lambda rows=rows: step({}, *job.arguments(rows))) for rows in (8, second, 8)]


def own_order(job: Job) -> Words:
    step = job.step(extra=("34", "43")[job.index])
    return [outcome(lambda: step({}, *job.arguments()))]


def alone(job: Job) -> Words:
    """Only process 0 comes."""
    if job.index:
        time.sleep(2 * SHORT_S)
        return ["away"]
    began = time.monotonic()
    outcomes = outcome(lambda: job.step()({}, *job.arguments()))
    assert time.monotonic() - began < 20
    return [outcomes]


def unwatched(case: Callable[[Job], Words]) -> Callable[[Job], Words]:
    """The case in a job without a watchdog, in which late processes are printed soon."""

    def run(job: Job) -> Words:
        preflight.NOTICE_S = 0.2
        return case(job)

    return run


def first_away(job: Job) -> Words:
    """Only process 1 comes, and process 0 is the one that others ask."""
    if job.index == 0:
        time.sleep(4 * SHORT_S)
        return ["away"]
    return [outcome(lambda: job.step()({}, *job.arguments()))]


def untraceable(job: Job) -> Words:
    """The step of process 1 cannot be traced."""
    step = job.run.jit(job.step(bare=True) if job.index == 0 else lambda *_: 1 / 0, timeout=SHORT_S)
    try:
        return [outcome(lambda: step({}, *job.arguments()))]
    except ZeroDivisionError as error:
        return [f"ZeroDivisionError {error}"]


def without_jit(job: Job) -> Words:
    with jax.disable_jit(job.index == 1):
        return [outcome(lambda: job.step()({}, *job.arguments()))]


def differs(job: Job) -> Words:
    """Process 1 has other parameters, which are declared the same; without the check they are mixed."""
    params, x = job.arguments()
    params = {"w": params["w"] + np.float32(job.index)}
    step = job.step()
    outcomes = [outcome(lambda: step({}, params, x)) for _ in range(2)]
    return [*outcomes, outcome(lambda: job.step(check_same=False)({}, params, x))]


def late_shape(job: Job) -> Words:
    """Process 1 has another batch, while process 0 runs the step that both have compared."""
    step = job.step()
    for rows in (8, 8, 12 if job.index else 8):
        jax.block_until_ready(step({}, *job.arguments(rows)))
    return ["ran"]


def late_check(job: Job) -> Words:
    """Process 1 tries collectives in place of the step that both have compared."""
    step, arguments = job.step(), job.arguments()
    outcomes = [outcome(lambda: step({}, *arguments))]
    return [*outcomes, outcome(lambda: job.run.check_collectives() if job.index else step({}, *arguments))]


def missing(fault: Callable[[], None], *, compiles: bool = False) -> Callable[[Job], Words]:
    """For a second shape the last process does not come: `fault` happens while it traces, or compiles."""

    def case(job: Job) -> Words:
        faults: list[Callable[[], None]] = []

        def happen() -> None:
            for each in faults:
                each()

        step = job.step(timeout=60.0, during_trace=lambda: None if compiles else happen())
        jax.block_until_ready(step({}, *job.arguments(12)))
        if job.index == job.count - 1:
            faults.append(fault)
        compile_step = jax.stages.Lowered.compile
        with mock.patch.object(jax.stages.Lowered, "compile", autospec=True) as compiled:
            compiled.side_effect = lambda *args: (compiles and happen()) or compile_step(*args)
            jax.block_until_ready(step({}, *job.arguments(24)))
        return ["ran"]

    return case


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def end() -> None:
    sys.exit(0)


def miscounted(job: Job) -> Words:
    """A backend that corrupts the third element of each collective's result on process 1."""
    backend = type(job.run.context.backend)
    move = backend.move

    def wrong(self: Any, x: Any, op: Any) -> Any:
        result = move(self, x, op)
        last = jnp.asarray(self.index("data") == 1, result.dtype)
        return self.same(result.at[2].add(last), op.axes) if result.size > 2 else result

    checked = len(job.run.check_collectives(60.0))
    backend.move = wrong
    job.run._is_checked = False
    return [f"{checked} checked", outcome(lambda: job.step(check_s=60.0)({}, *job.arguments()))]


def checks(job: Job) -> Words:
    """Checking collectives on process 0 and another call on process 1 are refused before data moves."""
    step, arguments = job.step(check_s=0.0 if job.index else 60.0), job.arguments()
    outcomes = [outcome(lambda: step({}, *arguments))]
    outcomes += [
        outcome(lambda: step({}, *arguments) if job.index else job.run.check_collectives(timeout=SHORT_S))
    ]
    budget_s = 60.0 if job.index else 0.0
    return [*outcomes, f"{len(job.run.check_collectives(budget_s))} checked"]


def checks_alone(job: Job) -> Words:
    """Only process 0 tries the plan's collectives."""
    if job.index:
        time.sleep(2 * SHORT_S)
        return ["away"]
    return [outcome(lambda: job.run.check_collectives(timeout=SHORT_S))]


def assert_miscounts_refused(answers: Mapping[int, Words] | Sequence[Words]) -> None:
    """answers: of `miscounted`, by process."""
    assert answers[0] == answers[1]
    checked, refused = answers[0]
    assert checked == "3 checked"
    first, second = refused.splitlines()[:2]
    collective = "all_reduce(sum) f32[6] over data by native"
    assert first == f"<plan>:7:5: error[CP0856]: {collective} returns wrong results for phase `step`"
    assert second == "  note: rank 1: 1 elements are wrong, the first is element 2: 6, expected 5"


def assert_checks_agreed(answers: Mapping[int, Words] | Sequence[Words], who: str) -> None:
    """answers: of `checks`, by process, which messages call a `who`."""
    assert answers[0] == answers[1]
    step, called, tried = answers[0]
    first = f"error[CP0854]: {who} 1 begins another operation than {who} 0\n  note: {who} 0 "
    assert step.startswith(f"{first}begins a step, and tests the collectives of the plan first\n")
    assert called.startswith(f"{first}calls run.check_collectives()\n  note: {who} 1 begins a step\n")
    assert tried == "1 checked"  # the least time of all counts


CASES: dict[str, Callable[[Job], Words]] = {
    "same": same,
    "phases": differing(norm_first=True),
    "batch": differing(rows=4),
    "accumulated": differing(accumulate=2),
    "own": differing(extra="3"),
    "constant": differing(scale=2),
    "prints": differing(prints=True),
    "later": later,
    "own_order": own_order,
    "untraceable": untraceable,
    "without_jit": without_jit,
    "differs": differs,
    "late_shape": late_shape,
    "late_check": late_check,
    "miscounted": miscounted,
    "alone": alone,
    "checks": checks,
    "checks_alone": checks_alone,
    "first_away": first_away,
    "unwatched_alone": unwatched(alone),
    "unwatched_first_away": unwatched(first_away),
    "stops": missing(stop),
    "ends": missing(end),
    "stops_later": missing(stop, compiles=True),
    "ends_later": missing(end, compiles=True),
    "binds": lambda _: ["bound"],
}


def mesh_of_job(backend: str, port: int, number: int) -> Any:
    """The binding of a process: a communicator of all ranks, or a mesh of the devices of two processes."""
    if backend == "mpi":
        from mpi4py import MPI  # noqa: PLC0415

        return MPI.COMM_WORLD
    jax.distributed.initialize(f"localhost:{port}", 2, number)
    return jax.make_mesh((2,), ("data",), (AxisType.Auto,))


def main(backend: str, names: str, port: str = "0", index: str = "0") -> None:
    mesh = mesh_of_job(backend, int(port), int(index))
    if names in ("late_shape", "ends"):
        commplan.install_hooks()  # one process prints the whole message
    number = int(index) if backend == "jax" else int(mesh.Get_rank())
    if "x64" in names:
        jax.config.update("jax_enable_x64", number == 1)
    jobs: list[Job] = []
    watchdog_s = 1.0 if names.startswith(("stops", "ends")) else None if "unwatched" in names else 10.0
    bound = outcome(lambda: jobs.append(Job(mesh, number, watchdog_s=watchdog_s)))
    outcomes = {name: CASES[name](jobs[0]) if jobs else [bound] for name in names.split(",")}
    for name, words in outcomes.items():
        print(json.dumps([number, name, words]), flush=True)
    if backend == "jax":
        jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
