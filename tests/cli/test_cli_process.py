"""The command as a process: exit codes, closed streams, signals, imported modules."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLANS = sorted((ROOT / "examples" / "plans").glob("*.plan"))
COMMAND = [sys.executable, "-W", "error", "-m", "commplan.cli"]


def run(*arguments: str, stdin: bytes = b"", **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*COMMAND, *arguments],
        input=stdin,
        capture_output=True,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.fixture(name="bad")
def _bad(tmp_path: Path) -> str:
    path = tmp_path / "bad.plan"
    path.write_text("plan p\naxes data = 8\n")
    return str(path)


def test_exit_codes(bad: str) -> None:
    assert run("check", *map(str, PLANS)).returncode == 0
    assert run("check", bad).returncode == 1
    assert run("check").returncode == 2
    assert run("fmt", "--check", *map(str, PLANS)).returncode == 0
    assert run("explain", "CP9999").returncode == 1


BAD = {
    "empty": b"",
    "utf16": b"\xff\xfe\x00",
    "nul": b"\x00" * 100,
    "truncated": b"plan p\neach step {\n  x = map f(",
    "half a character": b"plan \xc3",
    "all bytes": bytes(range(256)),
    "braces": b"{" * 10**7,
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD)
def test_bad_input_ends_in_diagnostics(data: bytes) -> None:
    done = run("check", "--format", "concise", "-", stdin=data)
    assert done.returncode == 1
    assert done.stdout.startswith(b"<stdin>:") and b"error[CP00" in done.stdout
    assert done.stderr == b""


def test_nothing_is_said_where_the_reader_has_gone(bad: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*COMMAND, "check", "--format", "concise", bad], stdout=writer, stderr=subprocess.PIPE, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_interruption() -> None:
    command = [sys.executable, "-m", "commplan.cli", "check", "-"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin is not None and process.stderr is not None
    assert os.write(process.stdin.fileno(), b" " * 2**20) == 2**20  # more than a pipe holds: it is being read
    for _ in range(12):
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):  # between two reads Python notices none
            process.wait(timeout=5)
            break
    assert (process.wait(timeout=0), process.stderr.read()) == (130, b"interrupted\n")
    process.stdin.close()
    process.stderr.close()


def test_any_terminal_encoding_will_do(tmp_path: Path) -> None:
    path = tmp_path / "größe.plan"
    path.write_text("plan p\n# 日本\naxis größe = 2\n", encoding="utf-8")
    done = run("check", str(path), PYTHONIOENCODING="ascii")
    assert done.returncode == 1 and b"\\xf6" in done.stderr


HEAVY = {
    "commplan.api", "commplan.ir.ops", "commplan.ir.symbolic.terms", "commplan.render.human",
    "commplan.runtime", "jax", "mpi4py", "numpy", "rich", "secrets",
}  # fmt: skip


def test_check_and_fmt_load_neither_jax_nor_the_compiler() -> None:
    script = (
        "import sys; from commplan.cli import main; code = main(sys.argv[1:]);"
        f"heavy = {HEAVY} & set(sys.modules); assert not heavy, heavy; sys.exit(code)"
    )
    plans = [str(path) for path in PLANS if path.stem != "cluster"]  # whose axes are placed on its topology
    for verb in (["check"], ["fmt", "--check"]):
        done = subprocess.run(
            [sys.executable, "-c", script, *verb, *plans], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


def test_compile_loads_no_jax(tmp_path: Path) -> None:
    shapes = tmp_path / "s.json"
    shapes.write_text('{"grads": {"w": {"shape": [4], "dtype": "f32"}}}')
    script = (
        "import sys; from commplan.cli import main; code = main(sys.argv[1:]);"
        "assert 'jax' not in sys.modules; sys.exit(code)"
    )
    plan = str(ROOT / "examples" / "plans" / "two_level.plan")
    done = subprocess.run(
        [sys.executable, "-c", script, "compile", plan, "--shapes", str(shapes)],
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_terminal_gets_color(bad: str) -> None:
    ours, theirs = pty.openpty()
    environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"} | {"TERM": "xterm"}
    done = subprocess.run([*COMMAND, "check", bad], stderr=theirs, check=False, env=environment)
    os.close(theirs)
    text = os.read(ours, 10_000)
    os.close(ours)
    assert done.returncode == 1 and b"\x1b[1;31m" in text


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("compile", "PLAN", "--shapes", "SHAPES", "-o", "PIPE"), "it is a pipe that no process reads"),
        (("blame", "n" * 300), "File name too long"),
        (("new", "data_parallel", "--into", "n" * 300), "File name too long"),
    ],
)
def test_places_that_cannot_be_opened(tmp_path: Path, words: tuple[str, ...], reason: str) -> None:
    """No traceback, and no wait for a process that reads."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "shapes.json").write_text('{"grads": {"w": {"shape": [4], "dtype": "f32"}}}')
    places = {"PLAN": str(ROOT / "examples" / "plans" / "two_level.plan"), "PIPE": str(tmp_path / "pipe")}
    places["SHAPES"] = str(tmp_path / "shapes.json")
    command = [places.get(word, word) for word in words]
    done = subprocess.run(
        [*COMMAND, *command], capture_output=True, text=True, check=False, timeout=60, cwd=tmp_path
    )
    assert done.returncode == 1 and reason in done.stderr, done.stderr
