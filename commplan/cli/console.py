"""The command's output: artifacts on stdout, messages on stderr, and files selected by flags."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, get_args

from commplan import io
from commplan.diagnostics import CommplanError, Diagnostic, Note, Span, fail
from commplan.dsl.lexer import end_of
from commplan.render import Style

if TYPE_CHECKING:
    from rich.console import Console as Rich

Color = Literal["auto", "always", "never"]
STDIN = "-"  # as a path: stdin for inputs, stdout for outputs
# Environment variables set by MPI launchers: Open MPI, MPICH and others, SLURM with PMIx.
LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")
# Environment variables for the rank of this process.
RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")


class Console:
    """The output streams of one run, with its format and color.

    Args:
        color: the value of --color.
        style: the value of --format.
        inputs: files that the run reads and `write` must not overwrite.

    Attributes:
        color_choice: the value of --color.
        inputs: as above.
        style: the value of --format.
        texts: contents of the files read so far, by their names in diagnostics, for excerpts.
    """

    def __init__(self, color: Color = "auto", style: Style = "human", inputs: Sequence[str] = ()) -> None:
        self.color_choice = color
        self.inputs = inputs
        self.style: Style = style
        self.texts: dict[str, str] = {}

    @property
    def is_human(self) -> bool:
        """Whether the output is text for people instead of a machine-readable format."""
        return self.style == "human"

    def color(self, stream: IO[str]) -> bool:
        """Whether to color the output of `stream`: as https://no-color.org, unless --color overrides it."""
        if self.color_choice != "auto":
            return self.color_choice == "always"
        if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
            return False
        # mpirun connects its ranks to pseudo-terminals even if their output is redirected.
        return stream.isatty() and not any(name in os.environ for name in LAUNCHED)

    def put(self, text: str) -> None:
        """Write an artifact to stdout.

        Raises:
            CommplanError: CP1101 if stdout is not writable, for example on a full disk.
        """
        with _stdout():
            sys.stdout.write(text)

    def show(self, draw: Callable[[Rich], object], width: int) -> None:
        """Render `draw` on a screen of `width` columns, and write it to stdout."""
        self.put(render_text(draw, width, color=self.color(sys.stdout)))

    def flush(self) -> None:
        """Flush stdout. Raises CP1101 like `put`."""
        with _stdout():
            sys.stdout.flush()

    def document(self, diagnostics: Sequence[Diagnostic] = (), **fields: Any) -> None:
        """Write the JSON document of this run to stdout: `fields` and the diagnostics."""
        from commplan.render.machine import FORMAT_VERSION, dump

        self.put(dump({"version": FORMAT_VERSION, **fields, "diagnostics": diagnostics}))

    def say(self, text: str) -> None:
        """Write a message to stderr."""
        _to_stderr(f"{text}\n")

    def note(self, text: str) -> None:
        """Write a message to stderr in the human format only."""
        if self.is_human:
            self.say(text)

    def report(self, diagnostics: Sequence[Diagnostic]) -> None:
        """Write diagnostics to stderr in the human format, or to stdout in machine-readable formats."""
        from commplan.render import render

        write = _to_stderr if self.is_human else self.put
        write(render(diagnostics, self.texts, self.style, self.is_human and self.color(sys.stderr)))

    def conclude(self, diagnostics: Sequence[Diagnostic], text: Callable[[], str], **fields: Any) -> int:
        """Write the result of a run: diagnostics, or `text()` if there are none.

        In JSON, the document has the diagnostics and `fields`.

        Returns:
            1 if there are diagnostics, otherwise 0.
        """
        if not self.is_human:
            self.document(diagnostics, **fields)
        else:
            self.report(diagnostics)
            self.put("" if diagnostics else text())
        return int(bool(diagnostics))

    def refuse(self, diagnostics: Sequence[Diagnostic]) -> None:
        """Write the diagnostics that ended the run; in JSON they form its document."""
        if self.style in get_args(Style) and self.style != "json":
            self.report(diagnostics)
        else:
            self.document(diagnostics)

    def read(self, path: str) -> str:
        """Read a text file, or stdin for `-`. The text is cached for excerpts in diagnostics.

        Raises:
            CommplanError: CP0001 if the file cannot be read or is larger than 64 MiB, CP0002 if it is not
                UTF-8.
        """
        name = name_of(path)
        if path == STDIN and name in self.texts:  # stdin can be read only once
            return self.texts[name]
        try:
            data = io.read_stream(sys.stdin.buffer) if path == STDIN else io.read(path)
        except AttributeError:  # no stdin at all: `commplan check - <&-`
            fail("CP0001", f"cannot read {name}: it is closed", file=name)
        except OSError as error:
            notes = ["`-` reads standard input"] if "a pipe" in (error.strerror or "") else []
            fail("CP0001", f"cannot read {name}: {error.strerror or error}", *notes, file=name)
        except ValueError as error:  # a NUL in the name
            fail("CP0001", f"cannot read {name!r}: {error}")
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CommplanError(_not_utf8(data, error.start, name)) from None
        self.texts[name] = text
        return text

    def write(self, path: str, data: bytes) -> None:
        """Write a file, or stdout for `-`.

        Raises:
            CommplanError: CP1101 if the file cannot be written, or is an input of this run.
        """
        if path == STDIN:
            self.put(data.decode("utf-8"))
            return
        try:
            target = Path(path)
            inputs = filter(Path.exists, map(Path, self.inputs))
            if not target.is_file():
                _write_new(target, data)
                return
            if any(map(target.samefile, inputs)):
                fail("CP1101", f"cannot write {path}: it is one of the files that are read", file=path)
            os.close(io.open_file(target, os.O_RDWR))  # fails if the file is read-only
            io.write(target.resolve(), data)  # on a full disk the old file remains
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            if isinstance(error, OSError) and error.errno == errno.ENXIO:
                reason = "it is a pipe that no process reads"
            fail("CP1101", f"cannot write {path}: {reason}", file=path)


def _write_new(path: Path, data: bytes) -> None:
    """Write a new file, a pipe or a device. Raises ENXIO for a pipe without a reader."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK
    with os.fdopen(os.open(path, flags, 0o666), "wb") as file:
        os.set_blocking(file.fileno(), True)
        file.write(data)


def _to_stderr(text: str) -> None:
    """Write to stderr, ignoring errors such as a full disk, which cannot be reported elsewhere."""
    try:
        sys.stderr.write(text)
    except BrokenPipeError:
        raise
    except OSError:
        silence(sys.stderr)


def silence(*streams: IO[str]) -> None:
    """Discard further output to these streams, also at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        try:
            os.dup2(nowhere, stream.fileno())
        except (OSError, ValueError):  # no file descriptor: nothing is flushed at exit
            continue


@contextmanager
def _stdout() -> Generator[None]:
    """Context that reports errors of writing to stdout as CP1101, except for a closed pipe."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        fail("CP1101", f"cannot write to standard output: {error.strerror or error}", file="<stdout>")


def render_text(draw: Callable[[Rich], object], width: int, *, color: bool) -> str:
    """Render `draw` on a screen of `width` columns as text."""
    from rich.console import Console as Screen

    out = StringIO()
    draw(Screen(file=out, width=width, force_terminal=color, no_color=not color, highlight=False))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def fold_table(*titles: str) -> Any:
    """A rich table without lines whose columns wrap long text."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(title, overflow="fold")
    return table


def name_of(path: str) -> str:
    """The name of `path` in diagnostics."""
    return "<stdin>" if path == STDIN else path


def _not_utf8(data: bytes, start: int, name: str) -> Diagnostic:
    """The error of a file whose first invalid byte is at offset `start`."""
    line, column = end_of(data[:start].decode("utf-8"))
    message = f"this is not UTF-8 text: byte 0x{data[start]:02x} at offset {start}"
    notes = (Note("a plan is text in UTF-8; save it in that encoding"),)
    return Diagnostic("CP0002", message, Span(line, column, line, column + 1), notes, file=name)
