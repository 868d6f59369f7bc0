"""Train an ensemble of two data-parallel networks on one shared input pipeline.

The plan is plans/ensemble_training.plan: two members, each data-parallel over four CPU devices, eight devices
in all, in one process. Records are read and decoded once for both members; each member augments them
separately. A final table shows the savings of the plan and the cost of communication.

    python examples/ensemble_training.py [--epochs 12] [--seed 0] [--json RESULTS.json]
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
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import commplan
import convnet
import devices
import measure
import photos

PLAN = Path(__file__).parent / "plans" / "ensemble_training.plan"
MEMBERS, REPLICAS = 2, 4


def main(argv: list[str] | None = None) -> None:
    options = _options(argv)
    chosen = devices.choose(options.device, MEMBERS * REPLICAS)
    console = Console()
    began = time.perf_counter()

    mesh = jax.make_mesh((MEMBERS, REPLICAS), ("member", "data"), devices=chosen)
    jax.set_mesh(mesh)
    param_shapes = jax.eval_shape(convnet.init, jax.random.key(0))
    shapes = {"params": param_shapes, "grads": param_shapes}
    program = commplan.load(PLAN).compile(mesh, shapes=shapes)
    sources = {
        "images": photos.Crops(options.records, seed=options.seed),
        "held_out": photos.Crops(options.held_out, seed=options.seed, held_out=True),
    }
    functions = {"decode": photos.decode, "augment": photos.augment}
    run = program.bind(mesh, sources=sources, functions=functions, seed=options.seed)

    # Replicas draw different parameters; the plan's `start` keeps those of replica 0 of each member.
    keys = jax.random.split(jax.random.key(options.seed), (MEMBERS, REPLICAS))
    state = run.init()
    out, state = run.start(state, params=jax.vmap(jax.vmap(convnet.init))(keys))
    params = out.params

    batches = run.batches()
    steps = options.epochs * batches.steps
    optimizer = optax.adam(optax.cosine_decay_schedule(0.008, steps, alpha=0.02))
    opt = jax.vmap(optimizer.init)(params)

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

    console.print(
        f"{MEMBERS} members on {REPLICAS} {chosen[0].platform.upper()} devices each,"
        f" {len(sources['images'])} records of "
        f"{photos.CLASSES} photographs, {steps} steps"
    )
    losses: list[float] = []
    with batches, _progress(console) as progress:
        bar = progress.add_task("training", total=steps, loss="")
        for epoch in range(options.epochs):
            for item in batches:
                state, params, opt, loss = train(state, params, opt, item["batch"], item["labels"], item.mask)
                losses.append(float(loss.mean()))
                progress.update(bar, advance=1, loss=f"loss {losses[-1]:.3f}")
            mean = float(np.mean(losses[-batches.steps :]))
            progress.console.print(f"epoch {epoch + 1}: loss {mean:.3f}, {time.perf_counter() - began:.0f} s")
        usage = batches.summary()

    members, ensemble = evaluate(run, params)
    console.print(
        "held-out accuracy: "
        + ", ".join(f"member {m} {accuracy:.1%}" for m, accuracy in enumerate(members))
        + f", averaged ensemble {ensemble:.1%}"
    )
    item = next(iter(run.batches()))
    arguments = (state, params, opt, item["batch"], item["labels"], item.mask)
    share = measure.communication(run, train, arguments, params, rounds=options.rounds)
    some = sources["images"][: 64 * options.measured]
    results = {
        "losses": losses,
        "members": members,
        "ensemble": ensemble,
        "input": measure.inputs(PLAN, mesh, shapes, sources | {"images": some}, functions),
        "collectives": measure.collectives(program),
        "communication": share,
        "input_while_training": {
            "cpu_ms_per_record_and_member": 1e3 * usage.cpu_s / (usage.batches * 64 * MEMBERS),
            "waited_s": usage.wait_s,
        },
        "seconds": time.perf_counter() - began,
    }
    report(console, results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


def evaluate(run: Any, params: Any) -> tuple[list[float], float]:
    """Accuracy of each member and of their averaged probabilities, over the valid held-out records."""

    @jax.jit
    @run.spmd(params="params", pixels="pixels", returns=("per member split data",))
    def predict(state: Any, params: Any, pixels: Any) -> Any:
        return state, jax.nn.softmax(convnet.logits(params, pixels))

    right, right_together, count = np.zeros(MEMBERS), 0.0, 0
    with run.batches("evaluate") as batches:
        for item in batches:
            _, out = predict(run.init(), params, item["pixels"])
            probabilities = np.asarray(out)  # [member, record, class]
            labels, counts = np.asarray(item["labels"]), np.asarray(item.mask)
            right += ((probabilities.argmax(-1) == labels) & counts).sum(-1)
            right_together += ((probabilities.mean(0).argmax(-1) == labels) & counts).sum()
            count += int(counts.sum())
    return (right / count).tolist(), float(right_together / count)


def report(console: Console, results: dict[str, Any]) -> None:
    table = Table(title="input: CPU time per record and member (read, decode, augment)")
    table.add_column("design")
    table.add_column("CPU ms", justify="right")
    table.add_column("decoded per step", justify="right")
    for design, row in results["input"].items():
        table.add_row(design, f"{row['cpu_ms']:.3f}", f"{row['decoded_per_step']:.0f}")
    console.print(table)

    table = Table(title="collectives, per device and call of the phase")
    for column in ("phase", "plan line", "collective", "over"):
        table.add_column(column)
    table.add_column("bytes", justify="right")
    for row in results["collectives"]:
        table.add_row(row["phase"], str(row["line"]), row["kind"], row["over"], f"{row['nbytes']:,}")
    console.print(table)

    share = results["communication"]
    console.print(
        f"communication: {share['share']:.1%} of the step (the step takes {share['step_ms']:.1f} ms, its "
        f"reduction alone {share['phase_ms']:.2f} ms; medians of {share['rounds']} runs, taken in turn)"
    )
    console.print(f"total: {results['seconds']:.0f} s")


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console)


def _options(argv: list[str] | None) -> Any:
    parser = argparse.ArgumentParser(description="Train the ensemble of ensemble_training.plan.")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--records", type=int, default=2048, help="training records")
    parser.add_argument("--held-out", type=int, default=1000, help="held-out records")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--measured", type=int, default=12, help="batches of each design to measure")
    parser.add_argument("--rounds", type=int, default=15, help="timed runs of the step and of its reduction")
    parser.add_argument("--json", type=Path, help="write the results here, too")
    devices.add_option(parser)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
