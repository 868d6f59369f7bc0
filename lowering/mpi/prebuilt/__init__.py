"""An engine that came compiled with the package, and whether it serves here.

A wheel that `python -m commplan.lowering.mpi.prebuilt.wheel` made holds the engine for one MPI library, and
says in `engine.json` what it was compiled for. MPI libraries share no binary interface: the engine is loaded
only where this process has the same MPI library, XLA's interface for handlers is of the same version and the
processor is of the kind that was assumed. Elsewhere the engine is compiled on first use, as by a package
without one.
"""

from __future__ import annotations

import platform
import re
from pathlib import Path

import msgspec

from commplan import io

FOLDER = Path(__file__).parent
ENGINE, DESCRIPTION = FOLDER / "engine.so", FOLDER / "engine.json"
CPUINFO = Path("/proc/cpuinfo")
# What compilers call a kind of processor, and what Linux says of one that is of this kind.
LEVELS = {"x86-64-v3": frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})}


class EngineTarget(msgspec.Struct, frozen=True):
    """What an engine is compiled for."""

    mpi: str  # what the library says of itself (MPI_Get_library_version)
    ffi: str  # version of XLA's interface for handlers, such as "0.3"
    machine: str  # such as "x86_64"
    level: str | None  # a key of `LEVELS`; None: every processor of `machine`

    def __str__(self) -> str:
        return f"{self.mpi.split(',')[0]}, XLA FFI {self.ffi}, {self.level or self.machine}"


def target() -> EngineTarget | None:
    """What the engine in this package was compiled for. None: it has none."""
    try:
        return io.decode_json(io.read(DESCRIPTION), EngineTarget)
    except (OSError, ValueError):
        return None


def engine(mpi: str, include: str) -> Path | None:
    """The engine in this package. None where it has none, or one that is for something else.

    mpi: what the MPI library of this process says of itself. include: the folder of XLA's headers.
    """
    built = target()
    if built is None:
        return None
    version = ffi_version(include)
    if not version or built != EngineTarget(mpi, version, platform.machine(), built.level):
        return None
    return ENGINE if built.level is None or built.level in levels() else None


def ffi_version(include: str) -> str:
    """The version of XLA's interface for handlers, from its headers; empty where they do not say it."""
    text = io.read(Path(include, "xla", "ffi", "api", "c_api.h")).decode()
    numbers: dict[str, str] = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", text))
    return f"{numbers['MAJOR']}.{numbers['MINOR']}" if len(numbers) == 2 else ""


def levels() -> list[str]:
    """The kinds of processors that the one of this machine is of."""
    try:
        text = CPUINFO.read_text(encoding="utf-8")
    except OSError:
        return []
    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    known = set(flags.group(1).split()) if flags else set[str]()
    return [level for level, needed in LEVELS.items() if needed <= known]
