"""The campaign of damaged files: every reader must accept or refuse any file.

    python -m bench.files --count 5000 --seed 0      # so many files of all formats, in turn
    python -m bench.files --format record --case 17  # one of them again, with its output

Each case is a file of one format with up to three mutations, or a pipe, a device, a folder or a link in its
place. A separate process reads it, with limits on its address space and its time. A file is accepted if its
reader returns, and refused if it raises a coded error. Everything else is wrong: another exception, a signal,
more memory or time, or a change to a file outside the folder that the case may write to. A case is a pure
function of seed, format and number. Exit 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import resource
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from bench.files.formats import FORMATS, Format
from bench.harness.arguments import program_parser
from commplan.diagnostics import CommplanError

ACCEPTED, REFUSED, WRONG = "accepted", "refused", "wrong"
MEMORY, SECONDS, WALL_S = 1024 * 2**20, 5, 60.0  # more address space than before; of processor time; of any
_SPECIAL = ("pipe", "device", "folder", "socket", "link", "missing")
_INTEGERS = (0, 1, -1, 2**7, 2**16, 2**24, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, -(2**63), 10**20)
_TOKENS = (
    "9" * 4301, "9" * 400, "0x" + "f" * 5000, "1e999", "-1e999", "1e-999", "nan", "inf", "true", "null", '""',
    '"\\u0000"', '"\\ud800"', '"' + "a" * 100_000 + '"', "{}", "[]", "-0", "0.5", "2026-02-31", "'", '"',
    "[" * 5000, '{"a":' * 5000, "(" * 5000, "\x1b[31m", "\u202e", "\0", "\r", "#", "}" * 20,
)  # fmt: skip
_TOKEN = re.compile(rb'"(?:[^"\\\n]|\\.)*"|[A-Za-z_][A-Za-z_0-9]*|-?[0-9][0-9.eE+-]*')


class Outcome(NamedTuple):
    """`kind`: accepted, refused or wrong. `text`: the error. `seconds`: of processor time."""

    kind: str
    text: str
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    names = [options.format] if options.format else list(FORMATS)
    start, outcomes, slowest = time.perf_counter(), Counter[tuple[str, str]](), Counter[str]()
    cases = range(options.count) if options.case is None else [options.case * len(names)]
    with tempfile.TemporaryDirectory() as folder:
        for number in cases:
            name, case = names[number % len(names)], number // len(names)
            outcome = run_case(FORMATS[name], f"{options.seed}/{name}/{case}", Path(folder))
            outcomes[name, outcome.kind] += 1
            slowest[name] = max(slowest[name], outcome.seconds)  # pyright: ignore[reportArgumentType]
            if outcome.kind == WRONG or options.case is not None:
                print(
                    f"{outcome.kind}: --seed {options.seed} --format {name} --case {case}: {outcome.text}",
                    flush=True,
                )
    for name in names:
        counts = ", ".join(f"{outcomes[name, kind]} {kind}" for kind in (ACCEPTED, REFUSED, WRONG))
        print(f"{name:>12}: {counts}; at most {slowest[name]:.2f} s")
    wrong = sum(count for (_, kind), count in outcomes.items() if kind == WRONG)
    print(
        f"files: {wrong} of {len(cases)} wrong, seed {options.seed}, {MEMORY >> 20} MiB and {SECONDS} s for"
        f" each, {time.perf_counter() - start:.0f} s"
    )
    return int(wrong > 0)


def run_case(of: Format, seed: str, folder: Path) -> Outcome:
    """Damage a file of a format and have it read. folder: an empty one, which is left empty."""
    rng = random.Random(seed)
    inside, canary = folder / "inside", folder / "canary"
    inside.mkdir()
    canary.write_text("of somebody else\n")
    try:
        path = inside / of.file
        path.parent.mkdir(exist_ok=True)
        damage(rng, of, path, canary)
        outcome = _read_apart(of, path, folder / "output")
        entries = {entry.name for entry in folder.iterdir()} - {"output"}
        if entries != {"inside", "canary"} or canary.read_text() != "of somebody else\n":
            return outcome._replace(kind=WRONG, text=f"written outside: {sorted(entries)}, {outcome.text}")
        return outcome
    finally:
        shutil.rmtree(inside)
        canary.unlink(missing_ok=True)
        (folder / "output").unlink(missing_ok=True)


def damage(rng: random.Random, of: Format, path: Path, canary: Path) -> None:
    """Write a damaged file, or replace it by something that is not a regular file."""
    samples = of.samples()
    data = rng.choice(samples)
    if rng.random() < 1 / 12:
        path.write_bytes(data)
        target = path.with_suffix(rng.choice(of.beside)) if of.beside else path
        if target == path or rng.random() < 0.5:
            path.unlink()
        _replace(rng.choice(_SPECIAL), target, canary)
        return
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        data = mutated(rng, data, rng.choice(samples), is_text=of.is_text)
    if of.repair is not None and rng.random() < 0.5:
        data = of.repair(rng, data)
    path.write_bytes(data)


def _replace(special: str, path: Path, canary: Path) -> None:
    if special == "pipe":
        os.mkfifo(path)
    elif special == "device":
        path.symlink_to(f"/dev/{'zero' if path.name < 's' else 'full'}")
    elif special == "folder":
        path.mkdir()
    elif special == "link":
        path.symlink_to(canary)
    elif special == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))


def mutated(rng: random.Random, data: bytes, other: bytes, *, is_text: bool) -> bytes:
    """`data` with one mutation, which may insert parts of the sample `other`."""
    at, size = rng.randrange(len(data) + 1), rng.choice((1, 2, 4, 8, 64, 1000))
    kind = rng.randrange(12)
    if kind < 6:
        return _in_token(rng, data) if is_text else _in_word(rng, data)
    if kind == 6:
        return data[:at]
    if kind == 7:
        return data[:at] + data[at + size :]
    if kind == 8:
        return data[:at] + data[at : at + size] * rng.choice((2, 3, 1000)) + data[at + size :]
    if kind == 9:
        begin = rng.randrange(len(other) + 1)
        return data[:at] + other[begin : begin + size] + data[at + size :]
    if kind == 10:
        return data[:at] + rng.randbytes(min(size, 8)) + data[at + min(size, 8) :]
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :] if at < len(data) else data


def _in_token(rng: random.Random, data: bytes) -> bytes:
    """Another word, text or number in place of one."""
    tokens = list(_TOKEN.finditer(data))
    if not tokens:
        return rng.choice(_TOKENS).encode(errors="surrogatepass")
    token = rng.choice(tokens)
    choice = rng.randrange(8)
    if choice < 2:
        new = rng.choice(_TOKENS).encode(errors="surrogatepass")
    elif choice < 5:
        numbers = [each for each in tokens if each[0][:1].isdigit()]
        token = rng.choice(numbers or tokens)
        new = str(rng.choice((*_INTEGERS, rng.randrange(100)))).encode()
    else:
        new = rng.choice(tokens)[0]
    return data[: token.start()] + new + data[token.end() :]


def _in_word(rng: random.Random, data: bytes) -> bytes:
    """Another number in place of four or eight bytes, more often near the beginning."""
    width, sign = rng.choice(((4, "<I"), (8, "<Q")))
    if len(data) < width:
        return data
    at = rng.randrange(min(len(data) - width + 1, rng.choice((256, 4096, len(data)))))
    at -= rng.choice((0, at % width))
    number = rng.choice(_INTEGERS) % 2 ** (8 * width)
    return data[:at] + struct.pack(sign, number) + data[at + width :]


def _read_apart(of: Format, path: Path, output: Path) -> Outcome:
    """Read a file in a separate process."""
    sys.stdout.flush()
    process = os.fork()
    if not process:
        _child(of, path, output)
    deadline = time.monotonic() + WALL_S
    for _ in _poll(deadline):
        ended, status, usage = os.wait4(process, os.WNOHANG)
        if ended:
            break
    else:
        os.kill(process, signal.SIGKILL)
        _, status, usage = os.wait4(process, 0)
    seconds = usage.ru_utime + usage.ru_stime
    text = output.read_text(errors="replace") if output.exists() else ""
    code = os.waitstatus_to_exitcode(status)
    kinds = {0: ACCEPTED, 1: REFUSED}
    if code not in kinds:
        return Outcome(WRONG, f"ended with {code} after {seconds:.1f} s\n{text}", seconds)
    return Outcome(kinds[code], text, seconds)


def _poll(deadline: float) -> Iterator[None]:
    while time.monotonic() < deadline:
        yield
        time.sleep(0.0005)


def _child(of: Format, path: Path, output: Path) -> NoReturn:
    code = 3
    try:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        os.chdir(path.parent)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        code = of.read(path)
    except CommplanError as error:
        print(error)
        code = 1
    except BaseException:  # noqa: BLE001  whatever a reader raises is what is looked for
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _parser() -> argparse.ArgumentParser:
    parser = program_parser("files", __doc__)
    parser.add_argument("--count", type=int, default=1000, help="how many files (default: 1000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--format", choices=list(FORMATS), help="one format (default: all in turn)")
    parser.add_argument("--case", type=int, help="one file of a format, and what its reader says")
    return parser


if __name__ == "__main__":
    sys.exit(main())
