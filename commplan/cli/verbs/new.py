"""`commplan new`: create a plan and a training program from a template."""

from __future__ import annotations

import os
import shlex
from argparse import Namespace
from pathlib import Path

from commplan import io
from commplan.cli.console import Console
from commplan.cli.template_files import template, templates
from commplan.diagnostics import did_you_mean, fail

_SUFFIXES = (".plan", ".py")  # the files of a template: the plan and the program


def run(args: Namespace, console: Console) -> int:
    """Write the files of the template `args.template`, or list the templates without one.

    Raises:
        CommplanError: CP1105 for an unknown template, CP1106 if a file exists, CP1101 if a file cannot be
            written.
    """
    available = templates()
    if args.template is None:
        return _list(available, console)
    name = args.template
    if name not in available:
        fail("CP1105", f"there is no template `{name}`", did_you_mean(name, available, "there are:"))
    folder = Path(args.into)
    targets = [folder / f"{name}{suffix}" for suffix in _SUFFIXES]
    existing = [str(target) for target in targets if os.path.lexists(target)]
    if existing:
        exist = "exists" if len(existing) == 1 else "exist"
        message = f"{', '.join(existing)} {exist} already; nothing was written"
        fail("CP1106", message, "choose another directory with --into DIR")
    for target in targets:
        _write(target, template(f"{name}{target.suffix}"))
    if not console.is_human:
        console.document(template=name, files=[str(target) for target in targets])
        return 0
    for target in targets:
        console.say(f"wrote {target}")
    plan, program = targets
    console.say(f"next: commplan check {shlex.quote(str(plan))} && {started(program)}")
    return 0


def started(program: Path) -> str:
    """The command that starts a template's program, from the first line of its text."""
    title = template(program.name).splitlines()[0].strip('"').partition(": ")[2]
    if os.geteuid() == 0:
        title = title.replace("mpirun ", "mpirun --allow-run-as-root ")  # it refuses to run as root without
    return title.replace(program.name, shlex.quote(str(program)))


def _list(available: dict[str, str], console: Console) -> int:
    """Print the names and summaries of the templates."""
    if not console.is_human:
        listed = [{"name": name, "summary": summary} for name, summary in available.items()]
        console.document(templates=listed)
        return 0
    width = max(map(len, available))
    for name, summary in available.items():
        console.put(f"{name:<{width}}  {summary}\n")
    return 0


def _write(target: Path, text: str) -> None:
    """Create a file and its folders. Raises CP1101."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL  # never overwrite
        with os.fdopen(io.open_file(target, flags, 0o666), "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        fail("CP1101", f"cannot write {target}: {error.strerror or error}", file=str(target))
