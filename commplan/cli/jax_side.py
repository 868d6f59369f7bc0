"""Run compiled plans under JAX on this machine's devices, with the user's functions and data."""

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

MOST_RANKS = 256  # most CPU devices that one process emulates
_PACKAGE = str(Path(__file__).parents[1])  # the folder of commplan, as in file names of frames


def need(module: str, package: str, code: str = "CP1111", who: str = "this") -> None:
    """Raise a `CommplanError` if a module is not installed.

    Args:
        module: the module.
        package: the argument of `pip install` that installs it.
        code: the code of the error.
        who: the feature that needs the module, for the error.
    """
    if importlib.util.find_spec(module) is None:
        fail(code, f"{who} needs {module}, which is not installed", f"pip install {package}")


def under_mpi(environment: Mapping[str, str]) -> bool:
    """Whether an MPI launcher started this process."""
    return any(name in environment for name in LAUNCHED)


@contextmanager
def user_code() -> Generator[None]:
    """Context for calls of user functions; redirects their output to stderr.

    Stdout is reserved for the artifact.

    Raises:
        CommplanError: CP1112 if a function exits the process.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except SystemExit as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        message = f"a user function raised SystemExit: {error.code}"
        note = "a function must return the values that its line declares, or raise an error with the reason"
        fail("CP1112", message, f'raised at line {last.lineno} of "{last.filename}", in {last.name}', note)


def raised_at(error: BaseException) -> list[str]:
    """A note with the innermost line of user code that raised `error`; empty if there is none."""
    user_frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in frame.filename and not frame.filename.startswith(_PACKAGE)
    ]
    return [
        f'raised at line {frame.lineno} of "{frame.filename}", in {frame.name}' for frame in user_frames[-1:]
    ]


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
    """Bind a compiled plan to a mesh.

    Args:
        schedule: the compiled plan.
        shapes: the shapes passed by the user.
        args: the flags.
        sources: whether the program reads the sources of --source.
        world: the MPI job whose ranks run the program; None to run it on `mesh`.
        mesh: by default one device for each rank; ignored with a `world`.

    Raises:
        CommplanError: CP1107 for too many ranks or missing JAX, CP1108 for missing functions and sources,
            CP1109 for functions that cannot be imported, CP1110 for invalid data.
    """
    functions = functions_of(args)
    data = sources_of(args) if sources else {}
    _check_bindings(schedule, functions, data if sources else None)
    if world is not None:
        world.agree()
        mesh = world.comm
    from commplan.api import Program

    mesh = mesh or device_mesh(schedule.mesh_sizes, getattr(args, "device", "cpu"))
    program = Program(schedule, shapes)
    return program.bind(mesh, sources=data, functions=functions, seed=getattr(args, "seed", 0))


@user_code()
def program_text(compiled: Compiled, args: Namespace, console: Console) -> str:
    """The text of the lowered phases, as --emit specifies (jaxpr or hlo)."""
    run = bind(compiled.schedule, compiled.shapes, args, sources=False)
    from commplan.runtime.rehearse import rehearse

    console.note(f"lowering {len(run.phases)} phases for this machine's CPUs")
    return rehearse.program_text(run, args.emit)


def device_mesh(sizes: Mapping[str, int], device: str | None = "cpu") -> Any:
    """A mesh with axes of `sizes` and one device for each rank.

    Args:
        sizes: sizes of the axes.
        device: see `choose_devices`.

    Raises:
        CommplanError: CP1107 for too many ranks, too few devices, or missing JAX.
    """
    ranks = math.prod(sizes.values())
    if ranks > MOST_RANKS:
        message = f"the plan has {ranks} ranks: one machine can emulate at most {MOST_RANKS}"
        fail("CP1107", message, "declare an axis `?` and give it a smaller size here with --axis NAME=N")
    choose_devices(ranks, device)
    from commplan.runtime.rehearse.rehearse import mesh_for

    return mesh_for(sizes, device)


def choose_devices(devices: int, device: str | None = "cpu") -> None:
    """Configure JAX by environment variables, unless it is already imported.

    Args:
        devices: least number of CPU devices; a larger JAX_NUM_CPU_DEVICES remains.
        device: `cpu` restricts JAX to CPUs; otherwise it uses the devices of the machine.

    Raises:
        CommplanError: CP1107 if JAX is not installed.
    """
    if importlib.util.find_spec("jax") is None:
        fail("CP1107", "this needs JAX, which is not installed", "pip install 'commplan[jax]'")
    if "jax" not in sys.modules:
        if device == "cpu":
            os.environ["JAX_PLATFORMS"] = "cpu"
        previous = os.environ.get("JAX_NUM_CPU_DEVICES", "")
        os.environ["JAX_NUM_CPU_DEVICES"] = str(max(devices, int(previous) if previous.isdecimal() else 1))


def _check_bindings(schedule: ir.Schedule, functions: dict[str, Any], data: dict[str, Any] | None) -> None:
    """Raise CP1108 for all missing and unknown functions and sources together.

    `data` is None if the program reads no sources.
    """
    ops = [op for phase in schedule.phases for op in phase.ops]
    bound = {fn.name for fn in schedule.fns if fn.body is None}
    used = sorted({op.fn for op in ops if isinstance(op, ir.Map | ir.Exchange) and op.fn in bound})
    read = sorted({op.source for op in ops if isinstance(op, ir.Read)})
    wrong = differences(
        "function",
        "--fn {}=MODULE:FUNCTION",
        used,
        [fn.name for fn in schedule.fns if fn.name in bound],
        functions,
    )
    if data is not None:
        wrong += differences("source", "--source {}=DIR", read, [s.name for s in schedule.sources], data)
    fail_if(wrong)


def differences(
    kind: str, flag: str, needed: Sequence[str], declared: Sequence[str], bound: dict[str, Any]
) -> list[Diagnostic]:
    """CP1108 for bound names that are not declared, and for needed names that are not bound.

    Args:
        kind: `function` or `source`, for messages.
        flag: the flag that binds a name, with `{}` for the name.
        needed: names that must be bound.
        declared: names that may be bound.
        bound: values by name.
    """
    declaration = Note(f"it declares: {', '.join(declared) or 'none'}")
    wrong = [
        Diagnostic(
            "CP1108",
            f"the plan has no {kind} `{name}`",
            None,
            (*map(Note, near_note(name, declared)), declaration),
        )
        for name in bound
        if name not in declared
    ]  # fmt: skip
    return wrong + [
        Diagnostic("CP1108", f"{kind} `{name}` is not given", None, (Note(f"give it: {flag.format(name)}"),))
        for name in needed
        if name not in bound
    ]


def functions_of(args: Namespace) -> dict[str, Callable[..., Any]]:
    """The functions of --fn. Raises CP1104 for duplicate names, and as `function_at`."""
    locations = once(args.fn, "--fn")
    return {name: function_at(f"--fn {name}={location}", location) for name, location in locations.items()}


def sources_of(args: Namespace) -> dict[str, Any]:
    """The sources of --source. Raises CP1104 for duplicate names, and as `source_at`."""
    return {name: source_at(name, path) for name, path in once(args.source, "--source").items()}


def function_at(flag: str, location: str) -> Callable[..., Any]:
    """Import the function at MODULE:FUNCTION or FILE.py:FUNCTION.

    Args:
        flag: the flag that named it, for messages.
        location: the location.

    Raises:
        CommplanError: CP1109 if it cannot be imported or is not callable.
    """
    module, colon, attribute = location.rpartition(":")
    if not (colon and module and attribute):
        fail("CP1109", f"{flag}: expected MODULE:FUNCTION or FILE.py:FUNCTION")
    try:
        target: Any = _file(module) if module.endswith(".py") else _module(module)
        missing: tuple[str, ...] = ()
        for part in attribute.split("."):
            if not hasattr(target, part):
                missing = (f"{flag}: {module} has no `{part}`", *near_note(part, dir(target)))
                break
            target = getattr(target, part)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  importing runs the user's own code
        fail("CP1109", f"{flag}: {text_of(error)}")
    if missing:
        fail("CP1109", *missing)
    if not callable(target):
        fail("CP1109", f"{flag} is of type `{type(target).__name__}`, which cannot be called")
    return target


def _module(name: str) -> Any:
    """Import a module, also from the current directory."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    return importlib.import_module(name)


_loaded: dict[str, tuple[Path, int]] = {}  # path and modification time of modules loaded by `_file`


def _file(path: str) -> Any:
    """Import the program in a file, once for each version of it.

    Raises:
        OSError: the file cannot be read.
        ImportError: a loaded module has the same name.
        BaseException: any exception of the program.
    """
    absolute = Path(path).absolute()
    name, version = absolute.stem, (absolute, absolute.stat().st_mtime_ns)
    loaded = sys.modules.get(name)
    if loaded is not None and _loaded.get(name, version) == version:
        if name in _loaded or getattr(loaded, "__file__", None) == str(absolute):
            return loaded
        raise ImportError(f"{path} has the name of the loaded module `{name}`: rename the file")
    spec = importlib.util.spec_from_file_location(name, absolute)
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
    """The records of a source: the files of a folder, or the rows of a .npy file.

    Raises:
        CommplanError: CP0901 or CP0956 for an invalid folder, as `folder`; CP1110 if `path` is neither a
            folder nor a .npy file, or if the file is not a valid array of at least one dimension.
    """
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
        fail("CP1110", f"--source {name}={path} is a single number: expected an array of records")
    return rows


def _mapped_rows(path: str) -> Any:
    """Memory-map the array in a .npy file. Raises OSError, or ValueError if the file is invalid.

    `np.load` would open pipes and devices too.
    """
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
