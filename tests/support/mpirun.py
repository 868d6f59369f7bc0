"""Starting ranks: `mpirun` of the environment that the tests run in.

Where MPI is not installed, tests that need it are skipped; with COMMPLAN_MPI=1, as in CI, that is an error.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import interpreter

from bench.harness import mpirun as ranks

TESTS = Path(__file__).resolve().parent.parent
MPIRUN = Path(sys.executable).parent / "mpirun"
MISSING = [name for name in ("mpi4py", "mpi4jax") if importlib.util.find_spec(name) is None] + (
    [] if MPIRUN.exists() else ["mpirun"]
)


def needs_mpi() -> None:
    """Skip the test, or the module that calls this, where MPI is missing."""
    if not MISSING:
        return
    why = f"{', '.join(MISSING)} not installed: pip install 'commplan[mpi]'"
    if os.environ.get("COMMPLAN_MPI") == "1":
        pytest.fail(f"COMMPLAN_MPI=1, and {why}", pytrace=False)
    pytest.skip(why, allow_module_level=True)


def environment() -> dict[str, str]:
    """The environment of ranks, in which `mpirun` and the modules of the tests are found."""
    return {
        **ranks.environment(),
        "PATH": f"{MPIRUN.parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }


def command(ranks: int, script: Path | str, *words: object, forked: bool = True) -> list[str]:
    """The command that runs `script` on `ranks` ranks of this machine; text with line breaks or blanks is a
    program.

    `forked`: from a process that has imported JAX. Then processes cannot be found by their initial
    environment (`/proc/PID/environ`).
    """
    program = ["-c", script] if isinstance(script, str) else [str(script)]
    mpirun = [str(MPIRUN), "--oversubscribe", "--bind-to", "none", "-n", str(ranks)]
    python = interpreter.words(environment()) if forked else [sys.executable, "-W", "error"]
    return [*mpirun, *python, *program, *map(str, words)]


def fork_benches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the ranks that `bench` starts forked as well."""
    monkeypatch.setattr(ranks, "PYTHON", interpreter.words(environment()))


def started(words: list[str], timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Run to the end, whatever that is."""
    needs_mpi()
    return subprocess.run(
        words, env=environment(), capture_output=True, text=True, timeout=timeout, check=False
    )


def start(
    ranks: int, script: Path | str, *words: object, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """`script` on so many ranks, to the end."""
    return started(command(ranks, script, *words), timeout)


def ended_well(done: subprocess.CompletedProcess[str]) -> str:
    """The output of the ranks."""
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def run(ranks: int, script: Path | str, *words: object, timeout: float = 240) -> str:
    """The output of the ranks, which must end without errors."""
    return ended_well(start(ranks, script, *words, timeout=timeout))
