"""Elastic averaging under MPI: workers train separate networks, which are pulled towards a common center.

The plans are plans/easgd_*.plan. In `sync` the workers keep the center; in `async`, `round_robin` and
`hogwild` one more rank, the last one, serves it: it runs the same program and serves in `run.serve()`.

    mpirun -n 5 python -m mpi4py examples/elastic_mpi.py --mode async [--steps 120] [--json RESULTS.json]
    mpirun -n 8 python -m mpi4py examples/elastic_mpi.py --mode sync

A worker's step is W <- W - eta g - pull, with pull = eta rho (W - C) of the weights before the step, so the
exchange can overlap the computation of gradients.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from mpi4py import MPI

import commplan
import convnet
import devices
import photos

PLANS = Path(__file__).parent / "plans"
ETA, RATE = 0.05, 0.3  # the coefficient of the pull in the plans, and the learning rate of the workers
BATCH = 16


def main(argv: list[str] | None = None) -> None:
    options = _options(argv)
    jax.config.update("jax_platforms", options.device)
    comm: Any = MPI.COMM_WORLD
    began = time.perf_counter()
    shapes = jax.eval_shape(convnet.init, jax.random.key(0))
    program = commplan.load(PLANS / f"easgd_{options.mode}.plan").compile(comm, shapes={"params": shapes})
    run = program.bind(comm)
    served = run.serve()
    if served is not None:  # this rank has the center, and every worker has left
        print(served, flush=True)
        return

    worker, workers = run.place["worker"], run.context.sizes["worker"]
    params = convnet.init(jax.random.key(options.seed + worker))
    state = run.init()
    _, state = run.start(state, params=params)
    own_eta = {"eta": np.float32(ETA)} if options.mode == "sync" else {}

    @jax.jit
    @run.spmd(params="params", pixels="params", labels="params", returns=("params", "params"))
    def train(state: Any, params: Any, pixels: Any, labels: Any) -> Any:
        loss, grads = jax.value_and_grad(convnet.loss)(params, pixels, labels)
        return state, jax.tree.map(stepped, params, grads), loss

    @jax.jit
    @run.spmd(params="params", pixels="params", labels="params", returns=("params", "params"))
    def train_and_average(state: Any, params: Any, pixels: Any, labels: Any) -> Any:
        out, state = run.every[4](state, params=params, **own_eta)
        loss, grads = jax.value_and_grad(convnet.loss)(params, pixels, labels)
        return state, jax.tree.map(stepped, params, grads, out.pull), loss

    pixels, labels = decoded(photos.Crops(options.records, seed=options.seed + worker))
    rng = np.random.default_rng(options.seed + worker)
    losses: list[float] = []
    for number in range(options.steps):
        chosen = rng.choice(len(labels), BATCH, replace=False)
        step = train if number % 4 else train_and_average
        state, params, loss = step(state, params, pixels[chosen], labels[chosen])
        losses.append(float(loss))
        if worker == 0 and (number + 1) % 40 == 0:
            print(f"step {number + 1}: loss {np.mean(losses[-40:]):.3f}", flush=True)

    pixels, labels = decoded(photos.Crops(256, seed=options.seed, held_out=True))
    right = float((np.asarray(convnet.logits(params, pixels)).argmax(-1) == labels).mean())
    print(f"worker {worker} of {workers}: held-out accuracy {right:.1%}", flush=True)
    run.close()
    if options.json and worker == 0:
        results = {"losses": losses, "accuracy": right, "seconds": time.perf_counter() - began}
        options.json.write_text(json.dumps(results, indent=2) + "\n")


def stepped(w: Any, g: Any, pull: Any = 0.0) -> Any:
    """A parameter after a local step of the worker and the center's pull."""
    return w - RATE * g - pull


def decoded(crops: photos.Crops) -> tuple[Any, Any]:
    """All pictures and labels of `crops`."""
    both = [photos.decode(crops[number]) for number in range(len(crops))]
    return np.stack([pixels for pixels, _ in both]), np.asarray([label for _, label in both], np.int32)


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mode", choices=("sync", "async", "round_robin", "hogwild"), default="async")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--records", type=int, default=240, help="pictures of each worker (240)")
    parser.add_argument("--seed", type=int, default=0)
    devices.add_option_of_ranks(parser)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
