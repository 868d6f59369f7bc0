"""Use of an engine shipped with the package: only if everything matches its build."""

from __future__ import annotations

import platform
from pathlib import Path

import msgspec
import pytest

from commplan.lowering.mpi import prebuilt
from commplan.lowering.mpi.prebuilt import LEVELS, EngineTarget

HERE = EngineTarget("Open MPI v5.0.11, package: Debian", "0.3", platform.machine(), None)


@pytest.fixture
def include(tmp_path: Path) -> str:
    """XLA's headers of version 0.3."""
    header = tmp_path / "xla" / "ffi" / "api" / "c_api.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define XLA_FFI_API_MAJOR 0\n#define XLA_FFI_API_MINOR 3\n")
    return str(tmp_path)


def described(folder: Path, monkeypatch: pytest.MonkeyPatch, target: EngineTarget) -> None:
    path = folder / "engine.json"
    path.write_bytes(msgspec.json.encode(target))
    monkeypatch.setattr(prebuilt, "DESCRIPTION", path)


def test_a_package_without_one(include: str) -> None:
    assert prebuilt.target() is None and prebuilt.engine(HERE.mpi, include) is None


@pytest.mark.parametrize(
    "other", [{}, {"mpi": "MPICH Version: 4.3"}, {"ffi": "0.2"}, {"machine": "riscv"}, {"level": "x86-64-v3"}]
)
def test_all_must_be_as_it_was_compiled_for(
    include: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: dict[str, str]
) -> None:
    described(tmp_path, monkeypatch, msgspec.structs.replace(HERE, **other))
    monkeypatch.setattr(prebuilt, "levels", list)
    assert prebuilt.engine(HERE.mpi, include) == (None if other else prebuilt.ENGINE)


def test_headers_that_name_no_version_fit_no_engine(
    include: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(include, "xla/ffi/api/c_api.h").write_text("#pragma once\n")
    described(tmp_path, monkeypatch, msgspec.structs.replace(HERE, ffi=prebuilt.ffi_version(include)))
    assert prebuilt.engine(HERE.mpi, include) is None


def test_the_processor_has_all_that_was_assumed(
    include: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described(tmp_path, monkeypatch, msgspec.structs.replace(HERE, level="x86-64-v3"))
    cpuinfo = tmp_path / "cpuinfo"
    flags = sorted(LEVELS["x86-64-v3"])
    monkeypatch.setattr(prebuilt, "CPUINFO", cpuinfo)
    for supported, expected in ((flags, prebuilt.ENGINE), (flags[1:], None)):
        cpuinfo.write_text(f"processor\t: 0\nflags\t\t: fpu {' '.join(supported)}\n")
        assert prebuilt.engine(HERE.mpi, include) == expected


def test_a_description_that_cannot_be_read_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "engine.json"
    path.write_text('{"mpi": 3}')
    monkeypatch.setattr(prebuilt, "DESCRIPTION", path)
    assert prebuilt.target() is None
