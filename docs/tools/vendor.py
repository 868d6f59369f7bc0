"""Libraries that the pages use, from npm and PyPI, checked by digest and served by the site itself."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import tarfile
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


PACKAGES = (
    Package(
        "mermaid",
        "11.17.2",
        "sha512-V6K3C8EBdEsPFZXSKMJe6ppQOENxuHARr9GvHX4hh47lAbhMRD9qf4oEK7LoaRQxULMa80/qt5gHO73aCleBBg==",
        ("dist/mermaid.min.js",),
    ),
)
MERMAID = "https://unpkg.com/mermaid@11/dist/mermaid.min.js"
# What the theme would load from another host, as it stands in its script, and what it is to load instead.
ELSEWHERE = {
    MERMAID: 'new URL("assets/vendor/mermaid.min.js",__md_scope).href',
    "https://unpkg.com/resize-observer-polyfill": '"data:text/javascript,"',  # for browsers of before 2020
}


def install(site: str) -> None:
    """Puts the files of all packages into `assets/vendor` of the built site, and points the theme at them.

    Raises SystemExit where a package is not to be had or not the pinned one, or the theme has changed.
    """
    place = Path(site) / "assets" / "vendor"
    place.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        folder = unpacked(package)
        for name in package.files:
            shutil.copyfile(folder / name, place / Path(name).name)
    (script,) = (Path(site) / "assets" / "javascripts").glob("bundle.*.min.js")
    text = script.read_text(encoding="utf-8")
    for address, instead in ELSEWHERE.items():
        if text.count(f'"{address}"') != 1:
            raise SystemExit(f"{script.name} does not load {address} once: see docs/tools/vendor.py")
        text = text.replace(f'"{address}"', instead)
    script.write_text(text, encoding="utf-8")
    for superfluous in script.parent.glob("*.map"):
        superfluous.unlink()


def unpacked(package: Package) -> Path:
    """The folder with the files of `package`, fetched with npm the first time."""
    folder = CACHE / f"{package.name}-{package.version}"
    if folder.is_dir():
        return folder
    if shutil.which("npm") is None:
        raise SystemExit(
            "the manual needs npm, to fetch what its pages are drawn with (Debian: apt install npm)"
        )
    CACHE.mkdir(parents=True, exist_ok=True)
    wanted = f"{package.name}@{package.version}"
    done = subprocess.run(
        ["npm", "pack", "--silent", "--ignore-scripts", wanted],
        cwd=CACHE,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"npm could not fetch {wanted}:\n{done.stderr}")
    archive = CACHE / done.stdout.split()[-1]
    digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if f"sha512-{digest}" != package.integrity:
        raise SystemExit(f"{wanted} is not the archive that it was: its digest is sha512-{digest}")
    unfinished = folder.with_suffix(".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    with tarfile.open(archive) as packed:
        for name in package.files:
            member = packed.getmember(f"package/{name}")
            member.name = name
            packed.extract(member, unfinished, filter="data")
    archive.unlink()
    unfinished.rename(folder)
    return folder
