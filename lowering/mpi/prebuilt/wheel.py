"""Makes a wheel with a compiled engine from one without.

    python -m commplan.lowering.mpi.prebuilt.wheel dist/commplan-0.1.0-py3-none-any.whl

The new wheel is written to the same folder. Its build tag names the MPI library that mpi4py has loaded, which
the wheel requires and does not contain. Needs the package `wheel`.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import jax
import msgspec
from mpi4py import MPI

from commplan.lowering.mpi import build
from commplan.lowering.mpi.prebuilt import DESCRIPTION, ENGINE, EngineTarget, ffi_version, levels

# The linker is not MPI's compiler wrapper, which would store the local path of the library in the engine.
_LINKER = (os.environ.get("CXX", "c++"), "-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL")


def compiled_wheel(wheel: Path) -> Path:
    """Write the wheel with an engine, next to `wheel`, which has none. Returns its path.

    Raises:
        CommplanError: CP0830 if the engine cannot be compiled.
        CalledProcessError: If the tool `wheel` cannot read or write the wheel.
    """
    vendor, numbers = MPI.get_vendor()
    level = next(iter(levels()), None)
    description = EngineTarget(
        build.mpi_version(), ffi_version(jax.ffi.include_dir()), platform.machine(), level
    )
    with tempfile.TemporaryDirectory() as folder:
        _wheel("unpack", str(wheel), "--dest", folder)
        (tree,) = Path(folder).iterdir()  # must run before the folder contains other files
        inside = tree / "commplan" / "lowering" / "mpi" / "prebuilt"
        options = [f"-march={level}"] if level else []
        objects = build.compile_objects(build.compiler_command(), options, Path(folder))
        build.link([*_LINKER, *objects, str(build.mpi_library())], inside / ENGINE.name)
        (inside / DESCRIPTION.name).write_bytes(msgspec.json.encode(description))
        (metadata,) = tree.glob("*.dist-info/WHEEL")
        text = metadata.read_text(encoding="utf-8").replace("Root-Is-Purelib: true", "Root-Is-Purelib: false")
        system = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        metadata.write_text(text.replace("Tag: py3-none-any", f"Tag: py3-none-{system}"), encoding="utf-8")
        tag = f"1{vendor.lower().replace(' ', '')}{'.'.join(map(str, numbers))}"
        _wheel("pack", str(tree), "--build-number", tag, "--dest-dir", str(wheel.parent))
        return wheel.parent / f"{tree.name}-{tag}-py3-none-{system}.whl"


def _wheel(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "wheel", *words], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    for path in sys.argv[1:]:
        print(compiled_wheel(Path(path)))
