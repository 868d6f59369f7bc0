"""Run the command, and convert errors to messages and exit codes.

Each verb is a module of `commplan.cli.verbs`, which is imported when it runs.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from commplan.cli.arguments import parse, parser
from commplan.cli.console import Console, silence
from commplan.diagnostics import CommplanError, Diagnostic, text_of

PROBLEMS = 1  # exit code for errors in the input
FAILURE = 2  # exit code for invalid usage and internal errors
BROKEN_PIPE = 141  # exit code if the reader of the output has closed it: 128 + SIGPIPE


def run(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv` (default: the process's arguments) and return its exit code."""
    _print_anything()
    if "_ARGCOMPLETE" in os.environ:  # shell completion; does not return
        import argcomplete

        argcomplete.autocomplete(parser())  # pyright: ignore[reportUnknownMemberType]
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
    except SystemExit as leaving:  # argparse printed an error or the help, which still has to be flushed
        code = leaving.code if isinstance(leaving.code, int) else FAILURE
        return _run_to_exit_code(lambda console: code, Console())
    verb = import_module(f"commplan.cli.verbs.{args.verb}")
    # The files that the verb reads, which the console does not overwrite.
    flags = ("file", "shapes", "calibration", "plan", "recorded", "step_profile")
    paths = [getattr(args, flag, None) for flag in flags]
    topology: str | list[str] | None = getattr(args, "topology", None)
    paths += [topology] if isinstance(topology, str) else topology or ()
    paths += getattr(args, "records", None) or ()
    if getattr(args, "output", None):  # otherwise the files may be rewritten in place
        paths += getattr(args, "files", None) or ()
    inputs = [path for path in paths if path]
    return _run_to_exit_code(
        lambda console: verb.run(args, console), Console(args.color, args.format, inputs)
    )


def _run_to_exit_code(work: Callable[[Console], int], console: Console) -> int:
    """Run `work` and return its exit code, or that of an error in it or in its output."""
    try:
        code = work(console)
        console.flush()
    except CommplanError as error:
        return _report_error(error, console)
    except BrokenPipeError:
        return _discard_output()
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:  # `Path.exists` and others raise this
            return _internal(error, console)
        message = f"cannot open {error.filename}: {error.strerror}"
        return _report_error(CommplanError(Diagnostic("CP0001", message, None)), console)
    except Exception as error:  # noqa: BLE001  users see a message instead of a traceback
        return _internal(error, console)
    return code


def _report_error(error: CommplanError, console: Console) -> int:
    """Print an error of the input, and return the exit code."""
    try:
        console.refuse(error.diagnostics)
        console.flush()
    except BrokenPipeError:
        return _discard_output()
    except CommplanError:  # stdout is not writable, so print to stderr
        if not console.is_human:
            Console("never").report(error.diagnostics)
        silence(sys.stdout)
    return PROBLEMS


def _discard_output() -> int:
    """Discard all further output, since its reader has closed it."""
    silence(sys.stdout, sys.stderr)
    return BROKEN_PIPE


def _internal(error: Exception, console: Console) -> int:
    """Print a defect of commplan with its last line, and return the exit code.

    Raises `error` itself with `COMMPLAN_TRACEBACK=1`.
    """
    if os.environ.get("COMMPLAN_TRACEBACK"):
        raise error
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    location = f" at {Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace else ""
    console.say(f"internal failure: {text_of(error)}{location}")
    console.say(
        "this is a bug in commplan, not an error in your plan; COMMPLAN_TRACEBACK=1 shows the traceback"
    )
    return FAILURE


def _print_anything() -> None:
    """Make output robust: replace characters that the encoding lacks, and reopen closed streams."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123
        reconfigure = getattr(getattr(sys, name), "reconfigure", None)
        if reconfigure:
            reconfigure(errors="backslashreplace")
