"""The state of a check: declarations, values so far, and diagnostics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn, TypeVar

from commplan.diagnostics import Diagnostic, Fix, Note, Span, listed, near_name
from commplan.dsl import ast
from commplan.dsl.check.recovery_bindings import RecoveryBindings
from commplan.dsl.statements import GiveUp
from commplan.ir.plan import Axis, AxisKind, DeclaredTopology, Fn, Ref, Source, Value
from commplan.ir.stages.rules import Violation
from commplan.ir.types import Placement, Type

T = TypeVar("T")
Word = TypeVar("Word", bound=str)
Axes = tuple[str, ...]  # their names
Remark = Note | str | Value | Axis | Fn
MOST_ERRORS = 1000
MOST_GUESSES = 100

KIND_WORDS = {AxisKind.REPLICA: "an axis", AxisKind.ENSEMBLE: "an ensemble", AxisKind.SERVER: "a server"}


class MistakeError(Exception):
    """Ends the check of a statement; the reason was reported."""


class Context:
    """The declarations of one file, its values so far and its diagnostics.

    A name in `unknown` was declared, but wrongly: whatever depends on it is left unchecked, so
    that one mistake makes one error.
    """

    def __init__(self, file: str, text: str) -> None:
        self.file = file
        self.diagnostics: list[Diagnostic] = []
        self.declared: dict[str, tuple[str, Span]] = {}
        self.unknown: set[str] = set()
        self.axes: dict[str, Axis] = {}
        self.sources: dict[str, Source] = {}
        self.topology: DeclaredTopology | None = None
        self.fns: dict[str, Fn] = {}
        self.inputs: dict[str, Value] = {}
        self.states: dict[str, Value] = {}
        self.values: dict[Ref, Value] = {}
        self.bound: dict[str, tuple[str, Span]] = {}
        self.set_states: set[str] = set()
        self.updated_states: set[str] = set()
        self.unread = RecoveryBindings(text)
        self.nameless = False  # a declaration that could not be read, not even its name
        self.misspelt_states: set[str] = set()  # reported where their name is used
        self.doubtful_states: set[str] = set()  # bound to something else than was declared
        self.unset_states: set[str] = set()  # reported as read before they are set
        self._versions: dict[str, int] = {}
        self._guesses = MOST_GUESSES

    def error(
        self, code: str, message: str, span: Span, *notes: Remark | None, fix: Fix | None = None
    ) -> None:
        """Record one mistake; None, so that a check which makes a value can end with it.

        notes: remarks, in words or with their place. A value is described; a fn or an axis is pointed at.
        """
        if len(self.diagnostics) >= MOST_ERRORS:
            message = f"more than {MOST_ERRORS} errors; the rest of the plan is not checked"
            self.diagnostics.append(Diagnostic("CP0013", message, span, file=self.file))
            raise GiveUp
        remarks = tuple(_note(note) for note in notes if note)
        self.diagnostics.append(Diagnostic(code, message, span, remarks, fix, file=self.file))

    def refuse(
        self, code: str, broken: Violation | None, span: Span, *notes: Remark | None, fix: Fix | None = None
    ) -> bool:
        """Whether a rule is broken; then that is reported, `notes` before its own remarks."""
        if broken is not None:
            self.error(code, broken.message, span, *notes, *broken.notes, fix=fix)
        return broken is not None

    def fail(self, code: str, message: str, span: Span, *notes: Remark | None) -> NoReturn:
        """Record a mistake that ends the check of its statement."""
        self.error(code, message, span, *notes)
        raise MistakeError

    def require(self, code: str, broken: Violation | None, span: Span, *notes: Remark | None) -> None:
        """End the check of a statement where a rule is broken; see `refuse`."""
        if self.refuse(code, broken, span, *notes):
            raise MistakeError

    def new_value(self, name: ast.Name, type_: Type, placement: Placement) -> Value:
        """The next version of `name`: the first is 0."""
        version = self._versions.get(name.text, 0)
        self._versions[name.text] = version + 1
        ref: Ref = f"{name.text}.{version}"
        value = Value(ref, type_, placement, name.span)
        self.values[ref] = value
        return value

    def size(self, axes: Iterable[str]) -> int | None:
        """The number of ranks along `axes`, None where a size is not known yet."""
        total = 1
        for name in axes:
            axis = self.axes.get(name)
            if axis is None or axis.size is None:
                return None
            total *= axis.size
        return total

    def ordered(self, axes: Iterable[str]) -> Axes:
        """`axes` without repetitions in the order in which the plan declares them."""
        wanted = frozenset(axes)
        return tuple(name for name in self.axes if name in wanted)

    def kind_of(self, name: str) -> str | None:
        """What `name` was declared as, in words with an article; None if nowhere."""
        entry = self.declared.get(name)
        return entry[0] if entry else None

    def declaration(self, name: str) -> Note:
        """A remark that points at where `name` was declared."""
        return Note(f"`{name}` is declared here", self.declared[name][1])

    def is_settled(self, name: str) -> bool:
        """Whether nothing is to be said of a name that stands for nothing: its mistake is reported.

        True for the second use of a name, and where a declaration could not be read so far that its
        name is not known.
        """
        if name in self.unknown:
            return True
        self.unknown.add(name)
        return self.nameless

    def near(self, name: str, known: Iterable[str]) -> str | None:
        """The name in `known` that `name` is most probably a misspelling of, if there is one.

        A file of thousands of errors gets no guess for the later ones: each costs a comparison with
        every known name.
        """
        if self._guesses <= 0:
            return None
        self._guesses -= 1
        return near_name(name, known)

    def look_up(self, name: ast.Name, known: Mapping[str, T], code: str, noun: str, how: str) -> T | None:
        """What `name` was declared to be, or None with the error reported (none for a wrong declaration)."""
        if name.text in self.unknown or name.text in known:
            return known.get(name.text)
        kind = self.kind_of(name.text)
        if kind is None and self.is_settled(name.text):
            return None
        message = (
            f"`{name.text}` is {kind}, expected a {noun}" if kind else f"there is no {noun} `{name.text}`"
        )
        note = f"declared: {listed(known)}" if known else how
        self.error(code, message, name.span, note, fix=None if kind else self.rename(name, known))
        return None

    def choose(
        self, name: ast.Name, known: Sequence[Word], code: str, message: str, *notes: str
    ) -> Word | None:
        """The word of `known` that `name` is, or None with the error reported."""
        choice = next((word for word in known if word == name.text), None)
        if choice is None:
            self.error(code, message, name.span, *notes, fix=self.rename(name, known))
        return choice

    def rename(self, name: ast.Name | ast.Number, known: Iterable[str]) -> Fix | None:
        """The repair of a misspelt name: certain enough where one known name is near; a number has none."""
        near = self.near(name.text, known) if isinstance(name, ast.Name) else None
        return Fix(f"write `{near}`", name.span, near) if near else None


def _note(remark: Remark) -> Note:
    match remark:
        case Value():
            return Note(f"`{remark.name}` is {remark.type}, {remark.placement}", remark.span)
        case Axis() | Fn():
            return Note(f"`{remark.name}` is declared here", remark.span)
        case str():
            return Note(remark)
        case Note():
            return remark


def all_known(items: Sequence[T | None]) -> tuple[T, ...] | None:
    """The items, or None where one of them is in error."""
    known = tuple(item for item in items if item is not None)
    return known if len(known) == len(items) else None


def is_scalar(type_: Type) -> bool:
    """Whether a value of this type is one number."""
    shape = getattr(type_, "shape", None)
    return shape == ()
