"""The pictures of reports in the manual: three plans and runs, drawn by Chromium.

PYTHONPATH=.:tests python docs/tools/report_pictures.py docs/images
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from support import mpirun
from support.chromium import Browser, browser

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "examples"
ENSEMBLE = EXAMPLES / "plans" / "ensemble_training.plan"
RANKS_PLAN = """# Four ranks of a data-parallel step.
plan data_parallel

axis data = 4

input params : tree per data
input grads  : tree partial data

at start {
    params = broadcast params over data from 0
    output params
}

each step {
    grads = reduce grads over data by mean via ring { bucket = 2 MiB, overlap = backward }
    output grads
}
"""
LEAVES = {f"layer{number}": [512, 1024] for number in range(4)}
RANKS_PROGRAM = """
import random, sys, time
import jax, numpy as np
from mpi4py import MPI
import commplan
comm = MPI.COMM_WORLD
tree = {f"layer{number}": np.ones((512, 1024), np.float32) for number in range(4)}
shapes = {name: jax.eval_shape(lambda: tree) for name in ("params", "grads")}
run = commplan.load(sys.argv[1]).compile(comm, shapes=shapes).bind(comm)
out, state = run.start(run.init(), params=tree)
step = run.jit(lambda state, grads: run.step(state, grads=grads))
draws = random.Random(comm.rank)
for _ in range(40):
    time.sleep(draws.uniform(0, 0.02))
    out, state = step(state, tree)
    jax.block_until_ready(out)
"""
EIGHT_DEVICES = """name = "eight"

[[level]]
name      = "device"
count     = 8
latency   = "5us"
bandwidth = "80Gbit/s"
"""
LINE = ".code-line[data-line='{}']"


def main(images: str) -> None:
    """Write `report_*`, `run_*` and `demo_light` into the folder `images`."""
    with tempfile.TemporaryDirectory() as name:
        folder, pictures = Path(name), Path(images).resolve()
        with browser(folder / "profile") as tab:
            _ensemble(tab, folder, pictures)
            _ranks(tab, folder, pictures)
            _demo(tab, folder, pictures)
    for name in ("report_light", "report_dark", "run_light", "run_dark", "demo_light"):
        picture = pictures / f"{name}.png"
        Image.open(picture).convert("RGB").quantize(256).save(picture, optimize=True)


def _ensemble(tab: Browser, folder: Path, pictures: Path) -> None:
    tree = {f"layer{number}": {"shape": [1024, 1536], "dtype": "f32"} for number in range(8)}
    page = _report(folder, ENSEMBLE, {"params": tree, "grads": tree}, "h100_64.toml")
    tab.open(page, 1400, 1000)
    tab.click(LINE.format(26))
    _scroll(tab, "#plan")
    tab.screenshot(pictures / "report_light.png")
    tab.open(page, 1400, 900, dark=True)
    tab.click(LINE.format(26))
    _scroll(tab, "#time")
    _point(tab, ".bar.active")
    tab.screenshot(pictures / "report_dark.png")


def _ranks(tab: Browser, folder: Path, pictures: Path) -> None:
    plan, records = folder / "data_parallel.plan", folder / "ranks"
    plan.write_text(RANKS_PLAN, encoding="utf-8")
    environment = {**mpirun.environment(), "COMMPLAN_RECORDS": str(records), "COMMPLAN_KEEP_RECORDS": "1"}
    subprocess.run(mpirun.command(4, RANKS_PROGRAM, plan, forked=False), check=True, env=environment)
    tree = {leaf: {"shape": shape, "dtype": "f32"} for leaf, shape in LEAVES.items()}
    flags = ("--backend", "mpi", "--records", str(records))
    page = _report(folder, plan, {"params": tree, "grads": tree}, "laptop.toml", *flags)
    tab.open(page, 1280, 860)
    _scroll(tab, "#time")
    tab.screenshot(pictures / "run_light.png")
    tab.open(page, 1280, 420, dark=True)
    _scroll(tab, "[aria-label^='collectives of the run']", above=150)
    tab.screenshot(pictures / "run_dark.png")


def _demo(tab: Browser, folder: Path, pictures: Path) -> None:
    records, topology = folder / "demo", folder / "eight.toml"
    topology.write_text(EIGHT_DEVICES, encoding="utf-8")
    environment = {**os.environ, "COMMPLAN_RECORDS": str(records), "COMMPLAN_KEEP_RECORDS": "1"}
    subprocess.run(
        [sys.executable, EXAMPLES / "ensemble_training.py", "--epochs", "2"], check=True, env=environment
    )
    shapes = {name: _convnet() for name in ("params", "grads")}
    page = _report(folder, ENSEMBLE, shapes, topology, "--records", str(records))
    tab.open(page, 1400, 810)
    _scroll(tab, "#time")
    tab.screenshot(pictures / "demo_light.png")


def _convnet() -> dict[str, object]:
    """The shapes of the parameters of `examples/convnet.py`, as JSON."""
    code = "import convnet, jax, json; print(json.dumps(jax.tree.map(lambda x: {'shape': x.shape, 'dtype': "
    code += "'f32'}, jax.eval_shape(convnet.init, jax.random.key(0)))))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=EXAMPLES)
    return json.loads(done.stdout)


def _report(folder: Path, plan: Path, shapes: object, topology: str | Path, *flags: str) -> Path:
    (folder / "shapes.json").write_text(json.dumps(shapes), encoding="utf-8")
    page, machine = folder / "report.html", EXAMPLES / "topologies" / topology
    place = ROOT if plan.is_relative_to(ROOT) else folder
    command = [sys.executable, "-m", "commplan.cli", "report", str(plan.relative_to(place)), "-o", str(page)]
    command += ["--shapes", str(folder / "shapes.json"), "--topology", str(machine), *flags]
    subprocess.run(command, check=True, cwd=place)
    return page


def _scroll(tab: Browser, selector: str, above: int = 62) -> None:
    """Scroll until `selector` is `above` pixels below the top, and wait until it is drawn."""
    tab.run(
        f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
        f" window.scrollTo(0, e.getBoundingClientRect().top + window.scrollY - {above}); }})()"
    )
    tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=2, y=2)
    tab.run("new Promise((done) => setTimeout(done, 200))")


def _point(tab: Browser, selector: str) -> None:
    """Move the mouse to the widest element that matches `selector`, without scrolling."""
    x, y = tab.run(
        f"(() => {{ const boxes = [...document.querySelectorAll({json.dumps(selector)})]"
        ".map((e) => e.getBoundingClientRect()).sort((a, b) => b.width - a.width);"
        " return [boxes[0].left + boxes[0].width / 2, boxes[0].top + boxes[0].height / 2]; })()"
    )
    tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    tab.run("new Promise((done) => setTimeout(done, 300))")


if __name__ == "__main__":
    main(sys.argv[1])
