"""The ensemble under MPI: every replica of every member is a rank with one device.

The plan and the step are those of ensemble_training.py, bound to a communicator instead of a mesh: arrays are
local to their rank, also outside `run.spmd`. Ranks of one host share decoded records through memory, so each
decodes one eighth of them.

    mpirun -n 8 python -m mpi4py examples/ensemble_mpi.py [--epochs 12] [--seed 0] [--json RESULTS.json]

`-m mpi4py` ends all ranks if one of them fails; otherwise they would wait for it.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from mpi4py import MPI

import commplan
import convnet
import devices
import photos

PLAN = Path(__file__).parent / "plans" / "ensemble_training.plan"


def main(argv: list[str] | None = None) -> None:
    options = _options(argv)
    jax.config.update("jax_platforms", options.device)
    comm: Any = MPI.COMM_WORLD
    began = time.perf_counter()

    param_shapes = jax.eval_shape(convnet.init, jax.random.key(0))
    program = commplan.load(PLAN).compile(comm, shapes={"params": param_shapes, "grads": param_shapes})
    sources = {
        "images": photos.Crops(options.records, seed=options.seed),
        "held_out": photos.Crops(options.held_out, seed=options.seed, held_out=True),
    }
    functions = {"decode": photos.decode, "augment": photos.augment}
    run = program.bind(comm, sources=sources, functions=functions, seed=options.seed)
    members, replicas = (run.context.sizes[axis] for axis in ("member", "data"))
    member, replica = run.place["member"], run.place["data"]

    # Ranks draw different parameters; the plan's `start` keeps those of replica 0 of each member.
    keys = jax.random.split(jax.random.key(options.seed), (members, replicas))
    state = run.init()
    out, state = run.start(state, params=convnet.init(keys[member, replica]))
    params = out.params

    batches = run.batches()
    steps = options.epochs * batches.steps
    optimizer = optax.adam(optax.cosine_decay_schedule(0.008, steps, alpha=0.02))
    opt = optimizer.init(params)

    @run.jit
    @run.spmd(
        params="params",
        opt="params",
        pixels="batch",
        labels="labels",
        mask="labels",
        returns=("params", "params", "per member, data"),
    )
    def train(state: Any, params: Any, opt: Any, pixels: Any, labels: Any, mask: Any) -> Any:
        loss, grads = jax.value_and_grad(convnet.loss)(run.varying(params), pixels, labels, mask)
        out, state = run.step(state, grads=grads)
        updates, opt = optimizer.update(out.grads, opt, params)
        return state, optax.apply_updates(params, updates), opt, loss

    if comm.rank == 0:
        print(
            f"{members} members of {replicas} ranks each, {len(sources['images'])} records of "
            f"{photos.CLASSES} photographs, {steps} steps",
            flush=True,
        )
    losses: list[float] = []
    with batches:
        for epoch in range(options.epochs):
            for item in batches:
                batch = item["batch"], item["labels"], item.mask
                state, params, opt, loss = train(state, params, opt, *batch)
                losses.append(float(loss))
            mean = comm.allreduce(np.mean(losses[-batches.steps :])) / comm.size
            if comm.rank == 0:
                print(f"epoch {epoch + 1}: loss {mean:.3f}, {time.perf_counter() - began:.0f} s", flush=True)
        usage = batches.summary()

    accuracies, ensemble = evaluate(run, comm, params)
    decoded = next(line.records for line in usage.lines if line.what == "map decode")
    rows = comm.gather(
        {**run.place, "losses": losses, "decoded": decoded, "norm": float(optax.tree.norm(params))}
    )
    if comm.rank:
        return
    results = {
        "ranks": rows,
        "members": accuracies,
        "ensemble": ensemble,
        "seconds": time.perf_counter() - began,
    }
    total = options.records * options.epochs
    print(f"each rank decoded {decoded / total:.1%} of the {total} records that each member saw")
    each = ", ".join(f"member {m} {accuracy:.1%}" for m, accuracy in enumerate(accuracies))
    print(f"held-out accuracy: {each}, averaged ensemble {ensemble:.1%}")
    print(f"total: {results['seconds']:.0f} s")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


def evaluate(run: Any, comm: Any, params: Any) -> tuple[list[float], float]:
    """Accuracy of each member and of their averaged probabilities, over the valid held-out records."""

    @jax.jit
    @run.spmd(params="params", pixels="pixels", returns=("per member split data",))
    def predict(state: Any, params: Any, pixels: Any) -> Any:
        return state, jax.nn.softmax(convnet.logits(params, pixels))

    members = comm.Split(run.place["data"], run.place["member"])  # the same records in all members
    right, right_together, count = np.zeros(members.size), 0, 0
    with run.batches("evaluate") as batches:
        for item in batches:
            _, out = predict(run.init(), params, item["pixels"])
            every = np.stack(members.allgather(np.asarray(out)))  # [member, record, class]
            valid = int(item["valid"])  # the rank's cut is padded at its end
            labels = np.asarray(item["labels"])[:valid]
            right += (every[:, :valid].argmax(-1) == labels).sum(-1)
            right_together += int((every.mean(0)[:valid].argmax(-1) == labels).sum())
            count += valid
    members.Free()
    right, right_together, count = (comm.allreduce(term) for term in (right, right_together, count))
    return (right / count).tolist(), right_together / count


def _options(argv: list[str] | None) -> Any:
    parser = argparse.ArgumentParser(description="Train the ensemble of ensemble_training.plan under mpirun.")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--records", type=int, default=2048, help="training records, a multiple of 64")
    parser.add_argument("--held-out", type=int, default=1000, help="held-out records")
    parser.add_argument("--seed", type=int, default=0)
    devices.add_option_of_ranks(parser)
    parser.add_argument("--json", type=Path, help="write the results here, too")
    options = parser.parse_args(argv)
    if options.records % 64:
        parser.error("--records must be a multiple of 64, the plan's batch")
    return options


if __name__ == "__main__":
    main()
