"""Processes that are forked from one with JAX equal those started by `python -W error`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import fork_server, interpreter, mpirun

REPORT = (
    "import os, sys; print(sys.argv[1:], os.getcwd(), os.environ['MARK'], 'jax' in sys.modules, __name__)"
)


def done(words: list[str], *program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*words, *program], capture_output=True, text=True, check=False, input="given",
        env={**os.environ, "MARK": "set", **environment},
    )  # fmt: skip


def test_a_program_is_a_text_a_file_or_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(REPORT)
    for program in (["-c", REPORT], [str(tmp_path / "program.py")], ["-m", "program"]):
        output = done(interpreter.words(), *program, "a", "b")
        assert output.stdout == f"['a', 'b'] {tmp_path} set True __main__\n", output.stderr


@pytest.mark.parametrize(
    "text",
    [
        "import sys; sys.exit(3)",
        "1 / 0",
        "import warnings; warnings.warn('an error', stacklevel=1)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import atexit; atexit.register(print, 'the end'); print(input())",
    ],
)
def test_it_ends_as_without_a_server(text: str) -> None:
    forked, usual = (
        done(words, "-c", text) for words in (interpreter.words(), [sys.executable, "-W", "error"])
    )
    assert (forked.returncode, forked.stdout) == (usual.returncode, usual.stdout)
    assert forked.stderr.splitlines()[-1:] == usual.stderr.splitlines()[-1:]


def test_variables_that_imports_read_are_never_those_of_the_server() -> None:
    text = "import os, sys; print(os.environ['XLA_FLAGS'], 'jax' in sys.modules)"
    assert (
        done(interpreter.words(), "-c", text, XLA_FLAGS="--xla_dump_to=").stdout == "--xla_dump_to= False\n"
    )


def test_options_of_jax_and_the_folder_of_tests_are_those_of_the_client() -> None:
    text = "import sys, support.interpreter, jax; print(len(jax.devices()), jax.devices()[0].platform)"
    runs = [
        done(interpreter.words(), "-c", text, JAX_NUM_CPU_DEVICES=count, PYTHONPATH=fork_server.TESTS)
        for count in ("3", "1")
    ]
    assert [run.stdout for run in runs] == ["3 cpu\n", "1 cpu\n"], runs


def test_without_jax_a_program_imports_it_with_its_own_settings() -> None:
    text = (
        "import os, sys; print('commplan.api' in sys.modules, 'jax' in sys.modules)\n"
        "os.environ['JAX_NUM_CPU_DEVICES'] = '5'\nimport jax; print(len(jax.devices()))"
    )
    assert done(interpreter.words(jax=False), "-c", text).stdout == "True False\n5\n"


def test_ranks_hash_as_they_like() -> None:
    hashes = {
        done(interpreter.words(), "-c", "print(hash('x'))", OMPI_COMM_WORLD_RANK=rank).stdout for rank in "01"
    }
    assert len(hashes) == 2


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 7), (signal.SIGKILL, -9), (signal.SIGTERM, -15)]
)
def test_signals_reach_it_and_it_never_outlives_its_client(number: signal.Signals, status: int) -> None:
    text = (
        "import os, time\n"
        "try:\n    print(os.getpid(), flush=True)\n    time.sleep(100)\n"
        "except KeyboardInterrupt:\n    os._exit(7)"
    )
    with subprocess.Popen([*interpreter.words(), "-c", text], stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        forked = os.pidfd_open(int(client.stdout.readline()))
        client.send_signal(number)
        assert client.wait(60) == status
        assert client.stdout.read() == ""  # the last to hold it has ended
        os.close(forked)


def test_ranks_are_forked() -> None:
    mpirun.needs_mpi()
    assert mpirun.run(2, "import sys; print('jax' in sys.modules, flush=True)").split() == ["True", "True"]
