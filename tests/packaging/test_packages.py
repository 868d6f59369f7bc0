"""The wheel and the sdist hold everything, as real files, and run elsewhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from support import mpirun
from support.campaign import parameters

ROOT = Path(__file__).parents[2]
LEFT_OUT = ("*.egg-info", "__pycache__", "build", "dist", "htmlcov", ".*")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Wheel and sdist of a copy of the checkout, links kept; the checkout itself stays as it is."""
    scratch = tmp_path_factory.mktemp("packages")
    copy = scratch / "copy"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(scratch), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = scratch.glob("*.whl")
    (sdist,) = scratch.glob("*.tar.gz")
    return wheel, sdist


def shipped() -> set[str]:
    """The contents of the packages: every module and every file that the command reads."""
    paths = {path.relative_to(ROOT).as_posix() for path in (ROOT / "commplan").rglob("*.py")}
    for room in ("dsl", "lowering", "runtime"):
        for path in (ROOT / room).rglob("*"):
            if path.suffix in (".py", ".lark", ".json"):
                paths.add("commplan/" + path.relative_to(ROOT).as_posix())
    paths |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "commplan" / "pages").glob("*.md")}
    engine = ROOT / "lowering" / "mpi" / "engine"
    paths |= {f"commplan/{path.relative_to(ROOT).as_posix()}" for path in engine.glob("*.*")}
    templates = ROOT / "commplan" / "cli" / "templates"
    paths |= {path.relative_to(ROOT).as_posix() for path in templates.glob("*") if path.is_file()}
    return {name for name in paths if "__pycache__" not in name} | {"commplan/py.typed"}


def test_the_wheel_holds_every_file_and_no_link(built: tuple[Path, Path]):
    with zipfile.ZipFile(built[0]) as wheel:
        names = {name for name in wheel.namelist() if name.startswith("commplan/")}
        folders = {name.split("/")[0] for name in wheel.namelist()} - {"commplan"}
        links = [
            info.filename for info in wheel.infolist() if (info.external_attr >> 16) & 0o170000 == 0o120000
        ]
        tables = wheel.read("commplan/dsl/plan.tables.json")
    assert shipped() <= names
    assert not links
    assert all(name.endswith(".dist-info") for name in folders)
    assert tables == (ROOT / "dsl" / "plan.tables.json").read_bytes()


def test_the_sdist_holds_every_file_and_no_link(built: tuple[Path, Path]):
    with tarfile.open(built[1]) as sdist:
        names = {member.name.partition("/")[2] for member in sdist.getmembers()}
        links = [member.name for member in sdist.getmembers() if member.issym() or member.islnk()]
    assert shipped() <= names
    assert {"pyproject.toml", "README.md", "LICENSE"} <= names
    assert not links


def installed(package: Path, home: Path) -> tuple[Path, Path]:
    """Python of a new environment that has the package, and the folder of the package.

    Our dependencies are added by path, without a network; `make packages` installs them, too.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True, timeout=120)
    site = sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)})
    install = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps"]
    install += [
        "--no-build-isolation",
        "--no-warn-script-location",
        "--quiet",
        "--target",
        site,
        str(package),
    ]
    done = subprocess.run(install, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (Path(site) / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return home / "bin" / "python", Path(site)


@pytest.mark.parametrize("which", parameters(["wheel"], ["sdist"]))
def test_it_runs_installed_in_an_environment_of_its_own(built: tuple[Path, Path], which: str, tmp_path: Path):
    home = tmp_path / "home"
    python, _ = installed(built[0] if which == "wheel" else built[1], home)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(python), "-c", "import sys; from commplan.cli import main; sys.exit(main())", *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=tmp_path,
            env=environment,
            check=False,
        )

    where = subprocess.run(
        [str(python), "-c", "import commplan; print(commplan.__file__)"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env=environment,
        check=True,
    )
    assert Path(where.stdout.strip()).is_relative_to(home)
    plans = sorted(str(path) for path in (ROOT / "examples" / "plans").glob("*.plan"))
    assert len(plans) >= 15
    done = command("check", *plans)
    assert done.returncode == 0, done.stdout + done.stderr
    page = command("explain", "CP0001")
    assert page.returncode == 0
    assert "CP0001" in page.stdout


RANK = """
from mpi4py import MPI
import numpy as np
import commplan
from commplan.lowering.mpi import build

text = "plan p\\naxis data = ?\\ninput x : f32[5] partial data\\n"
plan = commplan.loads(text + "each step {\\n x = reduce x over data by sum via ring\\n output x\\n}")
run = plan.compile(MPI.COMM_WORLD).bind(MPI.COMM_WORLD)
out, _ = run.step({}, x=np.full(5, MPI.COMM_WORLD.rank + 1, np.float32))
assert out.x.tolist() == [3.0] * 5
if MPI.COMM_WORLD.rank == 0:
    print(build.library()._name)
"""


@pytest.mark.campaign
def test_a_wheel_with_the_engine_needs_no_compiler(built: tuple[Path, Path], tmp_path: Path):
    """Without a compiler, ranks run with the engine shipped with the package."""
    mpirun.needs_mpi()
    command = [sys.executable, "-m", "commplan.lowering.mpi.prebuilt.wheel", str(built[0])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    wheel = Path(done.stdout.strip())
    assert wheel.name.startswith(f"{built[0].name.removesuffix('-py3-none-any.whl')}-1openmpi5.")
    python, site = installed(wheel, tmp_path / "home")
    cache = tmp_path / "cache"
    environment = {name: value for name, value in mpirun.environment().items() if name != "PYTHONPATH"}
    environment |= {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(cache)}
    environment["LD_LIBRARY_PATH"] = str(Path(sys.prefix, "lib"))  # mpi4py looks next to its Python
    words = mpirun.command(2, RANK, forked=False)
    words[words.index(sys.executable)] = str(python)
    where: dict[str, Any] = {"cwd": tmp_path, "env": environment}
    done = subprocess.run(words, **where, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    engine = site / "commplan" / "lowering" / "mpi" / "prebuilt" / "engine.so"
    assert (done.stdout.strip(), cache.exists()) == (str(engine), False)
    command = [str(python), "-m", "commplan", "--version"]
    version = subprocess.run(command, **where, capture_output=True, text=True, check=True)
    assert "MPI engine for Open MPI v5." in version.stdout
