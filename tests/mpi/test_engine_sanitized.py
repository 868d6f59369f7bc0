"""The engine under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer.

Ranks are threads of one process, over a separate transport (`engine_ranks`), since no MPI supports
sanitizers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from commplan.lowering.mpi.build import SOURCES

HERE = Path(__file__).parent / "engine_ranks"
KINDS = {
    "address": ["-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-O1", "-fsanitize=thread"],
}
OPTIONS = ["-std=c++17", "-g1", "-fno-omit-frame-pointer", "-pthread", f"-I{HERE}", f"-I{SOURCES}"]
# A channel is never freed, nor a buffer in which a message may still arrive.
ENVIRONMENT = {"ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "halt_on_error=1"}


def run(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False, timeout=300
    )


@pytest.fixture(scope="module", params=["address", "thread"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program. Everything but the handlers for XLA is compiled into it."""
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    folder, kind = tmp_path_factory.mktemp(request.param), KINDS[request.param]
    empty = folder / "empty.cpp"
    empty.write_text("int main() {}\n", "utf-8")
    tried = run([compiler, *kind, str(empty), "-o", str(folder / "empty")])
    if tried.returncode != 0 or run([str(folder / "empty")]).returncode != 0:
        pytest.skip(f"{compiler} has no {request.param} sanitizer: {tried.stderr.strip()[-200:]}")
    sources = [*HERE.glob("*.cpp"), *(path for path in SOURCES.glob("*.cpp") if path.name != "ffi.cpp")]
    objects = [str(folder / f"{path.stem}.o") for path in sources]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        commands = [
            [compiler, *OPTIONS, *kind, "-c", str(path), "-o", object_file]
            for path, object_file in zip(sources, objects, strict=True)
        ]
        for compiled in pool.map(run, commands):
            assert compiled.returncode == 0, compiled.stderr
    linked = run([compiler, *kind, "-pthread", *objects, "-o", str(folder / "ranks")])
    assert linked.returncode == 0, linked.stderr
    return folder / "ranks"


@pytest.mark.campaign
@pytest.mark.parametrize("scenario", ["lists", "requests", "judged", "gone", "lists outlive"])
def test_ranks_end_well(ranks: Path, scenario: str, monkeypatch: pytest.MonkeyPatch):
    scenario, *outlive = scenario.split()
    monkeypatch.setenv("OMPI_MCA_mpi_ft_enable", "1" if outlive else "0")  # sends are looked at one by one
    done = run([str(ranks), scenario])
    assert done.returncode == 0 and done.stdout == "well\n", done.stdout + done.stderr
