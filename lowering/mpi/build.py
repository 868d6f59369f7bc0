"""Finds or compiles the engine's shared library.

A library that came with the package is used if it fits this process. Otherwise the engine is compiled on
first use and stored in a per-user cache. MPI libraries have no common binary interface, and reductions use
the instructions of the local processor, so the file name is a digest of everything that the binary depends
on. Of the ranks that start together on one file system, one compiles and the others wait for its lock.
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

import jax
from mpi4py import MPI

from commplan import io
from commplan.diagnostics import CommplanError, fail
from commplan.lowering.mpi import prebuilt

SOURCES = Path(__file__).parent / "engine"
# Options of the compiler. Contraction would round sums and products differently than their declared types.
_OPTIONS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", "-pthread")
# The note of errors CP0830.
_FIX = "install a C++17 compiler (Debian: g++) and the headers of the MPI in use, or write `via` without it"
_COMPILE_TIMEOUT_S = 300  # far more than any compiler needs


@functools.cache
def library() -> ctypes.CDLL:
    """Load the engine into this process, compiling it if necessary.

    Raises:
        CommplanError: CP0830 if the engine cannot be compiled or loaded.
    """
    shipped = prebuilt.engine(mpi_version(), jax.ffi.include_dir())
    if shipped is not None:
        with contextlib.suppress(CommplanError):  # for example built for a newer C library
            return _load(shipped)
    try:
        path = _compiled_engine(compiler_command(), mpi_library())
    except OSError as error:  # the compiler cannot be started, or the disk is full
        fail("CP0830", f"the MPI engine cannot be compiled: {error}", _FIX)
    return _load(path)


def _load(path: Path) -> ctypes.CDLL:
    """Load the engine from `path`, declare its functions and register its handlers. Raises CP0830."""
    try:
        engine = ctypes.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)
    except OSError as error:
        fail("CP0830", f"the MPI engine cannot be loaded: {error}", f"remove {path} to compile it again")
    engine.commplan_library.restype = _TEXT
    linked = Path(os.fsdecode(engine.commplan_library()))
    expected = mpi_library()
    if linked.resolve() != expected.resolve():
        message = f"the MPI compiler wrapper on the path belongs to another MPI library: {linked}"
        note = "put the `mpicxx` of the MPI library that mpi4py uses first in PATH, or name it in MPICXX"
        fail("CP0830", message, f"mpi4py uses {expected}", note)
    _declare(engine)
    return engine


# Types of the engine's functions.
_NUMBER = ctypes.c_int64
_POINTER = ctypes.c_void_p
_TEXT = ctypes.c_char_p
# The result type and the argument types of each function, by its name without `commplan_`.
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "channel_open": (_POINTER, [ctypes.c_int, ctypes.c_int]),
    "channel_busy": (ctypes.c_int, [_POINTER]),
    "channel_watch": (None, [_POINTER, _POINTER]),
    "signals": (None, [_POINTER] * 5),
    "interruption": (_POINTER, []),
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


def _declare(engine: Any) -> None:
    """Declare the types of the engine's functions, and register its handlers with XLA."""
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(engine, f"commplan_{name}")
        function.restype, function.argtypes = result, arguments
    for name in ("call", "start", "finish", "empty"):
        handler = jax.ffi.pycapsule(getattr(engine, f"commplan_{name}"))
        jax.ffi.register_ffi_target(f"commplan_mpi_{name}", handler, platform="cpu")


@functools.cache
def mpi_library() -> Path:
    """The file of the MPI library that mpi4py has loaded.

    Raises:
        CommplanError: CP0830 if this process has loaded no MPI library, or several.
    """
    MPI.Get_version()
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    paths = dict.fromkeys(line.split(maxsplit=5)[5] for line in lines if "/libmpi" in line)
    libraries = [Path(path) for path in paths if Path(path).name.startswith(("libmpi.", "libmpich."))]
    if len({path.resolve() for path in libraries}) != 1:
        listed = ", ".join(map(str, libraries)) or "none"
        message = f"found {len(libraries)} MPI libraries in this process, expected one: {listed}"
        fail("CP0830", message, "install mpi4py and all other packages that use MPI for the same MPI library")
    return libraries[0]


def mpi_version() -> str:
    """The version string of this process's MPI library."""
    return MPI.Get_library_version().rstrip("\0")


def compiler_command() -> tuple[str, ...]:
    """The command that compiles C++ against the MPI in use.

    It is MPI's compiler wrapper: that of the variable MPICXX if it is set, otherwise the first of the usual
    names next to the MPI library, in the Python environment or in PATH. Without a wrapper for C++, it is a
    C++ compiler with the options of `mpicc`.

    Raises:
        CommplanError: CP0830 if there is no compiler.
    """
    variable = os.environ.get("MPICXX")
    prefixes = [mpi_library().parent.parent / "bin", Path(sys.prefix) / "bin"]
    search_path = os.pathsep.join([*map(str, prefixes), os.environ.get("PATH", os.defpath)])
    for name in [variable] if variable else ["mpicxx", "mpic++", "mpiCC"]:
        if wrapper := shutil.which(name, path=search_path):
            return (wrapper,)
    if not variable and (wrapper := shutil.which("mpicc", path=search_path)):
        # Open MPI and MPICH print the command for this option.
        shown = subprocess.run([wrapper, "-show"], capture_output=True, text=True, check=False)
        cxx = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
        if cxx and shown.returncode == 0:
            return (cxx, *shown.stdout.split()[1:])
    problem = f"`{variable}` (from MPICXX) was not found" if variable else "no mpicxx was found"
    return fail("CP0830", f"the MPI engine cannot be compiled: {problem}", _FIX)


def cache_folder() -> Path:
    """The folder of compiled engines: below $XDG_CACHE_HOME or ~/.cache, or else a temporary directory.

    Raises:
        CommplanError: CP0830 if the temporary directory cannot be used, for example because another user
            created it.
    """
    variable = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = (Path(variable) if variable else Path.home() / ".cache") / "commplan"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError):  # no home directory, or one that is read-only
        folder = Path(tempfile.gettempdir()) / f"commplan-{os.getuid()}"
        folder.mkdir(exist_ok=True, mode=0o700)
        try:
            os.close(io.open_folder(folder))
        except OSError as error:
            note = "set XDG_CACHE_HOME to a directory of your own"
            fail("CP0830", f"{folder} cannot be used: {error.strerror}", note)
        return folder


def _compiled_engine(compiler: Sequence[str], mpi: Path) -> Path:
    """The compiled engine in the cache. Compiles it if it is not there; other ranks wait for the lock."""
    sources = sorted(path for path in SOURCES.iterdir() if path.suffix in (".cpp", ".h"))
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.name.encode() + b"\0" + io.read(source))
    stat = mpi.stat()
    version = subprocess.run([compiler[0], "--version"], capture_output=True, text=True, check=False).stdout
    dependencies = (
        compiler, _OPTIONS, version, mpi_version(), str(mpi.resolve()), stat.st_size,
        jax.__version__, jax.ffi.include_dir(), _processor(),
    )  # fmt: skip
    digest.update(repr(dependencies).encode())
    path = cache_folder() / f"engine-{digest.hexdigest()[:24]}.so"
    if path.exists():
        return path
    lock_flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    with os.fdopen(io.open_file(path.with_name(f"{path.name}.lock"), lock_flags), "r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released by the kernel if the process dies
        if not path.exists():
            _compile(compiler, path)
    return path


def _processor() -> str:
    """A description of this processor, for the digest: `-march=native` depends on it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    fields = ("model name", "flags", "Features", "CPU part")
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(fields)}))


def _processor_options(compiler: Sequence[str]) -> list[str]:
    """The compiler option for this processor; empty if the compiler does not support it."""
    command = [compiler[0], "-march=native", "-fsyntax-only", "-x", "c++", os.devnull]
    is_supported = subprocess.run(command, capture_output=True, check=False).returncode == 0
    return ["-march=native"] if is_supported else []


def _compile(compiler: Sequence[str], path: Path) -> None:
    """Compile to `path`, which is replaced atomically once the library is complete."""
    with io.replacing(path) as temp, tempfile.TemporaryDirectory() as folder:
        objects = compile_objects(compiler, _processor_options(compiler), Path(folder))
        link([*compiler[:1], *objects, *compiler[1:]], temp)


def compile_objects(compiler: Sequence[str], options: Sequence[str], folder: Path) -> list[str]:
    """Compile the engine's sources in parallel.

    Args:
        compiler: The command; see `compiler_command`.
        options: Further options.
        folder: The folder for object files.

    Returns:
        The paths of the object files.

    Raises:
        CommplanError: CP0830 if a source does not compile.
    """
    sources = sorted(SOURCES.glob("*.cpp"))
    objects = [str(folder / f"{source.stem}.o") for source in sources]
    common = [compiler[0], *_OPTIONS, *options, f"-I{jax.ffi.include_dir()}", *compiler[1:], "-c"]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        commands = [[*common, str(path), "-o", result] for path, result in zip(sources, objects, strict=True)]
        list(pool.map(_run, commands))
    return objects


def link(command: Sequence[str], path: Path) -> None:
    """Link a shared library.

    Args:
        command: The linker with its options and object files.
        path: The library to write.

    Raises:
        CommplanError: CP0830 if the linker fails.
    """
    _run([*command, "-shared", "-pthread", "-ldl", "-o", str(path)])


def _run(command: Sequence[str]) -> None:
    """Run a compiler or linker. Raises CP0830 with its first error."""
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_COMPILE_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        fail("CP0830", f"the compiler of the MPI engine did not finish in {_COMPILE_TIMEOUT_S} s", _FIX)
    if result.returncode != 0:
        # The first line with an error; otherwise the end of the output.
        output = result.stderr[-500:] or f"{command[0]} ended with exit code {result.returncode}"
        errors = [line for line in result.stderr.splitlines() if "error" in line] or [output]
        fail("CP0830", f"the MPI engine does not compile: {errors[0].strip()}", _FIX)
