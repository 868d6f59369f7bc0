"""Runs of the command under JAX: a compiled plan on this machine's devices, with real functions and data."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import os
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commplan import io
from commplan.cli.argument_types import once
from commplan.cli.binding import Compiled
from commplan.cli.console import LAUNCHED, Console
from commplan.diagnostics import Diagnostic, Note, fail, fail_if, near_note, text_of
from commplan.ir import schedule as ir

if TYPE_CHECKING:
    from commplan.runtime.rehearse.mpi import World
    from commplan.runtime.run import Run

MOST_RANKS = 256
_PACKAGE = str(Path(__file__).parents[1])


def need(module: str, package: str, code: str = "CP1111", who: str = "this") -> None:
    """Raises `code` where a module is not installed."""
    if importlib.util.find_spec(module) is None:
        fail(code, f"{who} needs {module}, which is not installed", f"pip install {package}")


def under_mpi(environment: Mapping[str, str]) -> bool:
    return any(name in environment for name in LAUNCHED)


@contextmanager
def user_code() -> Generator[None]:
    """Around calls of users' functions: what they print goes to stderr, since stdout has the artefact.

    Raises CP1112 where one ends the process.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except SystemExit as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        message = f"a function left the command with SystemExit: {error.code}"
        note = "a function returns what its line declares, or raises an error that says why it cannot"
        fail("CP1112", message, f'raised at line {last.lineno} of "{last.filename}", in {last.name}', note)


def raised_at(error: BaseException) -> list[str]:
    """Where in the user's own code `error` was raised, as a note; none where it was not."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "site-packages" not in f.filename and not f.filename.startswith(_PACKAGE)]
    return [f'raised at line {frame.lineno} of "{frame.filename}", in {frame.name}' for frame in own[-1:]]


@user_code()
def bind(
    schedule: ir.Schedule,
    shapes: dict[str, Any],
    args: Namespace,
    *,
    sources: bool,
    world: World | None = None,
    mesh: Any = None,
) -> Run:
    """A run of a compiled plan on `mesh`, by default one device for each rank, or on the ranks of `world`.

    `sources`: whether its data is needed too. Raises CP1107 for too many ranks or no JAX, CP1108 for
    functions and sources that are not given, CP1109 for functions that cannot be found, CP1110 for data.
    """
    functions = functions_of(args)
    data = sources_of(args) if sources else {}
    _check_given(schedule, functions, data if sources else None)
    if world is not None:
        world.agree()
        mesh = world.comm
    from commplan.api import Program

    mesh = mesh or device_mesh(schedule.mesh_sizes, getattr(args, "device", "cpu"))
    program = Program(schedule, shapes)
    return program.bind(mesh, sources=data, functions=functions, seed=getattr(args, "seed", 0))


@user_code()
def program_text(done: Compiled, args: Namespace, console: Console) -> str:
    """The lowered phases, for --emit jaxpr and hlo."""
    run = bind(done.schedule, done.shapes, args, sources=False)
    from commplan.runtime.rehearse import rehearse

    console.note(f"lowering {len(run.phases)} phases for this machine's CPUs")
    return rehearse.program_text(run, args.emit)


def device_mesh(sizes: Mapping[str, int], device: str | None = "cpu") -> Any:
    """A mesh of devices with axes of `sizes`, one device for each rank.

    device: see `choose_devices`. Raises CP1107 for too many ranks, too few devices, or no JAX.
    """
    ranks = math.prod(sizes.values())
    if ranks > MOST_RANKS:
        message = f"the plan has {ranks} ranks: one machine plays at most {MOST_RANKS}"
        fail("CP1107", message, "declare an axis `?` and give it a smaller size here with --axis NAME=N")
    choose_devices(ranks, device)
    from commplan.runtime.rehearse.rehearse import mesh_for

    return mesh_for(sizes, device)


def choose_devices(devices: int, device: str | None = "cpu") -> None:
    """Configure JAX before it is imported. Raises CP1107 if there is no JAX.

    Args:
        devices: the number of CPU devices.
        device: `cpu` and JAX finds CPU devices alone; `gpu` or None, and it finds what the machine has.
    """
    if importlib.util.find_spec("jax") is None:
        fail("CP1107", "this needs JAX, which is not installed", "pip install 'commplan[jax]'")
    if "jax" not in sys.modules:
        if device == "cpu":
            os.environ["JAX_PLATFORMS"] = "cpu"
        asked = os.environ.get("JAX_NUM_CPU_DEVICES", "")
        os.environ["JAX_NUM_CPU_DEVICES"] = str(max(devices, int(asked) if asked.isdecimal() else 1))


def _check_given(schedule: ir.Schedule, functions: dict[str, Any], data: dict[str, Any] | None) -> None:
    """Everything that is missing or unknown, at once (CP1108)."""
    ops = [op for phase in schedule.phases for op in phase.ops]
    used = sorted({op.fn for op in ops if isinstance(op, ir.Map | ir.Exchange)})
    read = sorted({op.source for op in ops if isinstance(op, ir.Read)})
    wrong = differences(
        "function", "--fn {}=MODULE:FUNCTION", used, [f.name for f in schedule.fns], functions
    )
    if data is not None:
        wrong += differences("source", "--source {}=DIR", read, [s.name for s in schedule.sources], data)
    fail_if(wrong)


def differences(
    kind: str, flag: str, needed: Sequence[str], declared: Sequence[str], given: dict[str, Any]
) -> list[Diagnostic]:
    known = Note(f"it declares: {', '.join(declared) or 'none'}")
    wrong = [
        Diagnostic(
            "CP1108", f"the plan has no {kind} `{name}`", None, (*map(Note, near_note(name, declared)), known)
        )
        for name in given
        if name not in declared
    ]  # fmt: skip
    return wrong + [
        Diagnostic("CP1108", f"{kind} `{name}` is not given", None, (Note(f"give it: {flag.format(name)}"),))
        for name in needed
        if name not in given
    ]


def functions_of(args: Namespace) -> dict[str, Callable[..., Any]]:
    """What --fn gives. Raises CP1104 for a name that is given twice, and as `function_at`."""
    given = once(args.fn, "--fn")
    return {name: function_at(f"--fn {name}={where}", where) for name, where in given.items()}


def sources_of(args: Namespace) -> dict[str, Any]:
    """What --source gives. Raises CP1104 for a name that is given twice, and as `source_at`."""
    return {name: source_at(name, path) for name, path in once(args.source, "--source").items()}


def function_at(flag: str, where: str) -> Callable[..., Any]:
    """The function at MODULE:FUNCTION, or FILE.py:FUNCTION; `flag` is how it was asked for. Raises CP1109."""
    place, colon, attribute = where.rpartition(":")
    if not (colon and place and attribute):
        fail("CP1109", f"{flag}: expected MODULE:FUNCTION or FILE.py:FUNCTION")
    try:
        target: Any = _file(place) if place.endswith(".py") else _module(place)
        missing: tuple[str, ...] = ()
        for part in attribute.split("."):
            if not hasattr(target, part):
                missing = (f"{flag}: {place} has no `{part}`", *near_note(part, dir(target)))
                break
            target = getattr(target, part)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  importing runs the user's own code
        fail("CP1109", f"{flag}: {text_of(error)}")
    if missing:
        fail("CP1109", *missing)
    if not callable(target):
        fail("CP1109", f"{flag} is a {type(target).__name__}, which cannot be called")
    return target


def _module(name: str) -> Any:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    return importlib.import_module(name)


_loaded: dict[str, tuple[Path, int]] = {}  # of modules that `_file` made: path, and when it was changed


def _file(path: str) -> Any:
    """The program in a file, run once as long as it does not change. Raises ImportError where it cannot be
    read, or is called like another module that is loaded already."""
    place = Path(path).absolute()
    name, version = place.stem, (place, place.stat().st_mtime_ns)
    loaded = sys.modules.get(name)
    if loaded is not None and _loaded.get(name, version) == version:
        if name in _loaded or getattr(loaded, "__file__", None) == str(place):
            return loaded
        raise ImportError(f"{path} is called like the module `{name}`, which is loaded: give it another name")
    spec = importlib.util.spec_from_file_location(name, place)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {path}")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    _loaded[name] = version
    return module


def source_at(name: str, path: str) -> Any:
    """Records: the files of a folder, or the rows of a .npy file. Raises CP0901 and CP1110."""
    from commplan.runtime.input.sources.folders import folder

    if Path(path).is_dir():
        return folder(path)
    if not path.endswith(".npy"):
        fail("CP1110", f"--source {name}={path} is neither a folder nor a .npy file")
    try:
        rows = _mapped_rows(path)
    except (OSError, ValueError) as error:
        fail("CP1110", f"--source {name}={path} cannot be read: {getattr(error, 'strerror', None) or error}")
    if rows.ndim == 0:
        fail("CP1110", f"--source {name}={path} holds one number: expected an array whose rows are records")
    return rows


def _mapped_rows(path: str) -> Any:
    """The array in a .npy file, mapped. Raises OSError, and ValueError for a file that holds none."""
    import numpy as np

    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    with os.fdopen(io.open_file(path), "rb") as file:
        version = np.lib.format.read_magic(file)
        if version not in readers:
            raise ValueError(f"it has version {version} of the format")
        try:
            shape, fortran, dtype = readers[version](file)
        except Exception as error:  # noqa: BLE001  NumPy has Python's parser read the header
            raise ValueError(f"its header is damaged: {error}") from None
        if dtype.hasobject:
            raise ValueError("it holds Python objects")
        try:
            return np.memmap(file, dtype, "r", file.tell(), shape, "F" if fortran else "C")
        except (OverflowError, TypeError) as error:
            raise ValueError(str(error)) from None
