"""The language server protocol, implemented with pygls: requests of editors and published diagnostics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from lsprotocol import types
from pygls.exceptions import JsonRpcInvalidParams
from pygls.lsp.server import LanguageServer
from pygls.workspace import ServerTextPosition, ServerTextRange, TextDocument

from commplan import __version__
from commplan.diagnostics import CommplanError, Diagnostic, Severity, Span
from commplan.dsl.format import format_source
from commplan.lsp import hints
from commplan.lsp.compiled import Explainer, Stages
from commplan.lsp.completion import ItemKind, complete
from commplan.lsp.document import PlanDocument
from commplan.lsp.hover import hover
from commplan.lsp.rename import renamed
from commplan.lsp.repairs import Repair, all_repairs, repairs

PAUSE_S = 0.02  # seconds between a change and the check, to combine rapid changes
QUIET_S = 0.5  # seconds between a check and the compilation
HOVER_S = 1.0  # most seconds that a hover waits for the compiler

_KINDS: Mapping[ItemKind, types.CompletionItemKind] = {  # icons of completions
    "keyword": types.CompletionItemKind.Keyword,
    "verb": types.CompletionItemKind.Method,
    "value": types.CompletionItemKind.Variable,
    "axis": types.CompletionItemKind.EnumMember,
    "function": types.CompletionItemKind.Function,
    "algorithm": types.CompletionItemKind.Module,
    "option": types.CompletionItemKind.Property,
    "type": types.CompletionItemKind.Class,
    "constant": types.CompletionItemKind.Constant,
}
_FIX_ALL = f"{types.CodeActionKind.SourceFixAll.value}.commplan"  # the kind of `all_repairs`


def is_logged(record: logging.LogRecord) -> bool:
    """Whether to log a record of pygls. Refused requests are not logged, since the client receives an error.

    Unreadable messages are logged in one line; tracebacks are reserved for faults of the server.
    """
    error = record.exc_info[1] if record.exc_info else None
    if error is not None and record.msg == "Unable to handle message":
        reason = error.__cause__ or error
        record.msg, record.args = "a message cannot be read: %s: %s", (type(reason).__name__, reason)
        record.exc_info = None
        return True
    return not isinstance(error, JsonRpcInvalidParams) and not record.msg.startswith("Unable to deserialize")


class PlanServer(LanguageServer):
    """The state of one connection, with the latest version of every open plan.

    Attributes:
        documents: the text and the document of each open plan, by URI.
        pending: the next check or compilation of each open plan, by URI.
        explainer: compiles plans for hovers.
    """

    def __init__(self) -> None:
        super().__init__("commplan", __version__)  # pyright: ignore[reportUnknownMemberType]
        self.documents: dict[str, tuple[str, PlanDocument]] = {}
        self.pending: dict[str, asyncio.TimerHandle] = {}
        self.explainer = Explainer()

    def document(self, uri: str) -> tuple[PlanDocument, TextDocument]:
        """The latest version of a document, and pygls's view of it."""
        text = self.workspace.get_text_document(uri)
        cached = self.documents.get(uri)
        if cached is None or cached[0] != text.source:
            self.documents[uri] = cached = text.source, PlanDocument(text.source, text.filename or uri)
        return cached[1], text


def _place(text: TextDocument, position: types.Position) -> tuple[int, int]:
    """Convert a protocol position to a line and a column, from 1, in characters."""
    server_position = text.position_from_client_units(position)
    return server_position.line + 1, server_position.character + 1


def _range(text: TextDocument, span: Span) -> types.Range:
    """Convert a span to a protocol range, whose columns may count UTF-16 code units."""
    start = ServerTextPosition(span.line - 1, span.column - 1)
    end = ServerTextPosition(span.end_line - 1, span.end_column - 1)
    return text.range_to_client_units(ServerTextRange(start, end))


def _edits(
    text: TextDocument, document: PlanDocument, changes: Sequence[tuple[int, int, str]]
) -> list[types.TextEdit]:
    """Convert edits by offset to protocol edits."""
    result: list[types.TextEdit] = []
    for start, end, new in changes:
        span = Span(*document.offsets.location(start), *document.offsets.location(end))
        result.append(types.TextEdit(_range(text, span), new))
    return result


def _diagnostic(text: TextDocument, diagnostic: Diagnostic, uri: str) -> types.Diagnostic:
    """Convert a diagnostic. Notes with a span become related information, the others text."""
    notes = [note for note in diagnostic.notes if note.span is not None]
    remarks = [f"note: {note.text}" for note in diagnostic.notes if note.span is None]
    return types.Diagnostic(
        _range(text, diagnostic.span or Span(1, 1, 1, 1)),
        "\n".join([diagnostic.message, *remarks]),
        severity=types.DiagnosticSeverity.Error
        if diagnostic.severity is Severity.ERROR
        else types.DiagnosticSeverity.Warning,
        code=diagnostic.code,
        source="commplan",
        tags=[types.DiagnosticTag.Unnecessary] if diagnostic.code in ("CP1201", "CP1209") else None,
        related_information=[
            types.DiagnosticRelatedInformation(types.Location(uri, _range(text, note.span)), note.text)
            for note in notes
            if note.span
        ]
        or None,
    )


def server() -> PlanServer:
    """Create a server with all features, without starting it."""
    plans = PlanServer()
    _synchronize(plans)
    _reading(plans)
    _writing(plans)
    return plans


def _synchronize(plans: PlanServer) -> None:
    """Register the handlers of the connection and of open documents."""

    @plans.feature(types.INITIALIZE)
    def initialize(params: types.InitializeParams) -> None:
        options: Any = params.initialization_options  # an object that pygls made, or a mapping
        flags: Any = options["flags"] if "flags" in (options or {}) else ()
        plans.explainer.flags = tuple(map(str, flags))

    @plans.feature(types.TEXT_DOCUMENT_DID_OPEN)
    def did_open(params: types.DidOpenTextDocumentParams) -> None:
        _publish(plans, params.text_document.uri)

    @plans.feature(types.TEXT_DOCUMENT_DID_CHANGE)
    def did_change(params: types.DidChangeTextDocumentParams) -> None:
        uri = params.text_document.uri
        if handle := plans.pending.pop(uri, None):
            handle.cancel()
        plans.pending[uri] = asyncio.get_running_loop().call_later(PAUSE_S, _publish, plans, uri)

    @plans.feature(types.TEXT_DOCUMENT_DID_CLOSE)
    def did_close(params: types.DidCloseTextDocumentParams) -> None:
        uri = params.text_document.uri
        if handle := plans.pending.pop(uri, None):
            handle.cancel()
        plans.documents.pop(uri, None)
        plans.explainer.forget(uri)
        plans.text_document_publish_diagnostics(types.PublishDiagnosticsParams(uri, []))

    _ = initialize, did_open, did_change, did_close


def _publish(plans: PlanServer, uri: str) -> None:
    """Publish diagnostics, and compile the plan after a pause in editing."""
    document, text = plans.document(uri)
    listing = [_diagnostic(text, diagnostic, uri) for diagnostic in document.diagnostics]
    plans.text_document_publish_diagnostics(types.PublishDiagnosticsParams(uri, listing, text.version))
    plans.explainer.forget(uri)
    loop = asyncio.get_running_loop()
    plans.pending[uri] = loop.call_later(QUIET_S, plans.explainer.explain, uri, document)


def _reading(plans: PlanServer) -> None:
    """Register the handlers of requests that do not change the text."""

    @plans.feature(types.TEXT_DOCUMENT_HOVER)
    async def on_hover(params: types.HoverParams) -> types.Hover | None:
        document, text = plans.document(params.text_document.uri)
        line, column = _place(text, params.position)
        answer = hover(document, line, column, await _stages(plans, params.text_document.uri, document))
        if answer is None:
            return None
        return types.Hover(types.MarkupContent(types.MarkupKind.Markdown, answer[0]), _range(text, answer[1]))

    @plans.feature(types.TEXT_DOCUMENT_DEFINITION)
    def definition(params: types.DefinitionParams) -> types.Location | None:
        uri = params.text_document.uri
        document, text = plans.document(uri)
        use = document.symbols.at(*_place(text, params.position))
        return types.Location(uri, _range(text, use.symbol.definition)) if use and use.symbol else None

    @plans.feature(types.TEXT_DOCUMENT_REFERENCES)
    def references(params: types.ReferenceParams) -> list[types.Location] | None:
        uri = params.text_document.uri
        document, text = plans.document(uri)
        use = document.symbols.at(*_place(text, params.position))
        if use is None or use.symbol is None:
            return None
        spans = use.symbol.places if params.context.include_declaration else use.symbol.places[1:]
        return [types.Location(uri, _range(text, span)) for span in sorted(spans)]

    @plans.feature(
        types.TEXT_DOCUMENT_COMPLETION, types.CompletionOptions(trigger_characters=[" ", "=", "(", "{", ","])
    )
    def completion(params: types.CompletionParams) -> types.CompletionList:
        document, text = plans.document(params.text_document.uri)
        items = complete(document, *_place(text, params.position))
        return types.CompletionList(
            is_incomplete=False,
            items=[
                types.CompletionItem(
                    item.label,
                    kind=_KINDS[item.kind],
                    detail=item.detail or None,
                    documentation=types.MarkupContent(types.MarkupKind.Markdown, item.documentation)
                    if item.documentation
                    else None,
                    sort_text=f"{number:03}",
                )
                for number, item in enumerate(items)
            ],
        )

    @plans.feature(types.TEXT_DOCUMENT_INLAY_HINT)
    def inlay_hint(params: types.InlayHintParams) -> list[types.InlayHint]:
        document, text = plans.document(params.text_document.uri)
        first, last = params.range.start.line + 1, params.range.end.line + 1
        result: list[types.InlayHint] = []
        for hint in hints.placements(document, first, last):
            server_position = ServerTextPosition(hint.line - 1, hint.column - 1)
            position = text.position_to_client_units(server_position)
            result.append(
                types.InlayHint(position, hint.text, types.InlayHintKind.Type, tooltip=hint.tooltip)
            )
        return result

    _ = on_hover, definition, references, completion, inlay_hint


async def _stages(plans: PlanServer, uri: str, document: PlanDocument) -> Stages:
    """The compiled stages, if available within a short time; empty for a plan with errors."""
    if document.analysis.plan is None:
        return {}
    task = plans.explainer.explain(uri, document)
    try:
        return await asyncio.wait_for(asyncio.shield(task), HOVER_S)
    except (TimeoutError, asyncio.CancelledError):
        return {}


def _writing(plans: PlanServer) -> None:
    """Register the handlers of requests that return edits."""

    @plans.feature(types.TEXT_DOCUMENT_PREPARE_RENAME)
    def prepare(params: types.PrepareRenameParams) -> types.Range | None:
        document, text = plans.document(params.text_document.uri)
        use = document.symbols.at(*_place(text, params.position))
        return _range(text, use.span) if use and use.symbol else None

    @plans.feature(types.TEXT_DOCUMENT_RENAME, types.RenameOptions(prepare_provider=True))
    def rename(params: types.RenameParams) -> types.WorkspaceEdit:
        uri = params.text_document.uri
        document, text = plans.document(uri)
        try:
            spans = renamed(document, *_place(text, params.position), params.new_name)
        except CommplanError as error:
            raise JsonRpcInvalidParams(str(error)) from None
        changes = [types.TextEdit(_range(text, span), params.new_name) for span in spans]
        return types.WorkspaceEdit({uri: changes})

    @plans.feature(types.TEXT_DOCUMENT_FORMATTING)
    def formatting(params: types.DocumentFormattingParams) -> list[types.TextEdit] | None:
        document, text = plans.document(params.text_document.uri)
        try:
            formatted = format_source(document.text, document.file)
        except CommplanError:
            return None  # diagnostics report the error
        whole = (0, len(document.text), formatted)
        return _edits(text, document, [whole]) if formatted != document.text else []

    @plans.feature(
        types.TEXT_DOCUMENT_CODE_ACTION, types.CodeActionOptions([types.CodeActionKind.QuickFix, _FIX_ALL])
    )
    def code_action(params: types.CodeActionParams) -> list[types.CodeAction]:
        uri = params.text_document.uri
        document, text = plans.document(uri)
        requested = params.context.only
        actions: list[types.CodeAction] = []
        if requested is None or any(
            _includes(kind, types.CodeActionKind.QuickFix.value) for kind in requested
        ):
            first, last = params.range.start.line + 1, params.range.end.line + 1
            for repair in repairs(document, first, last):
                actions.append(_action(text, document, uri, repair, types.CodeActionKind.QuickFix))
        if requested is not None and any(_includes(kind, _FIX_ALL) for kind in requested):
            everything = all_repairs(document)
            if everything:
                actions.append(_action(text, document, uri, everything, _FIX_ALL))
        return actions

    _ = prepare, rename, formatting, code_action


def _includes(requested: types.CodeActionKind | str, kind: str) -> bool:
    """Whether a requested kind includes `kind`: `source` includes `source.fixAll.commplan`."""
    name = requested.value if isinstance(requested, types.CodeActionKind) else requested
    return kind == name or kind.startswith(f"{name}.")


def _action(
    text: TextDocument, document: PlanDocument, uri: str, repair: Repair, kind: types.CodeActionKind | str
) -> types.CodeAction:
    """Convert a repair to a code action."""
    return types.CodeAction(
        repair.title,
        kind=kind,
        diagnostics=[_diagnostic(text, repair.diagnostic, uri)] if repair.diagnostic else None,
        is_preferred=repair.certain if repair.diagnostic else None,
        edit=types.WorkspaceEdit({uri: _edits(text, document, repair.edits)}),
    )
