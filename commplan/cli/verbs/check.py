"""`commplan check`: report errors and likely mistakes in plans, and apply safe repairs."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from commplan import dsl, io
from commplan.cli.argument_types import once
from commplan.cli.console import STDIN, Console, name_of
from commplan.cli.saved import plan_text
from commplan.cli.shapes import is_function, read_shapes
from commplan.diagnostics import CommplanError, Diagnostic, Note, Severity, did_you_mean, fail, plural

if TYPE_CHECKING:
    from commplan.ir.plan import Plan
    from commplan.lint import LintInputs

PERIOD_S = 0.2  # polling interval of --watch, in seconds


def run(args: Namespace, console: Console) -> int:
    """Check every file, repeatedly under --watch.

    Returns:
        1 if a file has an error, a warning under --strict, or a repair under --diff; otherwise 0.

    Raises:
        CommplanError: an error of the flags or of the files that they name; or CP1101. Errors of plans are
            printed.
    """
    if args.watch:
        shapes = None if is_function(args.shapes or "") else args.shapes
        watched = [shapes, args.topology, args.calibration, *args.program]
        _watch([*args.files, *filter(None, watched)], lambda: _again(args, console), console)
    return _check_all(args, console)


def _watch(paths: Sequence[str], work: Callable[[], object], console: Console) -> NoReturn:
    """Call `work` immediately and after every change of one of `paths`, until KeyboardInterrupt."""
    while True:
        states = [_state(path) for path in paths]
        work()
        console.note(f"watching {', '.join(paths)}; stop with Ctrl-C")
        console.flush()
        sys.stderr.flush()
        while [_state(path) for path in paths] == states:
            time.sleep(PERIOD_S)


def _state(path: str) -> tuple[int, int, int] | None:
    """Properties that change with a file's contents; None if it does not exist.

    An editor may be replacing the file.
    """
    try:
        stat = Path(path).stat()
    except (OSError, ValueError):
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _again(args: Namespace, console: Console) -> None:
    """Check once during a watch, which continues after errors."""
    try:
        _check_all(args, console)
    except CommplanError as error:
        console.report(error.diagnostics)


def _check_all(args: Namespace, console: Console) -> int:
    """Check every file once; returns the exit code."""
    inputs = _lint_inputs(args, console)
    diagnostics: list[Diagnostic] = []
    repairs: list[tuple[str, int, str]] = []  # path, number of repairs and repaired text
    changes = ""
    for path in args.files:
        try:
            text = plan_text(path, console)
            if args.diff:
                changes += _change(path, text, inputs, console)
            elif args.fix:
                text, count = _repair(path, text, inputs, console)
                repairs.append((path, count, text))
            diagnostics += _diagnostics(text, name_of(path), inputs)
        except CommplanError as error:
            diagnostics += error.diagnostics
    console.put(changes)
    _report(diagnostics, repairs, args, console)
    errors = any(d.severity is Severity.ERROR for d in diagnostics)
    return int(errors or bool(changes) or (args.strict and bool(diagnostics)))


def _diagnostics(text: str, name: str, inputs: LintInputs) -> Sequence[Diagnostic]:
    """The errors of a text, or its warnings if it has no errors. `name` is its file, for messages."""
    from commplan.lint import lint

    analysis = dsl.analyze(text, name)
    if analysis.plan is None:
        return analysis.diagnostics
    return unknown_sources(analysis.plan, inputs.records) or lint(analysis, inputs)


def unknown_sources(plan: Plan, records: Mapping[str, int]) -> list[Diagnostic]:
    """CP1108 for lengths of sources that the plan does not declare."""
    declared = [source.name for source in plan.sources]
    return [
        Diagnostic(
            "CP1108", f"--records {name}: the plan has no source `{name}`", None,
            (Note(did_you_mean(name, declared, "it declares:")),), file=plan.file,
        )
        for name in records
        if name not in declared
    ]  # fmt: skip


def _change(path: str, text: str, inputs: LintInputs, console: Console) -> str:
    """A diff of the repairs; empty if there are none."""
    from commplan.cli.verbs.fmt import unified_diff
    from commplan.lint.repairs import repair

    name = name_of(path)
    better, _ = repair(text, lambda candidate: _diagnostics(candidate, name, inputs))
    return unified_diff(text, better, name, "repaired", console.color(sys.stdout))


def _repair(path: str, text: str, inputs: LintInputs, console: Console) -> tuple[str, int]:
    """Apply safe repairs, and write the text back unless it came from stdin.

    Returns:
        The repaired text, and the number of repairs.

    Raises:
        CommplanError: CP1101 if the file has changed since it was read, or cannot be written.
    """
    from commplan.lint.repairs import repair

    better, count = repair(text, lambda candidate: _diagnostics(candidate, name_of(path), inputs))
    if count and path != STDIN:
        if io.read(path) != text.encode():
            fail(
                "CP1101",
                f"cannot write {path}: it has changed since it was read",
                "check it again",
                file=path,
            )
        console.write(path, better.encode())
    console.texts[name_of(path)] = better
    return better, count


def _report(
    diagnostics: Sequence[Diagnostic],
    repairs: Sequence[tuple[str, int, str]],
    args: Namespace,
    console: Console,
) -> None:
    """Print the diagnostics and repairs; `repairs` as in `_check_all`."""
    if args.fix and console.style == "json":
        from commplan.render.machine import counts

        files = [
            {"file": name_of(path), "repairs": count, "text": text if path == STDIN else None}
            for path, count, text in repairs
        ]
        console.document(diagnostics, files=files, summary=counts(diagnostics))
        return
    for path, count, text in repairs:
        if path == STDIN:
            console.put(text)
        if count:
            console.note(f"{plural(count, 'repair')} in {name_of(path)}")
    console.report(diagnostics)
    if not diagnostics:
        console.note(f"{plural(len(args.files), 'plan')}, no problems")


def _lint_inputs(args: Namespace, console: Console) -> LintInputs:
    """The information from flags that lints use.

    Raises:
        CommplanError: CP1103 and CP1104 for invalid shapes and sizes, CP1116 for an invalid program, or an
            error of loading a file.
    """
    from commplan.lint import LintInputs

    programs = {path: console.read(path) for path in args.program}
    for path, text in programs.items():
        _check_program(path, text)
    inputs = LintInputs(records=once(args.records, "--records"), programs=programs)
    bindings = (
        args.shapes,
        args.topology,
        args.calibration,
        args.passes,
        args.axis or None,
        args.map or None,
    )
    if bindings == (None,) * len(bindings):  # lints that compile the plan are skipped
        return inputs
    from msgspec.structs import replace

    from commplan.cost import load_calibration
    from commplan.pytree import shapes_of
    from commplan.topology import load_topology

    shapes = read_shapes(args.shapes, console) if args.shapes else None
    options = {"mapping": once(args.map, "--map") or None, "passes": args.passes}
    return replace(
        inputs,
        sizes=once(args.axis, "--axis"),
        shapes=None if shapes is None else {name: shapes_of(tree) for name, tree in shapes.items()},
        topology=load_topology(args.topology) if args.topology else None,
        calibration=load_calibration(args.calibration) if args.calibration else None,
        options={**options, "backend": args.backend, "oversubscribe": args.oversubscribe},
    )


def _check_program(path: str, text: str) -> None:
    """Raise CP1116 if the program at `path` is not valid Python."""
    try:
        compile(text, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        fail(
            "CP1116",
            f"{path} is not a Python program: {error}",
            "--program takes the programs that run the plan",
            file=path,
        )
