"""The state of a check: declarations, values bound so far, and diagnostics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn, TypeVar

from commplan.diagnostics import Diagnostic, Fix, Note, Span, listed, near_name, with_article
from commplan.dsl import ast
from commplan.dsl.check.recovery_bindings import RecoveryBindings
from commplan.dsl.parser import MOST_ERRORS
from commplan.dsl.statements import GiveUp
from commplan.ir.plan import Axis, AxisKind, DeclaredTopology, Fn, Ref, Source, Value
from commplan.ir.stages.rules import Violation
from commplan.ir.types import Placement, Type

T = TypeVar("T")
Word = TypeVar("Word", bound=str)
Axes = tuple[str, ...]  # names of axes
Remark = Note | str | Value | Axis | Fn  # a note of an error, see `CheckContext.error`
MOST_GUESSES = 100  # maximum number of searches for similar names in a file

# The kinds of declarations, in words with an article: those with a size by their kind, and the others.
KIND_WORDS = {AxisKind.REPLICA: "an axis", AxisKind.ENSEMBLE: "an ensemble", AxisKind.SERVER: "a server"}
SOURCE, FN, INPUT, STATE = "a source", "a fn", "an input", "a state"


class MistakeError(Exception):
    """Aborts the check of a statement after its error was reported."""


class CheckContext:
    """The declarations of one file, its values so far and its diagnostics.

    Args:
        file: The file name, for diagnostics.
        text: The source.

    Attributes:
        file: As passed.
        diagnostics: The errors so far.
        declared: By name: the kind of its first declaration, a value of `KIND_WORDS` or a phrase such as
            `SOURCE`, and its location.
        unknown: Names whose declaration is wrong, or that were reported as unknown. Uses of them are not
            checked, so that one mistake makes one error.
        axes: The axes, ensembles and servers without errors, in the order of the file.
        sources: The sources without errors.
        topology: The declared topology; None if there is none.
        fns: The functions without errors, and the built-in ones that are used without a declaration.
        inputs: The inputs without errors.
        states: The states without errors, with their values on entry.
        values: All values so far, in order.
        bound: By name: the title of the first phase that binds it, and the location.
        set_states: The names of the states that `at start` binds.
        updated_states: The names of the states that other phases bind.
        recovery: Looks up the names in statements with syntax errors.
        nameless: Whether some declaration failed to parse before its name.
        misspelt_states: States that an unknown name probably misspells. The use of that name was reported.
        doubtful_states: States that were bound to another type or placement than declared.
        unset_states: States that were reported as read before they are set.
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
        self.recovery = RecoveryBindings(text)
        self.nameless = False
        self.misspelt_states: set[str] = set()
        self.doubtful_states: set[str] = set()
        self.unset_states: set[str] = set()
        self._versions: dict[str, int] = {}  # by name: the number of its values
        self._guesses = MOST_GUESSES  # the number of searches that are left

    def error(
        self, code: str, message: str, span: Span, *notes: Remark | None, fix: Fix | None = None
    ) -> None:
        """Record an error.

        Returns None, so that a check that computes a value can return the result of this call.

        Args:
            code: The code of the error.
            message: The message.
            span: The location of the error.
            notes: Text, a `Note`, a value (shown with its type and placement), or an axis or function (its
                declaration is shown). None is skipped.
            fix: A replacement of source text that corrects the error; None if there is none.

        Raises:
            GiveUp: After recording CP0013 instead, if there are `MOST_ERRORS` already.
        """
        if len(self.diagnostics) >= MOST_ERRORS:
            message = f"more than {MOST_ERRORS} errors; the rest of the plan is not checked"
            self.diagnostics.append(Diagnostic("CP0013", message, span, file=self.file))
            raise GiveUp
        remarks = tuple(_note(note) for note in notes if note)
        self.diagnostics.append(Diagnostic(code, message, span, remarks, fix, file=self.file))

    def refuse(
        self,
        code: str,
        violation: Violation | None,
        span: Span,
        *notes: Remark | None,
        fix: Fix | None = None,
    ) -> bool:
        """Report a violated rule, and return whether there was one.

        The arguments are those of `error`. `violation` is None if the rule holds. `notes` precede the notes
        of the violation.
        """
        if violation is not None:
            self.error(code, violation.message, span, *notes, *violation.notes, fix=fix)
        return violation is not None

    def fail(self, code: str, message: str, span: Span, *notes: Remark | None) -> NoReturn:
        """Record an error, and abort the check of its statement by raising `MistakeError`."""
        self.error(code, message, span, *notes)
        raise MistakeError

    def require(self, code: str, violation: Violation | None, span: Span, *notes: Remark | None) -> None:
        """Report a violated rule as `refuse` does, and then abort the check of its statement."""
        if self.refuse(code, violation, span, *notes):
            raise MistakeError

    def new_value(self, name: ast.Name, type_: Type, placement: Placement) -> Value:
        """Create the next value of `name`. Its id has a version, from 0."""
        version = self._versions.get(name.text, 0)
        self._versions[name.text] = version + 1
        ref: Ref = f"{name.text}.{version}"
        value = Value(ref, type_, placement, name.span)
        self.values[ref] = value
        return value

    def size(self, axes: Iterable[str]) -> int | None:
        """The number of ranks along `axes`; None if a size is not known before compilation, or is wrong."""
        total = 1
        for name in axes:
            axis = self.axes.get(name)
            if axis is None or axis.size is None:
                return None
            total *= axis.size
        return total

    def ordered(self, axes: Iterable[str]) -> Axes:
        """`axes` without duplicates, in declaration order."""
        selected = frozenset(axes)
        return tuple(name for name in self.axes if name in selected)

    def kind_of(self, name: str) -> str | None:
        """The kind of `name`, as in `declared`, or None if it is not declared."""
        entry = self.declared.get(name)
        return entry[0] if entry else None

    def declaration(self, name: str) -> Note:
        """A note that points to the declaration of `name`, which is declared."""
        return Note(f"`{name}` is declared here", self.declared[name][1])

    def note_unknown(self, name: str) -> bool:
        """Record `name` as unknown; return whether its mistake was already reported.

        True from the second use of a name on, and if some declaration failed to parse before its name was
        read.
        """
        if name in self.unknown:
            return True
        self.unknown.add(name)
        return self.nameless

    def near(self, name: str, candidates: Iterable[str]) -> str | None:
        """The candidate that `name` most likely misspells, or None.

        Each guess compares `name` with every candidate, so a file with thousands of errors gets only
        `MOST_GUESSES`.
        """
        if self._guesses <= 0:
            return None
        self._guesses -= 1
        return near_name(name, candidates)

    def look_up(
        self,
        name: ast.Name,
        declarations: Mapping[str, T],
        code: str,
        noun: str,
        how: str,
        *,
        also: Iterable[str] = (),
    ) -> T | None:
        """The declaration of `name`; None after reporting an error, or if the declaration itself is wrong.

        Args:
            name: The name in the source.
            declarations: The declarations of the expected kind.
            code: The code of the error.
            noun: The expected kind, in words without an article.
            how: A note on how to declare one, shown if there are none.
            also: Other names that may have been meant.
        """
        if name.text in self.unknown or name.text in declarations:
            return declarations.get(name.text)
        kind = self.kind_of(name.text)
        if kind is None and self.note_unknown(name.text):
            return None
        missing = f"there is no {noun} `{name.text}`"
        message = f"`{name.text}` is {kind}, expected {with_article(noun)}" if kind else missing
        note = f"declared: {listed(declarations)}" if declarations else how
        fix = None if kind else self.rename(name, (*declarations, *also))
        self.error(code, message, name.span, note, fix=fix)
        return None

    def choose(
        self, name: ast.Name, words: Sequence[Word], code: str, message: str, *notes: str
    ) -> Word | None:
        """The element of `words` that `name` equals, or None after reporting an error.

        The other arguments are those of `error`.
        """
        choice = next((word for word in words if word == name.text), None)
        if choice is None:
            self.error(code, message, name.span, *notes, fix=self.rename(name, words))
        return choice

    def keyed(self, call: ast.CallExpr, keys: tuple[str, ...], code: str) -> dict[str, ast.CallArg] | None:
        """The keyword arguments of a call by key, or None after reporting an error.

        An unknown, repeated or positional argument is an error. A missing one is not.

        Args:
            call: The call.
            keys: The valid keys; empty if the call takes no arguments.
            code: The code of the error.
        """
        name = call.name.text
        usage = f"write `{name}({', '.join(f'{key} = ..' for key in keys)})`" if keys else f"write `{name}`"
        args: dict[str, ast.CallArg] = {}
        for arg in call.args or ():
            if arg.key is not None and arg.key.text in keys and arg.key.text not in args:
                args[arg.key.text] = arg
                continue
            if not keys:
                message, fix = f"`{name}` takes no arguments", None
            elif arg.key is None:
                message, fix = f"the arguments of `{name}` have names: {listed(keys)}", None
            elif arg.key.text in keys:
                message, fix = f"`{arg.key.text}` is repeated", None
            else:
                near = self.rename(arg.key, [key for key in keys if key not in args])
                message, fix = f"`{name}` has no argument `{arg.key.text}`", near
            return self.error(code, message, arg.span, usage, fix=fix)
        return args

    def rename(self, name: ast.Name | ast.Number, candidates: Iterable[str]) -> Fix | None:
        """A fix that replaces a misspelled name by the nearest candidate.

        None without a candidate that is near enough, and for numbers.
        """
        near = self.near(name.text, candidates) if isinstance(name, ast.Name) else None
        return Fix(f"write `{near}`", name.span, near) if near else None


def _note(remark: Remark) -> Note:
    """The note for an argument of `CheckContext.error`."""
    match remark:
        case Value():
            return Note(f"`{remark.name}` is {remark.type}, {remark.placement}", remark.span)
        case Fn() if remark.body is not None:
            operands = listed(remark.body.definition.operands)
            return Note(f"`{remark.body}` is built in, and takes {operands}", remark.span)
        case Axis() | Fn():
            return Note(f"`{remark.name}` is declared here", remark.span)
        case str():
            return Note(remark)
        case Note():
            return remark


def all_known(items: Sequence[T | None]) -> tuple[T, ...] | None:
    """The items, or None if one of them is None."""
    valid = tuple(item for item in items if item is not None)
    return valid if len(valid) == len(items) else None


def is_scalar(type_: Type) -> bool:
    """Whether a value of this type is an array without dimensions."""
    shape = getattr(type_, "shape", None)
    return shape == ()
