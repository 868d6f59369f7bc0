"""Libraries that the pages use, from npm and PyPI, checked by digest and served by the site itself."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
CACHE = ROOT / ".make" / "manual"


class Package(NamedTuple):
    """An npm package: the digest of its archive as npm gives it, and the files that the site serves."""

    name: str
    version: str
    integrity: str
    files: tuple[str, ...]


MERMAID = Package(
    "mermaid",
    "11.17.2",
    "sha512-V6K3C8EBdEsPFZXSKMJe6ppQOENxuHARr9GvHX4hh47lAbhMRD9qf4oEK7LoaRQxULMa80/qt5gHO73aCleBBg==",
    ("dist/mermaid.min.js",),
)
PYODIDE = Package(
    "pyodide",
    "314.0.7",
    "sha512-0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R1A==",
    ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json"),
)
# The packages that the playground installs in Pyodide, by digest, and their Python.
WHEELS = Path(__file__).parent / "browser.txt"
BROWSER = (
    "--python-version=3.14", "--abi=cp314", "--abi=none",
    "--platform=pyemscripten_2026_0_wasm32", "--platform=any",
)  # fmt: skip
# The URLs in the theme's script that point to other hosts, and their replacements.
ELSEWHERE = {
    "https://unpkg.com/mermaid@11/dist/mermaid.min.js":
        'new URL("assets/vendor/mermaid.min.js",__md_scope).href',
    "https://unpkg.com/resize-observer-polyfill": '"data:text/javascript,"',  # for browsers of before 2020
}  # fmt: skip


# A word behind dashes is a flag that is looked for; the theme's search would leave its pages out.
FLAGS = {
    r't.trim().split(/"([^"]+)"/g)':
        r't.trim().replace(/(^|\s)-+(?=\w)/g,"$1").split(/"([^"]+)"/g)',
}  # fmt: skip


def keep_theme_here(site: Path) -> None:
    """Point the theme's script at files of the site, and let the search find flags.

    Raises:
        SystemExit: if the theme has changed.
    """
    copy(MERMAID, site / "assets" / "vendor")
    scripts = site / "assets" / "javascripts"
    _replace(scripts, "bundle.*.min.js", {f'"{address}"': instead for address, instead in ELSEWHERE.items()})
    _replace(scripts, "workers/search.*.min.js", FLAGS)
    for superfluous in scripts.rglob("*.map"):
        superfluous.unlink()


def _replace(folder: Path, pattern: str, changes: Mapping[str, str]) -> None:
    (script,) = folder.glob(pattern)
    text = script.read_text(encoding="utf-8")
    for old, new in changes.items():
        if text.count(old) != 1:
            raise SystemExit(f"{script.name} does not have {old} once: see docs/tools/vendor.py")
        text = text.replace(old, new)
    script.write_text(text, encoding="utf-8")


def copy(package: Package, place: Path) -> None:
    """Copy the files of `package` into `place`; npm fetches them the first time.

    Raises:
        SystemExit: if they cannot be fetched, or differ from the pinned digests.
    """
    place.mkdir(parents=True, exist_ok=True)
    folder = CACHE / f"{package.name}-{package.version}"
    if not folder.is_dir():
        _fetch(package, folder)
    for name in package.files:
        shutil.copyfile(folder / name, place / Path(name).name)


def copy_wheels(place: Path) -> list[str]:
    """Puts the playground's wheels into `place`, fetched with pip the first time; gives their names."""
    digest = hashlib.sha256(WHEELS.read_bytes()).hexdigest()[:16]
    folder = CACHE / f"wheels-{digest}"
    if not folder.is_dir():
        unfinished = folder.with_suffix(".part")
        shutil.rmtree(unfinished, ignore_errors=True)
        pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:")
        wanted = (
            "--require-hashes",
            f"--requirement={WHEELS}",
            f"--dest={unfinished}",
            "--implementation=cp",
        )
        _run([*pip, *BROWSER, *wanted], "pip could not fetch what the playground runs")
        unfinished.rename(folder)
    names = sorted(wheel.name for wheel in folder.glob("*.whl"))
    for name in names:
        shutil.copyfile(folder / name, place / name)
    return names


def _fetch(package: Package, folder: Path) -> None:
    if shutil.which("npm") is None:
        raise SystemExit("the manual needs npm, to fetch what its pages run (Debian: apt install npm)")
    CACHE.mkdir(parents=True, exist_ok=True)
    wanted = f"{package.name}@{package.version}"
    output = _run(["npm", "pack", "--silent", "--ignore-scripts", wanted], f"npm could not fetch {wanted}")
    archive = CACHE / output.split()[-1]
    digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if f"sha512-{digest}" != package.integrity:
        raise SystemExit(f"{wanted} is not the archive that was pinned: its digest is sha512-{digest}")
    unfinished = folder.with_suffix(".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    with tarfile.open(archive) as packed:
        for name in package.files:
            member = packed.getmember(f"package/{name}")
            member.name = name
            packed.extract(member, unfinished, filter="data")
    archive.unlink()
    unfinished.rename(folder)


def _run(command: Sequence[str], failure: str) -> str:
    CACHE.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(command, cwd=CACHE, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{failure}:\n{done.stderr}")
    return done.stdout
