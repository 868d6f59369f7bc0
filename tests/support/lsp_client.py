"""A client of the language server: it starts `commplan lsp` and talks to it over its standard streams."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from lsprotocol import types
from pygls.lsp.client import LanguageClient

URI = "file:///plans/p.plan"
WAIT_S = 120.0  # for a slow answer on a loaded machine; no request normally takes as long


class Client:
    """One open document, and the server's diagnostics for each of its versions."""

    def __init__(self, client: LanguageClient) -> None:
        self.client = client
        self.text = ""
        self.version = 0
        self.published: asyncio.Queue[types.PublishDiagnosticsParams] = asyncio.Queue()

        @client.feature(types.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS)
        def publish(params: types.PublishDiagnosticsParams) -> None:
            self.published.put_nowait(params)

        _ = publish

    async def open(self, text: str) -> list[types.Diagnostic]:
        self.text = text
        item = types.TextDocumentItem(URI, "plan", self.version, text)
        self.client.text_document_did_open(types.DidOpenTextDocumentParams(item))
        return await self.diagnostics()

    def change(self, edit: types.TextEdit) -> None:
        """Tell the server of an edit, and make it here."""
        self.version += 1
        self.text = applied(self.text, [edit])
        document = types.VersionedTextDocumentIdentifier(self.version, URI)
        event = types.TextDocumentContentChangePartial(edit.range, edit.new_text)
        self.client.text_document_did_change(types.DidChangeTextDocumentParams(document, [event]))

    async def diagnostics(self) -> list[types.Diagnostic]:
        """The diagnostics of the newest version, once the server has checked it."""
        while True:
            params = await asyncio.wait_for(self.published.get(), WAIT_S)
            if params.version == self.version:
                return list(params.diagnostics)

    def place(self, marked: str) -> Any:
        """A document and the place of `|` in a piece of its text."""
        assert self.text.count(marked.replace("|", "")) == 1, marked
        offset = self.text.index(marked.replace("|", "")) + marked.index("|")
        return {"text_document": types.TextDocumentIdentifier(URI), "position": position(self.text, offset)}


class _Watching(LanguageClient):
    """A client that keeps how its server ended."""

    code: int | None = None

    async def server_exit(self, server: asyncio.subprocess.Process) -> None:
        self.code = server.returncode


@asynccontextmanager
async def connected(flags: Sequence[str] = (), encoding: str = "utf-16") -> AsyncIterator[Client]:
    """A client of an initialized server, which is shut down at the end."""
    language_client = _Watching("tests", "1")
    await language_client.start_io(sys.executable, "-m", "commplan", "lsp")
    general = types.GeneralClientCapabilities(position_encodings=[types.PositionEncodingKind(encoding)])
    params = types.InitializeParams(
        types.ClientCapabilities(general=general), initialization_options={"flags": list(flags)}
    )
    await asyncio.wait_for(language_client.initialize_async(params), WAIT_S)
    language_client.initialized(types.InitializedParams())
    yield Client(language_client)
    await asyncio.wait_for(language_client.shutdown_async(None), WAIT_S)
    language_client.exit(None)
    await asyncio.wait_for(language_client.stop(), WAIT_S)
    assert language_client.code == 0


def position(text: str, offset: int) -> types.Position:
    """The place of an offset, in UTF-16."""
    line = text.count("\n", 0, offset)
    before = text[text.rfind("\n", 0, offset) + 1 : offset]
    return types.Position(line, len(before.encode("utf-16-le")) // 2)


def offset_of(text: str, place: types.Position) -> int:
    """The offset of a place in UTF-16."""
    start = 0
    for _ in range(place.line):
        start = text.index("\n", start) + 1
    line = text[start:].partition("\n")[0]
    units = line.encode("utf-16-le")[: 2 * place.character]
    return start + len(units.decode("utf-16-le"))


def applied(text: str, edits: Sequence[types.TextEdit]) -> str:
    """The text with the edits of a client, the last one first."""
    for edit in sorted(edits, key=lambda edit: offset_of(text, edit.range.start), reverse=True):
        start, end = offset_of(text, edit.range.start), offset_of(text, edit.range.end)
        text = text[:start] + edit.new_text + text[end:]
    return text
