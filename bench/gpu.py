"""Everything that must be confirmed on a machine with GPUs, in one command and under ten minutes.

    python -m bench.gpu [--parts smoke,tax] [--seconds 540] [--wheels DIR] [--out FILE.json]

Each part is a module of `bench.on_gpu` and a separate process, so that a failure does not affect the others:

- `smoke`: flax, optax, orbax and torch around a plan.
- `tax`: the time of a step with a plan beside one without; on several GPUs also the exposed communication.
- `packing`: a bucketed reduction's traffic on the device's memory: packed, as arrays are, on a 16-bit wire.
- `feeding`: batches to the device, against the bus, with and without a step.
- `content`: every byte of batches on the device, compared with the records.
- `estimate`: the audit's estimate of computation against its measured time.
- `eight`: the step of one of eight devices without its network: fusions that a plan prevents.
- `dispatch`: microseconds of the host for a call of a tiny step.
- `mock`: the step of one of 32 GPUs, compiled and timed on one GPU with mocked collectives.
- `calibration`: links and collectives between several devices, as `commplan calibrate` measures them.
- `ensemble`: 1 to 8 members as processes on one device, with shared input and an input each; with as many
  numbers of members as there is time for.

Besides JAX commplan needs msgspec. On a machine that has neither it nor a network, put its wheel into the
folder of --wheels (`wheels` by default): it is unpacked for the duration of this run.

`--out` is rewritten after every finding of every part, so a killed run leaves its findings.

Without a GPU everything runs small, on CPU devices, as a test; the times have no meaning.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from bench.on_gpu.findings import INTERIM, Findings, Result, print_result, result_of

ROOT = Path(__file__).resolve().parents[1]
LIMITS_S = {
    "machine": 60.0, "smoke": 120.0, "tax": 180.0, "packing": 120.0, "feeding": 120.0, "content": 90.0,
    "estimate": 120.0, "eight": 120.0, "dispatch": 60.0, "mock": 180.0, "calibration": 120.0,
    "ensemble": 600.0,
}  # fmt: skip
PARTS = tuple(LIMITS_S)
# The part starts processes that share the device with it.
ENVIRONMENTS = {"mock": {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}}
LEAST_S = 20.0  # a part is not started with less time left
END_S = 3.0  # for a part that is stopped to remove its files and processes


def main(argv: list[str] | None = None) -> int:
    options = _options(argv)
    if options.part:
        run_part(options.part, options.rounds, options.seconds)
        return 0
    results: dict[str, Result] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(_terminated_as_exit())
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(_paths(options.wheels, stack))}
        end = time.monotonic() + options.seconds
        for part in options.parts:
            left = end - time.monotonic()
            print(f"== {part}", flush=True)
            printed: list[str] = []

            def report(result: Result, part: str = part, printed: list[str] = printed) -> None:
                if not result.pop(INTERIM, False):
                    _print_new(printed, result)
                results[part] = result
                write(options.out, results)

            if left < LEAST_S and part != "machine":
                report({"failed": "no time was left"})
            else:
                report(measured(part, min(left, LIMITS_S[part]), options.rounds, environment, report))
    failed = [part for part, result in results.items() if "failed" in result]
    without = f", without {', '.join(failed)}" if failed else ""
    print(f"{len(results) - len(failed)} parts measured{without}")
    return 1 if failed else 0


def run_part(part: str, rounds: int, seconds: float) -> None:
    """Measure `part` in this process, and print its findings as they come."""
    from bench.on_gpu.scale import scale_of  # noqa: PLC0415  the launcher never imports JAX

    findings = Findings(print_result)
    module: Any = importlib.import_module(f"bench.on_gpu.{part}")
    module.measure(scale_of(rounds, seconds), findings)
    print_result(findings.result)


def measured(
    part: str, seconds: float, rounds: int, environment: Mapping[str, str], report: Callable[[Result], None]
) -> Result:
    """Measure `part` in a separate process.

    Args:
        part: the name of the part.
        seconds: the time limit of the part.
        rounds: the number of rounds.
        environment: the environment of the process.
        report: called with the findings so far, which have `unfinished`.

    Returns:
        The findings. `failed` is the error of a part without any, or that broke; a part that was stopped
        keeps its findings.
    """
    command = [
        sys.executable, "-m", "bench.gpu", "--part", part, "--seconds", str(seconds), "--rounds", str(rounds)
    ]  # fmt: skip
    result: Result | None = None
    other: list[str] = []
    stopped = threading.Event()
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(
            command, cwd=ROOT, env={**environment, **ENVIRONMENTS.get(part, {})}, stdout=subprocess.PIPE,
            stderr=errors, text=True, start_new_session=True,
        ) as process:  # fmt: skip

            def stop() -> None:
                stopped.set()
                end(process)

            timer = threading.Timer(max(seconds, LEAST_S), stop)
            timer.start()
            try:
                for line in process.stdout or ():
                    reported = result_of(line)
                    if reported is None:
                        other.append(line)
                    else:
                        result = reported
                        report({**result, "unfinished": True})
                code = process.wait()
            finally:
                timer.cancel()
                end(process)
        errors.seek(0)
        text = errors.read().strip() or "".join(other).strip()
    if result is not None:
        result.pop(INTERIM, None)
    if stopped.is_set():
        if result is None:
            return {"failed": f"it did not end in {seconds:.0f} s"}
        note = f"stopped after {seconds:.0f} s: the rest is not measured"
        return {**result, "lines": [*result["lines"], note]}
    if result is not None and code == 0:
        return result
    return {**(result or {}), "failed": f"status {code}: {' | '.join(text.splitlines()[-6:])[-600:]}"}


def end(process: subprocess.Popen[str]) -> None:
    """End a part with its processes: by an interrupt, and by force if it is still there after `END_S`."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def write(path: Path | None, results: Mapping[str, Result]) -> None:
    """Replace the file `path` by `results` as JSON, in one step."""
    if path is None:
        return
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    partial.write_text(json.dumps(results, indent=1) + "\n")
    partial.replace(path)


def _print_new(printed: list[str], result: Result) -> None:
    """Print the lines of `result` after those that were `printed`, and append them there."""
    lines = [*result.get("lines", []), *(f"not measured: {text}" for text in [result.get("failed")] if text)]
    for line in lines[len(printed) :]:
        print(f"   {line}", flush=True)
        printed.append(line)


@contextlib.contextmanager
def _terminated_as_exit() -> Any:
    """SIGTERM as SystemExit, so that the running part is ended, too."""

    def leave(number: int, _: Any) -> NoReturn:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _paths(wheels: Path, stack: contextlib.ExitStack) -> list[str]:
    """The module search path of the parts; missing packages come from the folder of wheels."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    missing = [name for name in ("msgspec",) if importlib.util.find_spec(name) is None]
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
        "--wheels", type=Path, default=ROOT / "wheels", help="where msgspec is if not installed"
    )
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="every figure, from the first one on")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}; there are {', '.join(PARTS[1:])}")
    return options


if __name__ == "__main__":
    sys.exit(main())
