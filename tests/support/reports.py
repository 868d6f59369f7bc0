"""Reports for tests: pages of the examples, as the command writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from commplan.cli import main

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
H100, RACKS = "h100_64", "two_rack"
SMALL = {"w": {"shape": [64, 64], "dtype": "f32"}, "b": {"shape": [64], "dtype": "f32"}}


def report(
    folder: Path, plan: Path | str, *flags: object, shapes: Any = None, topology: str | None = H100
) -> Path:
    """The page of `plan`, an example's name or a file. shapes: trees by name."""
    file = plan if isinstance(plan, Path) else EXAMPLES / "plans" / f"{plan}.plan"
    words: list[object] = ["report", file, "-o", folder / "report.html", *flags]
    if shapes is not None:
        written = folder / "shapes.json"
        written.write_text(json.dumps(shapes), encoding="utf-8")
        words += ["--shapes", written]
    if topology is not None:
        words += ["--topology", EXAMPLES / "topologies" / f"{topology}.toml"]
    assert main([str(word) for word in words]) == 0
    return folder / "report.html"


def document(page: Path) -> dict[str, Any]:
    """The document inside a page."""
    text = page.read_text(encoding="utf-8")
    return json.loads(text.partition('id="document">')[2].partition("</script>")[0])


# An event of Chrome's trace format.
COMPLETE = {"ph": "X", "name": "all_reduce", "cat": "network", "pid": 7, "tid": 2, "ts": 1e6, "dur": 250.0,
            "args": {"line": 16}}  # fmt: skip
EVIL = "</script><script>alert(1)</script><!-- ]]> & \u2028"


def trace(*events: dict[str, Any], wrapped: bool = True) -> str:
    return json.dumps({"traceEvents": events} if wrapped else events)


def evil(folder: Path) -> Path:
    """A page about a plan whose comments and file name, and a run whose events, would like to be markup."""
    plan = folder / "a&'<img src=x onerror=alert(1)>.plan"
    text = (EXAMPLES / "plans" / "two_level.plan").read_text(encoding="utf-8")
    plan.write_text(f"# {EVIL}\n{text}", encoding="utf-8")
    run = folder / "run.json"
    run.write_text(trace(COMPLETE | {"name": EVIL}))
    return report(folder, plan, "--trace", run, shapes={"grads": {EVIL: SMALL}})


def leaves(count: int) -> dict[str, Any]:
    return {f"layer{i}": {"shape": [64, i % 37 + 8], "dtype": "f32"} for i in range(count)}


def many_leaves(folder: Path, bucket: str) -> Path:
    """A plan that reduces a tree in buckets of size `bucket`."""
    plan = folder / "leaves.plan"
    plan.write_text(
        "plan leaves\naxis data = 8\ninput grads : tree partial data\n"
        f"each step {{\n grads = reduce grads over data by mean {{ bucket = {bucket} }}\n output grads\n}}\n"
    )
    return plan
