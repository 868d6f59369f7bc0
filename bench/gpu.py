"""All that a machine with GPUs must confirm, in one command and under ten minutes.

    python -m bench.gpu [--parts smoke,tax] [--seconds 540] [--wheels DIR] [--out FILE.json]

Parts, each in a process of its own, so that what breaks one leaves the others alone:

- `smoke`: flax, optax, orbax and torch around a plan.
- `tax`: what a plan costs a step; on several GPUs also what is exposed of the communication.
- `packing`: buckets, against the memory's bandwidth.
- `feeding`: batches to the device, against the bus, with and without a step.
- `calibration`: links and collectives between several devices, as `commplan calibrate` measures them.
- `ensemble`: 1 to 8 members as processes on one device, input shared, each for itself, and by TensorSocket
  where it is installed; with as many numbers of members as there is time for.

Beside JAX commplan needs lark and msgspec. Where a machine has neither them nor a network, put their wheels
into a folder that --wheels names, by default `wheels`: they are unpacked for as long as this runs.

Without a GPU everything runs small, on CPU devices, to show that it does run; the times then mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("machine", "smoke", "tax", "packing", "feeding", "calibration", "ensemble")
MOST_S = {"machine": 60, "smoke": 120, "tax": 180, "packing": 90, "feeding": 120, "calibration": 120}
RESULT = "result: "
LEAST_S = 20.0  # a part is not begun with less time left


def main(argv: list[str] | None = None) -> int:
    options = _options(argv)
    if options.part:
        _report(measured(options.part, options.rounds, options.seconds))
        return 0
    results: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(_paths(options.wheels, stack))}
        end = time.monotonic() + options.seconds
        for part in options.parts:
            left = end - time.monotonic()
            print(f"== {part}", flush=True)
            if left < LEAST_S and part != "machine":
                results[part] = {"failed": "no time was left"}
            else:
                most = min(left, MOST_S.get(part, left))
                results[part] = _apart(part, most, options.rounds, environment)
            for line in results[part].get("lines", [f"not measured: {results[part].get('failed')}"]):
                print(f"   {line}", flush=True)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    failed = [part for part, result in results.items() if "failed" in result]
    print(
        f"{len(results) - len(failed)} parts measured" + (f", without {', '.join(failed)}" if failed else "")
    )
    return 1 if failed else 0


def measured(part: str, rounds: int, seconds: float) -> dict[str, Any]:
    """What a part finds, in this process."""
    from bench.on_gpu.timing import scale_of  # noqa: PLC0415  the launching process never starts JAX

    scale = scale_of(rounds)
    if part == "machine":
        return machine(scale)
    if part == "calibration":
        return calibration(scale, seconds)
    if part == "ensemble":
        from bench.on_gpu import ensemble  # noqa: PLC0415

        return ensemble.measure(scale, _report)
    module: Any = importlib.import_module(f"bench.on_gpu.{part}")
    return module.measure(scale)


def machine(scale: Any) -> dict[str, Any]:
    import commplan  # noqa: PLC0415
    from commplan.lowering.jax.typing_shim import jax  # noqa: PLC0415

    devices = jax.devices()
    versions = f"Python {sys.version.split()[0]}, jax {jax.__version__}, commplan {commplan.__version__}"
    kind = f"{devices[0].device_kind} ({devices[0].platform})"
    lines = [f"{len(devices)} x {kind}, {os.cpu_count()} cores, {versions}"]
    if scale.small:
        lines.append("no GPU: all runs small on CPU devices, to show that it runs; the times mean nothing")
    return {"lines": lines, "small": scale.small}


def calibration(scale: Any, seconds: float) -> dict[str, Any]:
    """What `commplan calibrate` writes for the devices of this process."""
    from commplan.cli import main as command  # noqa: PLC0415
    from commplan.lowering.jax.typing_shim import jax  # noqa: PLC0415

    if jax.device_count() == 1:
        return {"lines": ["one device: there is nothing to measure between"]}
    with tempfile.TemporaryDirectory(prefix="commplan-bench-") as folder:
        path = Path(folder) / "calibration.json"
        budget = max(1, int(min(seconds - LEAST_S, scale.pick(1, 90))))
        largest = scale.pick(2**12, 2**26)
        words = ["calibrate", "--backend", "jax", "--seconds", str(budget), "--largest", str(largest)]
        with contextlib.redirect_stdout(sys.stderr):
            code = command([*words, "-o", str(path)])
        if code:
            raise SystemExit(f"commplan calibrate ended with status {code}")
        text = path.read_text()
    from commplan.cost.calibration import parse_calibration  # noqa: PLC0415

    calibration = parse_calibration(text)
    lines = [
        f"{x.name}: latency {x.latency * 1e6:.1f} us, {x.bandwidth / 1e9:.2f} GB/s"
        for x in calibration.levels
    ]
    best: dict[str, Any] = {}
    for curve in calibration.curve_list:
        rate = curve.sizes[-1] / curve.seconds[-1]
        if rate > best.get(curve.kind, (0.0, ""))[0]:
            best[curve.kind] = (rate, f"{curve.algorithm} on {curve.sizes[-1] / 1e6:.3g} MB")
    lines += [f"{kind}: at best {rate / 1e9:.2f} GB/s, {setting}" for kind, (rate, setting) in best.items()]
    return {"lines": lines, "calibration": text}


def _apart(part: str, seconds: float, rounds: int, environment: dict[str, str]) -> dict[str, Any]:
    command = [
        sys.executable, "-m", "bench.gpu", "--part", part, "--seconds", str(seconds), "--rounds", str(rounds)
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
            timeout=max(seconds, LEAST_S),
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        text = error.stdout or ""
        result = _last(text.decode() if isinstance(text, bytes) else text)
        if result is None:
            return {"failed": f"it did not end in {seconds:.0f} s"}
        return {
            **result,
            "lines": [*result["lines"], f"stopped after {seconds:.0f} s: the rest is not measured"],
        }
    result = _last(done.stdout)
    if result is not None and not done.returncode:
        return result
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return {"failed": f"status {done.returncode}: {' | '.join(lines[-6:])[-600:]}"}


def _report(result: dict[str, Any]) -> None:
    """What a part has measured so far, for the process that started it: the last report counts."""
    print(RESULT + json.dumps(result), flush=True)


def _last(text: str) -> dict[str, Any] | None:
    reports = [line.removeprefix(RESULT) for line in text.splitlines() if line.startswith(RESULT)]
    return json.loads(reports[-1]) if reports else None


def _paths(wheels: Path, stack: contextlib.ExitStack) -> list[str]:
    """Where the parts find modules; packages that are missing are taken from the folder of wheels."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    missing = [name for name in ("lark", "msgspec") if importlib.util.find_spec(name) is None]
    if not missing:
        return paths
    site = stack.enter_context(tempfile.TemporaryDirectory(prefix="commplan-wheels-"))
    for name in missing:
        files = sorted(wheels.glob(f"{name}-*.whl"))
        if not files:
            raise SystemExit(f"{name} is not installed, and there is no {name}-*.whl in {wheels}")
        with zipfile.ZipFile(files[-1]) as wheel:
            wheel.extractall(site)
    return [*paths, site]


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", type=lambda text: ("machine", *text.split(",")), default=PARTS)
    parser.add_argument("--seconds", type=float, default=540.0, help="for all parts together")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--wheels", type=Path, default=ROOT / "wheels", help="where lark and msgspec are if not installed"
    )
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="every figure")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}; there are {', '.join(PARTS[1:])}")
    return options


if __name__ == "__main__":
    sys.exit(main())
