"""The ensemble under jax.distributed: one process per member, decoded pixels shared between them.

The plan is that of ensemble_training.py, with one process per member, as on a cluster. Processes of one host
share decoded records through memory: each decodes its part, and all read the whole. For comparison the same
training runs again with every process decoding everything. Without arguments this file launches the
processes, on the loopback interface, and ends them.

    python examples/ensemble_processes.py [--epochs 2] [--records 512] [--json RESULTS.json]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import commplan
import convnet
import devices
import measure
import photos

PLAN = Path(__file__).parent / "plans" / "ensemble_training.plan"
MEMBERS, REPLICAS = 2, 4
RESULT = "result: "  # the prefix of a member's last line


def main(argv: list[str] | None = None) -> None:
    options = _options(argv)
    if options.member is not None:
        member(options)
        return
    results = launch(options)
    total = options.records * options.epochs
    for design in ("shared", "duplicated"):
        print(f"{design}: {total} records for each of {MEMBERS} members")
        for number, result in enumerate(results):
            row = result[design]
            print(
                f"  member {number} decoded {row['decoded']} of them ({row['decoded'] / total:.0%}), "
                f"CPU {row['cpu_ms']:.3f} ms per record"
            )
    same = all(result["shared"]["losses"] == result["duplicated"]["losses"] for result in results)
    print(f"the losses of both designs are {'the same to the last bit' if same else 'DIFFERENT'}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


def launch(options: Any) -> list[dict[str, Any]]:
    """Run every member in a separate process and return their results. If one fails, end the others."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, *_warnings(), __file__, "--port", str(port)]
    for name in ("epochs", "records", "seed", "device"):
        command += [f"--{name}", str(getattr(options, name))]
    started: list[subprocess.Popen[str]] = []
    results: list[dict[str, Any]] = [{} for _ in range(MEMBERS)]
    closed = threading.Event()
    try:
        for number in range(MEMBERS):
            process = subprocess.Popen([*command, "--member", str(number)], stdout=subprocess.PIPE, text=True)
            started.append(process)
        readers = [
            threading.Thread(
                target=_relay, args=(number, process.stdout, results[number], closed), daemon=True
            )
            for number, process in enumerate(started)
        ]
        for reader in readers:
            reader.start()
        _until_all_end(started, closed)
        for reader in readers:
            reader.join()
    finally:
        for process in reversed(started):  # the first one coordinates: others would report its end
            process.kill()
        for process in started:
            process.wait()
            if process.stdout:
                process.stdout.close()
    return results


def member(options: Any) -> None:
    """One process: its member's four devices, its part of the decoding."""
    own_gpus = None
    if options.device == "gpu":
        own_gpus = list(range(options.member * REPLICAS, (options.member + 1) * REPLICAS))
    else:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", REPLICAS)
    jax.distributed.initialize(f"localhost:{options.port}", MEMBERS, options.member, own_gpus)
    mesh = jax.make_mesh((MEMBERS, REPLICAS), ("member", "data"))
    jax.set_mesh(mesh)
    params = jax.eval_shape(convnet.init, jax.random.key(0))
    shapes = {"params": params, "grads": params}
    crops = photos.Crops(options.records, seed=options.seed)
    results: dict[str, Any] = {}
    for design, how in (("shared", "all_shared"), ("duplicated", "duplicate")):
        program = commplan.load(PLAN).compile(mesh, shapes=shapes, passes=measure.PIPELINE.format(design=how))
        run = program.bind(
            mesh,
            sources={"images": crops, "held_out": crops},
            functions={"decode": photos.decode, "augment": photos.augment},
            seed=options.seed,
        )
        losses, usage = train(run, mesh, options)
        work = {line.what: line for line in usage.lines}
        records = options.records * options.epochs
        results[design] = {
            "losses": losses,
            "decoded": work["map decode"].records,
            "cpu_ms": 1e3 * usage.cpu_s / records,
        }
        print(f"{design}: loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps", flush=True)
    print(RESULT + json.dumps(results), flush=True)
    jax.distributed.shutdown()


def train(run: Any, mesh: Any, options: Any) -> tuple[list[float], Any]:
    """Train this process's member; returns its losses and the costs of its input."""
    over = NamedSharding(mesh, PartitionSpec("member", "data"))

    def draw() -> Any:
        keys = jax.random.split(jax.random.key(options.seed), (MEMBERS, REPLICAS))
        return jax.vmap(jax.vmap(convnet.init))(keys)

    out, state = run.start(run.init(), params=jax.jit(draw, out_shardings=over)())
    params = out.params
    optimizer = optax.adam(0.003)
    opt = jax.jit(jax.vmap(optimizer.init))(params)

    @run.jit
    @run.spmd(
        params="params",
        opt="params",
        pixels="batch",
        labels="labels",
        mask="labels",
        returns=("params", "params", "per member, data"),
    )
    def step(state: Any, params: Any, opt: Any, pixels: Any, labels: Any, mask: Any) -> Any:
        loss, grads = jax.value_and_grad(convnet.loss)(run.varying(params), pixels, labels, mask)
        out, state = run.step(state, grads=grads)
        updates, opt = optimizer.update(out.grads, opt, params)
        return state, optax.apply_updates(params, updates), opt, loss

    losses: list[float] = []
    with run.batches() as batches:
        for _ in range(options.epochs):
            for item in batches:
                batch = item["batch"], item["labels"], item.mask
                state, params, opt, loss = step(state, params, opt, *batch)
                losses.append(float(np.mean([shard.data for shard in loss.addressable_shards])))
        return losses, batches.summary()


def _until_all_end(started: list[subprocess.Popen[str]], closed: threading.Event) -> None:
    """Wait for all processes; stop at the first failure, or when `closed` is set: the output is closed."""
    waiting = list(enumerate(started))
    while waiting:
        if closed.is_set():
            raise BrokenPipeError
        for number, process in list(waiting):
            try:
                code = process.wait(timeout=0.1)
            except subprocess.TimeoutExpired:
                continue
            if code:
                sys.exit(f"the process of member {number} ended with status {code}; the others are ended too")
            waiting.remove((number, process))


def _relay(number: int, lines: IO[str] | None, result: dict[str, Any], closed: threading.Event) -> None:
    """Print a member's lines with its number, and keep its result. Sets `closed` if the output is."""
    try:
        for line in lines or ():
            if line.startswith(RESULT):
                result.update(json.loads(line.removeprefix(RESULT)))
            elif "peer ranks" not in line:  # Gloo's message about its connections
                print(f"member {number} | {line}", end="", flush=True)
    except BrokenPipeError:
        closed.set()


def _warnings() -> list[str]:
    """This interpreter's -W options, for the processes that it starts."""
    return [word for option in sys.warnoptions for word in ("-W", option)]


def _options(argv: list[str] | None) -> Any:
    parser = argparse.ArgumentParser(description="Train the ensemble with one process per member.")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--records", type=int, default=512, help="training records, a multiple of 64")
    parser.add_argument("--seed", type=int, default=0)
    summary = f"gpu needs {REPLICAS} GPUs for each of {MEMBERS} processes (default: cpu)"
    devices.add_option(parser, summary, "cpu")
    parser.add_argument("--json", type=Path, help="write the results here, too")
    parser.add_argument("--member", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.records % 64:
        parser.error("--records must be a multiple of 64, the plan's batch")
    return options


if __name__ == "__main__":
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # such as `| head`: nothing more is written, at exit neither
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)  # 128 + SIGPIPE, as a shell says it
