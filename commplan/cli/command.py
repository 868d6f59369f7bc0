"""From `sys.argv` to an exit code: 0 all is well, 1 problems with what was given, 2 usage or failure."""

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

CLEAN, PROBLEMS, FAILURE = 0, 1, 2
BROKEN_PIPE = 141  # 128 + SIGPIPE


def run(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv` (default: the process's arguments) and return its exit code."""
    _print_anything()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks how the line may go on; this does not return
        import argcomplete

        argcomplete.autocomplete(parser())  # pyright: ignore[reportUnknownMemberType]
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
    except SystemExit as leaving:  # argparse has said why, or printed the help: more than stdout may take
        code = leaving.code if isinstance(leaving.code, int) else FAILURE
        return _finished(lambda console: code, Console())
    verb = import_module(f"commplan.cli.verbs.{args.verb}")
    flags = ("file", "shapes", "calibration", "plan", "recorded", "step_profile")
    given = [getattr(args, flag, None) for flag in flags]
    topology: str | list[str] | None = getattr(args, "topology", None)
    given += [topology] if isinstance(topology, str) else topology or ()
    given += getattr(args, "records", None) or ()
    if getattr(args, "output", None):  # else files may be those that are rewritten
        given += getattr(args, "files", None) or ()
    inputs = [path for path in given if path]
    return _finished(lambda console: verb.run(args, console), Console(args.color, args.format, inputs))


def _finished(work: Callable[[Console], int], console: Console) -> int:
    """The exit code of `work`, or of what keeps it or its output from its end."""
    try:
        code = work(console)
        console.flush()
    except CommplanError as error:
        return _refused(error, console)
    except BrokenPipeError:
        return _reader_gone()
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:  # which `Path.exists` and others raise
            return _internal(error, console)
        message = f"cannot open {error.filename}: {error.strerror}"
        return _refused(CommplanError(Diagnostic("CP0001", message, None)), console)
    except Exception as error:  # noqa: BLE001  the last line of defence: say it, never show a user a traceback
        return _internal(error, console)
    return code


def _refused(error: CommplanError, console: Console) -> int:
    try:
        console.refuse(error.diagnostics)
        console.flush()
    except BrokenPipeError:
        return _reader_gone()
    except CommplanError:  # stdout takes nothing: people read it on stderr
        if not console.human:
            Console("never").report(error.diagnostics)
        silence(sys.stdout)
    return PROBLEMS


def _reader_gone() -> int:
    """The reader of our output has closed it: write nothing more, not even at exit."""
    silence(sys.stdout, sys.stderr)
    return BROKEN_PIPE


def _internal(error: Exception, console: Console) -> int:
    if os.environ.get("COMMPLAN_TRACEBACK"):
        raise error
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    place = f" at {Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace else ""
    console.say(f"internal failure: {text_of(error)}{place}")
    console.say("this is a mistake in commplan, not in your plan; COMMPLAN_TRACEBACK=1 shows the traceback")
    return FAILURE


def _print_anything() -> None:
    """File names and plans may hold characters that the terminal's encoding lacks; streams may be closed."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123
        reconfigure = getattr(getattr(sys, name), "reconfigure", None)
        if reconfigure:
            reconfigure(errors="backslashreplace")
