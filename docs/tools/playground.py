"""The files that the playground serves: Python, commplan, samples, the report's scripts."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import assumed
import msgspec
import vendor

import commplan
from commplan.cost import Predictor, predict
from commplan.dsl.check.clauses.ops import OPS
from commplan.dsl.check.clauses.via import ALGORITHMS
from commplan.dsl.check.stages.loads import TAILS, VISITS
from commplan.dsl.check.stages.servers import MODES
from commplan.dsl.check.types import FLAGS, PLACES, TYPES
from commplan.dsl.lexer import KEYWORDS
from commplan.explain.stages import phase_title
from commplan.report import page
from commplan.report.timeline import phases
from commplan.topology import load_topology

ROOT = vendor.ROOT
SCRIPTS = tuple(name for name in page.SCRIPTS if name != "main.js")
# Modules that the checker, the passes and the explanation do not import.
LEFT_OUT = (
    "runtime/", "cli/", "pages/", "lowering/jax/", "lowering/mpi/", "report/assets/",
)  # fmt: skip
VALUES = (TYPES, ALGORITHMS, OPS, MODES, VISITS, TAILS, FLAGS, PLACES)


class Sample(NamedTuple):
    """A plan of `examples/plans`, and what its timeline is made with."""

    name: str
    topology: str
    shapes: str = ""


SAMPLES = (
    Sample("data_parallel", "h100_64", "data_parallel"),
    Sample("two_level", "h100_64"),
    Sample("sharded_update", "h100_64"),
    Sample("ensemble_training", "h100_64"),
    Sample("weighted_mean", "h100_64"),
    Sample("pipeline", "h100_64"),
    Sample("mixture_of_experts", "h100_64"),
    Sample("easgd_sync", "two_rack"),
    Sample("parameter_hub", "two_rack"),
)


def install(site: Path) -> None:
    """Puts all of it into the folder `playground` of the built site."""
    place = site / "playground"
    python = place / "python"
    vendor.copy(vendor.PYODIDE, python)
    (python / "wheels.json").write_text(json.dumps(vendor.copy_wheels(python)), encoding="utf-8")
    _sources(place / "sources.zip", ROOT / "docs" / "playground")
    _report(place / "report")
    values = sorted({word for words in VALUES for word in words})
    words = {"keywords": sorted(KEYWORDS), "values": values}
    samples = {"words": words, "plans": [_sample(sample) for sample in SAMPLES]}
    (place / "samples.json").write_bytes(msgspec.json.encode(samples))


def _sources(archive: Path, own: Path) -> None:
    """Archive commplan without the parts for JAX and MPI, the playground's code and the stub for NumPy."""
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        for room in ("", "dsl/", "lowering/"):
            folder = (ROOT / "commplan" / room).resolve()
            for file in sorted(folder.rglob("*")):
                name = f"{room}{file.relative_to(folder)}"
                if file.suffix in (".py", ".json", ".toml") and not name.startswith(LEFT_OUT):
                    packed.write(file, f"commplan/{name}")
        for name in ("look.py", "assumed.py"):
            packed.write(own / name, name)
        for file in sorted((own / "missing" / "numpy").glob("*.py")):
            packed.write(file, f"numpy/{file.name}")


def _report(place: Path) -> None:
    """The scripts as they are, the rules for the inside of a view, the colors for the whole page."""
    place.mkdir(exist_ok=True)
    for name in SCRIPTS:
        (place / name).write_bytes((page.ASSETS / name).read_bytes())
    sheets = [(page.ASSETS / name).read_text(encoding="utf-8") for name in page.STYLES]
    light, dark = (_block(sheets[0], head) for head in (":root {", ':root[data-theme="dark"] {'))
    colors = f"body {{{light}}}\nbody[data-md-color-scheme=slate] {{{dark}}}\n"
    tooltip = "".join(re.findall(r"^\.(?:tooltip|tip-)[^{]*\{[^}]*\}\n", sheets[0], re.M))
    sheets[0] = sheets[0][sheets[0].index("code,\n.code {") :]
    rules = "\n".join(sheets)
    (place / "report.css").write_text(f"{colors}{tooltip}.playground-view {{\n{rules}}}\n", encoding="utf-8")


def _block(text: str, head: str) -> str:
    start = text.index(head) + len(head)
    return text[start : text.index("}", start)]


def _sample(sample: Sample) -> dict[str, Any]:
    """The text of a sample, its options, and its timeline on a machine."""
    text = (ROOT / "examples" / "plans" / f"{sample.name}.plan").read_text(encoding="utf-8")
    plan = commplan.loads(text, f"{sample.name}.plan")
    shapes = assumed.shapes(plan.graph)
    if sample.shapes:
        shapes = json.loads(
            (ROOT / "examples" / "shapes" / f"{sample.shapes}.json").read_text(encoding="utf-8")
        )
    topology = load_topology(ROOT / "examples" / "topologies" / f"{sample.topology}.toml")
    schedule = plan.compile(shapes=shapes, topology=topology).schedule
    prediction = predict(schedule, Predictor(topology, schedule.axes, backend=schedule.backend))
    titles = {phase.name: phase_title(phase) for phase in plan.graph.phases}
    timed = phases(prediction.phases, titles)
    lines = tuple(enumerate(text.splitlines(), 1))
    return {
        "name": sample.name,
        "text": text,
        "shapes": shapes,
        "digest": plan.digest,
        "machine": topology.name,
        "report": {"phases": timed, "unknown": prediction.unknown, "source": {"lines": lines}},
    }
