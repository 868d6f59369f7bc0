"""Comments `# commplan: ignore CP1203`: the warnings that they suppress, and unneeded comments."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

import msgspec

from commplan.diagnostics import Diagnostic, Fix, Note, Severity, Span, did_you_mean
from commplan.dsl import ast
from commplan.dsl.lexer import Token, tokenize
from commplan.errors import titles

_DIRECTIVE = re.compile(r"#\s*commplan:\s*(?P<word>\w*)\s*(?P<rest>.*)")  # `rest` has codes and a reason
_CODE = re.compile(r"[,\s]*([A-Za-z]+\d[\w-]*)")  # a code after separators
RANGE = "CP12"  # the range of warnings
ABOUT_COMMENTS = ("CP1207", "CP1208")  # warnings about these comments, which cannot be ignored


class Ignore(msgspec.Struct, frozen=True):
    """A code in a comment.

    Attributes:
        code: the code of a warning.
        span: the location of the code.
        lines: the plan lines whose warnings it suppresses.
        removal: removes the code, or the comment if it has no other.
    """

    code: str
    span: Span
    lines: range
    removal: Fix


def ignores(text: str, tree: ast.File) -> tuple[list[Ignore], list[Diagnostic]]:
    """Return the codes to ignore, and warnings about mistakes in the comments (CP1207).

    Args:
        text: the text of the plan.
        tree: its syntax tree, without errors.
    """
    if "commplan:" not in text:
        return [], []
    tokens = list(tokenize(text.removeprefix("\ufeff")))
    code_lines = {token.line for token in tokens if token.type != "COMMENT"}
    statements = _statements(tree)
    ignored: list[Ignore] = []
    wrong: list[Diagnostic] = []
    for token in tokens:
        match = _DIRECTIVE.match(token.text) if token.type == "COMMENT" else None
        if match is None:
            continue
        lines = _lines(token, code_lines, statements)
        codes, mistakes = _codes(token, match, tree.file)
        wrong += mistakes
        ignored += [Ignore(code, span, lines, _removal(token, match, span)) for code, span in codes]
    return ignored, wrong


def _statements(tree: ast.File) -> list[range]:
    """The lines of every declaration, phase header and stage."""
    spans = list[Span]()
    for item in tree.items:
        spans += (
            [item.header, *(x.span for x in item.body)] if isinstance(item, ast.PhaseDecl) else [item.span]
        )
    return [range(span.line, span.end_line + 1) for span in spans]


def _lines(comment: Token, code_lines: Collection[int], statements: Sequence[range]) -> range:
    """The lines affected by a comment: those of the statement on its line, or else of the next statement."""
    line = comment.line
    if line not in code_lines:
        below = [number for number in code_lines if number > line]
        line = min(below, default=line)
    return next((lines for lines in statements if line in lines), range(line, line + 1))


def _codes(
    comment: Token, match: re.Match[str], file: str
) -> tuple[list[tuple[str, Span]], list[Diagnostic]]:
    """The codes of a comment with their locations, and the mistakes in it.

    Args:
        comment: the comment.
        match: the match of `_DIRECTIVE` in its text.
        file: the plan file.
    """
    codes: list[tuple[str, Span]] = []
    wrong: list[Diagnostic] = []

    def mistake(message: str, span: Span, *notes: str) -> None:
        wrong.append(_mistake(message, span, file, *notes))

    if match["word"] != "ignore":
        mistake(
            f"a comment to commplan begins with `ignore`, found `{match['word']}`",
            comment.span,
            "add codes: `# commplan: ignore CP1201`",
        )
        return codes, wrong
    for code, start, end in _written(match):
        span = Span(comment.line, comment.column + start, comment.line, comment.column + end)
        warnings = [title for title in titles() if title.startswith(RANGE) and title not in ABOUT_COMMENTS]
        if any(code == other for other, _ in codes):
            fix = _removal(comment, match, span)
            wrong.append(_mistake(f"{code} is repeated in this comment", span, file, fix=fix))
        elif code in warnings:
            codes.append((code, span))
        elif code in titles() and code not in ABOUT_COMMENTS:
            mistake(f"{code} is an error, and errors are not ignored", span, "only warnings are: CP12..")
        else:
            mistake(f"there is no warning `{code}`", span, did_you_mean(code, warnings, "the warnings are"))
    if not codes and not wrong:
        mistake(
            "the comment does not say what to ignore", comment.span, "add codes: `# commplan: ignore CP1201`"
        )
    return codes, wrong


def _mistake(message: str, span: Span, file: str, *notes: str, fix: Fix | None = None) -> Diagnostic:
    """A warning CP1207."""
    return Diagnostic("CP1207", message, span, tuple(map(Note, notes)), fix, Severity.WARNING, file)


def _written(match: re.Match[str]) -> Iterator[tuple[str, int, int]]:
    """The codes of a comment, in upper case, with their start and end offsets; a reason may follow."""
    position = match.start("rest")
    while code := _CODE.match(match.string, position):
        yield code[1].upper(), code.start(1), code.end(1)
        position = code.end()


def _removal(comment: Token, match: re.Match[str], span: Span) -> Fix:
    """Remove the whole comment if it contains one code, otherwise the code and the adjacent comma."""
    codes = [(comment.column + start, comment.column + end) for _, start, end in _written(match)]
    if len(codes) == 1:
        return Fix("remove the comment", comment.span, "")
    index = codes.index((span.column, span.end_column))
    start, end = (codes[index - 1][1], span.end_column) if index else (span.column, codes[1][0])
    return Fix("remove the code", Span(span.line, start, span.line, end), "")


def without_ignored(
    warnings: Sequence[Diagnostic], ignored: Sequence[Ignore], judged: Sequence[Ignore], file: str
) -> Iterator[Diagnostic]:
    """Return the warnings that are not suppressed, and CP1208 for unneeded codes.

    Args:
        warnings: all warnings.
        ignored: the codes to ignore.
        judged: those that can be checked for being unneeded.
        file: the plan file.
    """
    used = set[Ignore]()
    for warning in warnings:
        matching = [
            ignore
            for ignore in ignored
            if warning.span and ignore.code == warning.code and _covers(ignore, warning.span)
        ]
        used.update(matching)
        if not matching:
            yield warning
    for ignore in judged:
        if ignore in used:
            continue
        message = f"{ignore.code} is ignored here, and there is no such warning"
        yield Diagnostic("CP1208", message, ignore.span, (), ignore.removal, Severity.WARNING, file)


def _covers(ignore: Ignore, span: Span) -> bool:
    """Whether a line of `span` is affected by `ignore`."""
    return any(line in ignore.lines for line in range(span.line, span.end_line + 1))
