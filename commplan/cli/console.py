"""The command's output: artefacts to stdout, messages to stderr, files where the flags say."""

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
STDIN = "-"
# What a launcher of MPI leaves in the environment: Open MPI, MPICH and others, SLURM with PMIx.
LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")
# The place of this process, as launchers of MPI tell it.
RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")


class Console:
    """The streams of one run, in the format and colour that were asked for."""

    def __init__(self, color: Color = "auto", style: Style = "human", inputs: Sequence[str] = ()) -> None:
        self.color_choice = color
        self.inputs = inputs  # files that are read, and never written
        self.style: Style = style
        self.texts: dict[str, str] = {}  # of the files read, for the excerpts of diagnostics

    @property
    def human(self) -> bool:
        return self.style == "human"

    def color(self, stream: IO[str]) -> bool:
        """Whether to colour what goes to `stream`: https://no-color.org, unless --color says otherwise."""
        if self.color_choice != "auto":
            return self.color_choice == "always"
        if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
            return False
        # mpirun gives its ranks terminals of its own, wherever their output goes in the end.
        return stream.isatty() and not any(name in os.environ for name in LAUNCHED)

    def put(self, text: str) -> None:
        """Write an artefact to stdout. Raises CP1101 where it takes no more (a full disk)."""
        with _stdout():
            sys.stdout.write(text)

    def show(self, draw: Callable[[Rich], object], width: int) -> None:
        """Write what `draw` prints on a screen of `width` columns to stdout."""
        self.put(printed(draw, width, color=self.color(sys.stdout)))

    def flush(self) -> None:
        """Flush stdout. Raises CP1101 like `put`."""
        with _stdout():
            sys.stdout.flush()

    def document(self, diagnostics: Sequence[Diagnostic] = (), **fields: Any) -> None:
        """Write the one JSON document of this run to stdout."""
        from commplan.render.machine import FORMAT_VERSION, dump

        self.put(dump({"version": FORMAT_VERSION, **fields, "diagnostics": diagnostics}))

    def say(self, text: str) -> None:
        """Write a message to stderr."""
        _to_stderr(f"{text}\n")

    def note(self, text: str) -> None:
        """A message for people only: silent in the other formats."""
        if self.human:
            self.say(text)

    def report(self, diagnostics: Sequence[Diagnostic]) -> None:
        """Write diagnostics: to stderr for people, to stdout in the formats that programs read."""
        from commplan.render import render

        write = _to_stderr if self.human else self.put
        write(render(diagnostics, self.texts, self.style, self.human and self.color(sys.stderr)))

    def conclude(self, diagnostics: Sequence[Diagnostic], text: Callable[[], str], **fields: Any) -> int:
        """Write the outcome of a run, for people what is wrong or else `text`; 1 where something is wrong."""
        if not self.human:
            self.document(diagnostics, **fields)
        else:
            self.report(diagnostics)
            self.put("" if diagnostics else text())
        return int(bool(diagnostics))

    def refuse(self, diagnostics: Sequence[Diagnostic]) -> None:
        """Diagnostics that ended the run; in JSON they are its document."""
        if self.style in get_args(Style) and self.style != "json":
            self.report(diagnostics)
            return
        self.document(diagnostics)

    def read(self, path: str) -> str:
        """The text of a file, or of stdin for `-`; kept for the excerpts.

        Raises CP0001 where it cannot be read or is larger than 64 MiB, and CP0002 where it is not UTF-8.
        """
        name = name_of(path)
        if path == STDIN and name in self.texts:  # it can be read once only
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
        """Write a file, or stdout for `-`. Raises CP1101 where that is impossible, and for an input."""
        if path == STDIN:
            self.put(data.decode("utf-8"))
            return
        try:
            place, inputs = Path(path), filter(Path.exists, map(Path, self.inputs))
            if place.is_file() and any(map(place.samefile, inputs)):
                fail("CP1101", f"cannot write {path}: it is one of the files that are read", file=path)
            if not place.is_file():
                _write_anything(place, data)
                return
            os.close(io.open_file(place, os.O_RDWR))  # one that may not be written is not replaced
            io.write(place.resolve(), data)  # a full disk leaves the old one
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            if isinstance(error, OSError) and error.errno == errno.ENXIO:
                reason = "it is a pipe that no process reads"
            fail("CP1101", f"cannot write {path}: {reason}", file=path)


def _write_anything(place: Path, data: bytes) -> None:
    """Write a new file, a pipe or a device. Raises OSError, ENXIO for a pipe that no process reads."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK
    with os.fdopen(os.open(place, flags, 0o666), "wb") as file:
        os.set_blocking(file.fileno(), True)
        file.write(data)


def _to_stderr(text: str) -> None:
    """Write to stderr; a full disk under it is ignored, as there is nowhere left to report it."""
    try:
        sys.stderr.write(text)
    except BrokenPipeError:
        raise
    except OSError:
        silence(sys.stderr)


def silence(*streams: IO[str]) -> None:
    """Discard what is still written to these streams, also at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        try:
            os.dup2(nowhere, stream.fileno())
        except (OSError, ValueError):  # not a real file: nothing is flushed to it at exit
            continue


@contextmanager
def _stdout() -> Generator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        fail("CP1101", f"cannot write to standard output: {error.strerror or error}", file="<stdout>")


def printed(draw: Callable[[Rich], object], width: int, *, color: bool) -> str:
    """What `draw` prints on a screen of `width` columns."""
    from rich.console import Console as Screen

    out = StringIO()
    draw(Screen(file=out, width=width, force_terminal=color, no_color=not color, highlight=False))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def fold_table(*titles: str) -> Any:
    """A table without lines, for rich, whose columns fold long text."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(title, overflow="fold")
    return table


def name_of(path: str) -> str:
    """The name under which diagnostics speak of a file given as `path`."""
    return "<stdin>" if path == STDIN else path


def _not_utf8(data: bytes, start: int, name: str) -> Diagnostic:
    line, column = end_of(data[:start].decode("utf-8"))
    message = f"this is not UTF-8 text: byte 0x{data[start]:02x} at offset {start}"
    notes = (Note("a plan is text in UTF-8; save it in that encoding"),)
    return Diagnostic("CP0002", message, Span(line, column, line, column + 1), notes, file=name)
