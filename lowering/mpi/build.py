"""The engine's library: the package's own where that serves here, else compiled on first use and kept.

MPI libraries share no binary interface, and reductions are as fast as the processor allows. What is compiled
lies in a per-user cache under a name that says all that it depends on. Of the ranks that start together one
compiles, on a file system of their own one for each; the others wait for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from commplan import io
from commplan.diagnostics import CommplanError, fail
from commplan.lowering.jax.typing_shim import jax
from commplan.lowering.mpi import prebuilt
from commplan.lowering.mpi.typing_shim import MPI

SOURCES = Path(__file__).parent / "engine"
_OPTIONS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", "-pthread")
_FIX = "install a C++17 compiler (Debian: g++) and the headers of the MPI in use, or write `via` without it"
_SECONDS = 300  # more than any compiler needs


@functools.cache
def library() -> ctypes.CDLL:
    """The engine, loaded into this process. Raises CP0830 where it cannot be compiled or loaded."""
    shipped = prebuilt.engine(mpi_version(), jax.ffi.include_dir())
    if shipped is not None:
        with contextlib.suppress(CommplanError):  # such as one for a newer C library
            return _loaded(shipped)
    try:
        path = _cached(compiler(), mpi_library())
    except OSError as error:  # a compiler that cannot be started, a full disk
        fail("CP0830", f"the MPI engine cannot be compiled: {error}", _FIX)
    return _loaded(path)


def _loaded(path: Path) -> ctypes.CDLL:
    """The engine in the file `path`, its functions declared and registered. Raises CP0830."""
    try:
        loaded = ctypes.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)
    except OSError as error:
        fail("CP0830", f"the MPI engine cannot be loaded: {error}", f"remove {path} to compile it again")
    loaded.commplan_library.restype = _TEXT
    used, ours = Path(os.fsdecode(loaded.commplan_library())), mpi_library()
    if used.resolve() != ours.resolve():
        message = f"the compiler wrapper on the path belongs to another MPI: {used}"
        note = "put the `mpicxx` of that MPI first in PATH, or name it in MPICXX"
        fail("CP0830", message, f"mpi4py uses {ours}", note)
    _declare(loaded)
    return loaded


_NUMBER, _POINTER, _TEXT = ctypes.c_int64, ctypes.c_void_p, ctypes.c_char_p
# What the engine gives back, and what it takes.
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "channel_open": (_POINTER, [ctypes.c_int, ctypes.c_int]),
    "channel_busy": (ctypes.c_int, [_POINTER]),
    "channel_watch": (None, [_POINTER, _NUMBER, _NUMBER, _NUMBER, _POINTER]),
    "channel_serve": (None, [_POINTER, *[ctypes.c_int] * 3, _POINTER, _NUMBER, _NUMBER]),
    "channel_verdict": (_NUMBER, [_POINTER, ctypes.c_char_p, _NUMBER]),
    "stack_writer": (None, [_POINTER]),
    "stack_signal": (None, [_TEXT, ctypes.c_int]),
    "signals": (None, [_POINTER] * 5),
    "interruption": (_POINTER, []),
    "add_busy": (None, [ctypes.c_int]),
    "channel_close": (None, [_POINTER]),
    "channel_release": (ctypes.c_int, [_POINTER]),
    "list": (_NUMBER, [_POINTER, _POINTER, _NUMBER, *[_POINTER] * 4, _NUMBER, _POINTER, _TEXT]),
    "list_free": (None, [_NUMBER]),
    "run": (_NUMBER, [_NUMBER, _POINTER, _POINTER, _POINTER, ctypes.c_char_p, _NUMBER]),
    "end_looks": (None, []),
    "end_channels": (None, []),
    "native": (_NUMBER, [_POINTER, _POINTER, _TEXT]),
    "describe": (None, [_NUMBER, _TEXT]),
    "packed": (_NUMBER, [_NUMBER, *[_POINTER, _NUMBER] * 4]),
    "request": (
        _NUMBER,
        [_POINTER, _TEXT, _POINTER, ctypes.POINTER(_TEXT), _NUMBER, _POINTER, _NUMBER, _NUMBER, _POINTER],
    ),
    "request_shares": (None, [_NUMBER, *[_POINTER, _NUMBER] * 2, _POINTER, _POINTER]),
}


def _declare(loaded: Any) -> None:
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(loaded, f"commplan_{name}")
        function.restype, function.argtypes = result, arguments
    for name in ("call", "start", "finish", "empty"):
        handler = jax.ffi.pycapsule(getattr(loaded, f"commplan_{name}"))
        jax.ffi.register_ffi_target(f"commplan_mpi_{name}", handler, platform="cpu")


@functools.cache
def mpi_library() -> Path:
    """The file of the MPI library that mpi4py has loaded."""
    MPI.Get_version()
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    paths = dict.fromkeys(line.split(maxsplit=5)[5] for line in lines if "/libmpi" in line)
    names = [Path(path) for path in paths if Path(path).name.startswith(("libmpi.", "libmpich."))]
    if len({path.resolve() for path in names}) != 1:
        known = ", ".join(map(str, names)) or "none"
        fail("CP0830", f"the MPI library of this process is not to be found: {known}", _FIX)
    return names[0]


def mpi_version() -> str:
    """What the MPI library of this process says of itself."""
    return MPI.Get_library_version().rstrip("\0")


def compiler() -> tuple[str, ...]:
    """The command that compiles C++ against the MPI in use: its own wrapper."""
    named = os.environ.get("MPICXX")
    prefixes = [mpi_library().parent.parent / "bin", Path(sys.prefix) / "bin"]
    places = os.pathsep.join([*map(str, prefixes), os.environ.get("PATH", os.defpath)])
    for name in [named] if named else ["mpicxx", "mpic++", "mpiCC"]:
        if wrapper := shutil.which(name, path=places):
            return (wrapper,)
    if not named and (wrapper := shutil.which("mpicc", path=places)):
        shown = subprocess.run([wrapper, "--showme"], capture_output=True, text=True, check=False)
        cxx = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
        if cxx and shown.returncode == 0:
            return (cxx, *shown.stdout.split()[1:])
    problem = f"`{named}` (from MPICXX) is not there" if named else "there is no mpicxx"
    return fail("CP0830", f"the MPI engine cannot be compiled: {problem}", _FIX)


def cache() -> Path:
    """Where compiled engines lie: below $XDG_CACHE_HOME or ~/.cache, else among temporary files."""
    named = os.environ.get("XDG_CACHE_HOME")
    try:
        place = (Path(named) if named else Path.home() / ".cache") / "commplan"
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=place):
            return place
    except (OSError, RuntimeError):  # no home, or one that cannot be written
        place = Path(tempfile.gettempdir()) / f"commplan-{os.getuid()}"
        place.mkdir(exist_ok=True, mode=0o700)
        try:
            os.close(io.open_folder(place))
        except OSError as error:
            note = "set XDG_CACHE_HOME to a directory of your own"
            fail("CP0830", f"{place} cannot be used: {error.strerror}", note)
        return place


def _cached(compiler: Sequence[str], mpi: Path) -> Path:
    sources = sorted(path for path in SOURCES.iterdir() if path.suffix in (".cpp", ".h"))
    digest = hashlib.sha256()
    for path in sources:
        digest.update(path.name.encode() + b"\0" + io.read(path))
    stat = mpi.stat()
    parts = (compiler, _OPTIONS, _version(compiler[0]), mpi_version(), str(mpi.resolve()))
    digest.update(repr((*parts, stat.st_size, jax.__version__, jax.ffi.include_dir(), _processor())).encode())
    path = cache() / f"engine-{digest.hexdigest()[:24]}.so"
    if path.exists():
        return path
    lock_flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    with os.fdopen(io.open_file(path.with_name(f"{path.name}.lock"), lock_flags), "r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # given up when the process ends, however it ends
        if not path.exists():
            _compile(compiler, path)
    return path


def _version(compiler: str) -> str:
    shown = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    return shown.stdout


def _processor() -> str:
    """What `-march=native` means here."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    wanted = ("model name", "flags", "Features", "CPU part")
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(wanted)}))


def _tuning(compiler: Sequence[str]) -> list[str]:
    """What makes the engine as fast as this processor allows; not every compiler knows its processor."""
    command = [compiler[0], "-march=native", "-fsyntax-only", "-x", "c++", os.devnull]
    known = subprocess.run(command, capture_output=True, check=False).returncode == 0
    return ["-march=native"] if known else []


def _compile(compiler: Sequence[str], path: Path) -> None:
    """Compile to `path`, which appears atomically and complete, on other hosts and after a crash too."""
    with io.replacing(path) as temp, tempfile.TemporaryDirectory() as folder:
        objects = compile_objects(compiler, _tuning(compiler), Path(folder))
        link([*compiler[:1], *objects, *compiler[1:]], temp)


def compile_objects(compiler: Sequence[str], options: Sequence[str], folder: Path) -> list[str]:
    """The object files of the engine, as many at a time as there are processors for. Raises CP0830."""
    sources = sorted(SOURCES.glob("*.cpp"))
    objects = [str(folder / f"{source.stem}.o") for source in sources]
    common = [compiler[0], *_OPTIONS, *options, f"-I{jax.ffi.include_dir()}", *compiler[1:], "-c"]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        commands = [[*common, str(path), "-o", result] for path, result in zip(sources, objects, strict=True)]
        list(pool.map(_run, commands))
    return objects


def link(command: Sequence[str], path: Path) -> None:
    """The library `path` from what stands in `command`. Raises CP0830."""
    _run([*command, "-shared", "-pthread", "-ldl", "-o", str(path)])


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        fail("CP0830", f"compiling the MPI engine took more than {_SECONDS} s", _FIX)
    if done.returncode != 0:
        output = done.stderr[-500:] or f"{command[0]} ends with exit code {done.returncode}"
        errors = [line for line in done.stderr.splitlines() if "error" in line] or [output]
        fail("CP0830", f"the MPI engine does not compile: {errors[0].strip()}", _FIX)
