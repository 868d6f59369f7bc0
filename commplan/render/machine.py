"""Diagnostics for programs: concise lines, JSON, GitHub workflow commands and SARIF 2.1.0."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from commplan.diagnostics import Diagnostic, Severity, Span
from commplan.errors import page

FORMAT_VERSION = 1  # `version` of JSON documents


def concise(diagnostics: Sequence[Diagnostic]) -> str:
    """`file:line:column: severity[CODE]: message`, one line each."""
    return "".join(f"{_place(d)}{d.severity}[{d.code}]: {_one_line(d.message)}\n" for d in diagnostics)


def _place(diagnostic: Diagnostic) -> str:
    """The location as a prefix of a message; empty if the file is unknown."""
    if diagnostic.span is None:
        return f"{diagnostic.file}: " if diagnostic.file else ""
    return f"{diagnostic.file or '<plan>'}:{diagnostic.span.line}:{diagnostic.span.column}: "


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())


def counts(diagnostics: Sequence[Diagnostic]) -> dict[str, int]:
    """The number of diagnostics by severity."""
    errors = sum(d.severity is Severity.ERROR for d in diagnostics)
    return {"errors": errors, "warnings": len(diagnostics) - errors}


def json_document(diagnostics: Sequence[Diagnostic]) -> str:
    """A JSON document with a version, the diagnostics, and their number by severity."""
    document = {"version": FORMAT_VERSION, "diagnostics": diagnostics, "summary": counts(diagnostics)}
    return dump(document)


def dump(document: object) -> str:
    """JSON in the format of the command's output."""
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"


def github(diagnostics: Sequence[Diagnostic]) -> str:
    """Workflow commands, which GitHub displays at the lines of a pull request."""
    return "".join(_command(diagnostic) for diagnostic in diagnostics)


def _command(d: Diagnostic) -> str:
    """The workflow command of a diagnostic: `::error file=..,line=..::message`."""
    properties: dict[str, object] = {}
    if d.file:
        properties["file"] = d.file
    if d.span:
        properties |= {"line": d.span.line, "endLine": d.span.end_line}
        # GitHub shows columns only if both ends are on one line.
        if d.span.line == d.span.end_line:
            properties |= {"col": d.span.column, "endColumn": d.span.end_column}
    properties["title"] = d.code
    written = ",".join(f"{key}={_escape(str(value), ':,')}" for key, value in properties.items())
    lines = [
        d.message,
        *(f"note: {note.text}" for note in d.notes),
        *([f"fix: {d.fix.title}"] if d.fix else []),
    ]
    return f"::{d.severity} {written}::{_escape(chr(10).join(lines), '')}\n"


def _escape(text: str, more: str) -> str:
    """Escape `%`, line breaks and the characters in `more` as %XX."""
    for character in f"%\r\n{more}":
        text = text.replace(character, f"%{ord(character):02X}")
    return text


def sarif(diagnostics: Sequence[Diagnostic]) -> str:
    """SARIF 2.1.0 with one run; columns count Unicode code points."""
    codes = sorted({d.code for d in diagnostics})
    run: dict[str, Any] = {
        "tool": {"driver": {"name": "commplan", "rules": [_rule(code) for code in codes]}},
        "columnKind": "unicodeCodePoints",
        "results": [_result(d, codes.index(d.code)) for d in diagnostics],
    }
    return dump(
        {"$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0", "runs": [run]}
    )


def _rule(code: str) -> dict[str, Any]:
    """The description of a code, from its page."""
    text = page(code)
    if text is None:
        return {"id": code}
    title = text.splitlines()[0].partition(": ")[2] or code
    return {"id": code, "shortDescription": {"text": title}, "help": {"text": text, "markdown": text}}


def _result(d: Diagnostic, rule: int) -> dict[str, Any]:
    """The SARIF result of a diagnostic; `rule` is the index of its code in the list of rules."""
    message = "\n".join([d.message, *(note.text for note in d.notes if note.span is None)])
    result: dict[str, Any] = {
        "ruleId": d.code,
        "ruleIndex": rule,
        "level": str(d.severity),
        "message": {"text": message},
    }
    if not d.file:
        return result
    result["locations"] = [_location(d.file, d.span)]
    related = [note for note in d.notes if note.span]
    if related:
        result["relatedLocations"] = [
            {"id": number, **_location(d.file, note.span), "message": {"text": note.text}}
            for number, note in enumerate(related, 1)
        ]
    if d.fix:
        change = {"deletedRegion": _region(d.fix.span), "insertedContent": {"text": d.fix.text}}
        result["fixes"] = [
            {
                "description": {"text": d.fix.title},
                "artifactChanges": [{"artifactLocation": {"uri": _uri(d.file)}, "replacements": [change]}],
            }
        ]
    return result


def _location(file: str, span: Span | None) -> dict[str, Any]:
    physical: dict[str, Any] = {"artifactLocation": {"uri": _uri(file)}}
    if span:
        physical["region"] = _region(span)
    return {"physicalLocation": physical}


def _region(span: Span) -> dict[str, int]:
    return {
        "startLine": span.line,
        "startColumn": span.column,
        "endLine": span.end_line,
        "endColumn": span.end_column,
    }


def _uri(file: str) -> str:
    """The URI of a file; relative for a relative path."""
    from urllib.parse import quote

    path = Path(file)
    return path.as_uri() if path.is_absolute() else quote(path.as_posix())


STYLES = {"concise": concise, "json": json_document, "github": github, "sarif": sarif}  # for `render`
