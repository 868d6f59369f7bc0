"""What the playground serves beside its own files: Python, commplan's sources, samples, the report's scripts."""

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
from commplan.cost import Predictor, simulate
from commplan.dsl.check.loads import TAILS, VISITS
from commplan.dsl.check.ops import OPS
from commplan.dsl.check.servers import MODES
from commplan.dsl.check.types import FLAGS, PLACES, TYPES
from commplan.dsl.check.via import ALGORITHMS
from commplan.dsl.lexer import KEYWORDS
from commplan.explain.stages import phase_title
from commplan.report.page import ASSETS
from commplan.report.timeline import phases
from commplan.topology import load_topology

ROOT = vendor.ROOT
SCRIPTS = (
    "dom.js", "layers.js", "graph.js", "timeline.js", "machine.js", "parts.js", "panels.js", "run.js", "reasons.js"
)  # fmt: skip
# What the checker, the passes and the explanation do not import.
LEFT_OUT = (
    "runtime/",
    "cli/",
    "pages/",
    "lowering/jax/",
    "lowering/mpi/",
    "lowering/oracle/",
    "report/assets/",
)
SHOWN = 120_000  # characters of a timeline, for a page that opens at once


class Sample(NamedTuple):
    """A plan of `examples/plans`, and what its timeline is computed with. costs: seconds of functions, by name."""

    name: str
    topology: str
    shapes: str = ""
    costs: tuple[tuple[str, float], ...] = ()


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
    words = {
        "keywords": sorted(KEYWORDS),
        "values": sorted({*TYPES, *ALGORITHMS, *OPS, *MODES, *VISITS, *TAILS, *FLAGS, *PLACES}),
    }
    samples = {"words": words, "plans": [_sample(sample) for sample in SAMPLES]}
    (place / "samples.json").write_bytes(msgspec.json.encode(samples))


def _sources(archive: Path, own: Path) -> None:
    """commplan without the parts that need JAX or MPI, what the page asks of it, and the stand-in for NumPy."""
    package = ROOT / "commplan"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        for folder in (package, *(package / link for link in ("dsl", "lowering"))):
            for file in sorted(folder.resolve().rglob("*")):
                name = f"{folder.relative_to(package)}/{file.relative_to(folder.resolve())}".removeprefix(
                    "./"
                )
                if file.suffix in (".py", ".lark") and not name.startswith(LEFT_OUT):
                    packed.write(file, f"commplan/{name}")
        for name in ("look.py", "assumed.py"):
            packed.write(own / name, name)
        for file in sorted((own / "missing" / "numpy").glob("*.py")):
            packed.write(file, f"numpy/{file.name}")


def _report(place: Path) -> None:
    """The report's scripts as they are; its rules for what is inside of a view, its colours for the whole page."""
    place.mkdir(exist_ok=True)
    for name in SCRIPTS:
        (place / name).write_bytes((ASSETS / name).read_bytes())
    frame, *parts = (
        (ASSETS / name).read_text(encoding="utf-8") for name in ("page.css", "panels.css", "components.css")
    )
    light, dark = (_block(frame, head) for head in (":root {", ':root[data-theme="dark"] {'))
    tooltip = "".join(re.findall(r"^\.ti?o?o?l?t?i?p[\w-]*[^{]*\{[^}]*\}\n", frame, re.M))
    rules = "\n".join([frame[frame.index("code,\n.code {") :], *parts])
    text = f"body {{{light}}}\nbody[data-md-color-scheme=slate] {{{dark}}}\n{tooltip}.playground-view {{\n{rules}}}\n"
    (place / "report.css").write_text(text, encoding="utf-8")


def _block(text: str, head: str) -> str:
    start = text.index(head) + len(head)
    return text[start : text.index("}", start)]


def _sample(sample: Sample) -> dict[str, Any]:
    """The text, what it is compiled with, and its timeline on a machine."""
    text = (ROOT / "examples" / "plans" / f"{sample.name}.plan").read_text(encoding="utf-8")
    plan = commplan.loads(text, f"{sample.name}.plan")
    shapes = assumed.shapes(plan.graph)
    if sample.shapes:
        shapes = json.loads(
            (ROOT / "examples" / "shapes" / f"{sample.shapes}.json").read_text(encoding="utf-8")
        )
    topology = load_topology(ROOT / "examples" / "topologies" / f"{sample.topology}.toml")
    schedule = plan.compile(shapes=shapes, topology=topology).schedule
    simulation = simulate(
        schedule, Predictor(topology, schedule.axes, backend=schedule.backend), sample.costs
    )
    titles = {phase.name: phase_title(phase) for phase in plan.graph.phases}
    timed = phases(simulation.phases, titles)
    lines = tuple(enumerate(text.splitlines(), 1))
    return {
        "name": sample.name,
        "text": text,
        "given": {"shapes": shapes},
        "digest": plan.digest,
        "machine": topology.name,
        "report": {"phases": timed, "unknown": simulation.unknown, "source": {"lines": lines}},
    }
