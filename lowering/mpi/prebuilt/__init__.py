"""A precompiled engine in the package, and the check that it fits this process.

`python -m commplan.lowering.mpi.prebuilt.wheel` makes a wheel with an engine for one MPI library, and
describes its target in `engine.json`. MPI libraries have no common binary interface. The engine is used only
if this process has the same MPI library, the same version of XLA's FFI, and a processor of the same level.
Otherwise the engine is compiled on first use.
"""

from __future__ import annotations

import platform
import re
from pathlib import Path

import msgspec

from commplan import io

FOLDER = Path(__file__).parent
ENGINE = FOLDER / "engine.so"  # exists only in wheels that `wheel` has made
DESCRIPTION = FOLDER / "engine.json"  # its `EngineTarget`
CPUINFO = Path("/proc/cpuinfo")
# Processor levels as compilers name them, and the flags that Linux reports for a processor of the level.
LEVELS = {"x86-64-v3": frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})}


class EngineTarget(msgspec.Struct, frozen=True):
    """The platform that an engine is compiled for.

    Attributes:
        mpi: The result of `MPI_Get_library_version`.
        ffi: The version of XLA's FFI, such as `0.3`.
        machine: The architecture, such as `x86_64`.
        level: The processor level, a key of `LEVELS`; None for every processor of `machine`.
    """

    mpi: str
    ffi: str
    machine: str
    level: str | None

    def __str__(self) -> str:
        return f"{self.mpi.split(',')[0]}, XLA FFI {self.ffi}, {self.level or self.machine}"


def target() -> EngineTarget | None:
    """The target of the engine in this package; None if the package has none, or no valid description."""
    try:
        return io.decode_json(io.read(DESCRIPTION), EngineTarget)
    except (OSError, ValueError):
        return None


def engine(mpi: str, include: str) -> Path | None:
    """The engine in this package; None if there is none, or if its target differs.

    Args:
        mpi: The version string of this process's MPI library.
        include: The folder of XLA's headers.
    """
    built = target()
    if built is None:
        return None
    version = ffi_version(include)
    if not version or built != EngineTarget(mpi, version, platform.machine(), built.level):
        return None
    return ENGINE if built.level is None or built.level in levels() else None


def ffi_version(include: str) -> str:
    """The version of XLA's FFI according to its headers; empty if they do not define it."""
    text = io.read(Path(include, "xla", "ffi", "api", "c_api.h")).decode()
    numbers: dict[str, str] = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", text))
    return f"{numbers['MAJOR']}.{numbers['MINOR']}" if len(numbers) == 2 else ""


def levels() -> list[str]:
    """The processor levels of `LEVELS` that this machine supports; empty if unknown."""
    try:
        text = CPUINFO.read_text(encoding="utf-8")
    except OSError:
        return []
    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    supported = set(flags.group(1).split()) if flags else set[str]()
    return [level for level, needed in LEVELS.items() if needed <= supported]
