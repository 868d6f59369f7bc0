"""A session with the language server, by a client over its standard streams."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from typing import Any

import pytest
from lsprotocol import types
from pygls.exceptions import JsonRpcException, JsonRpcInvalidParams
from support.lsp_client import URI, Client, applied, connected, position

from commplan.cli import main
from commplan.lsp.server import is_logged

TEXT = """# 𐍈 in front moves columns in UTF-16
plan p
axis data = 4
source images : u8[8]
input g : f32[1024] partial data
each step {
    x, n = load images batch 8 visit exactly_once seed 1
    y = reduce g over data by mean # 𐍈 by maen
    output  x,y
}
"""
WHOLE = types.Range(types.Position(0, 0), types.Position(99, 0))


def test_a_session():
    asyncio.run(_session())


async def _session() -> None:
    async with connected() as client:
        (unused,) = await client.open(TEXT)
        assert (unused.code, unused.source, unused.severity) == ("CP1201", "commplan", 2)
        assert unused.range.start == position(TEXT, TEXT.index("n = load"))
        await _requests_types(client)
        await _edited(client)
        await _repaired(client)


async def _requests_types(client: Client) -> None:
    server = client.client
    answer = await server.text_document_hover_async(types.HoverParams(**client.place("output  x,|y")))
    assert answer and isinstance(answer.contents, types.MarkupContent)
    assert "y : f32[1024] same" in answer.contents.value
    declared = await server.text_document_definition_async(
        types.DefinitionParams(**client.place("over d|ata"))
    )
    assert declared == types.Location(URI, _span(client, "data = 4", 4))
    context = types.ReferenceContext(include_declaration=True)
    places = await server.text_document_references_async(
        types.ReferenceParams(**client.place("axis d|ata"), context=context)
    )
    assert places and [place.range.start.line for place in places] == [2, 4, 7]
    items = await server.text_document_completion_async(types.CompletionParams(**client.place("by |mean")))
    assert isinstance(items, types.CompletionList)
    assert [item.label for item in items.items] == ["sum", "mean", "max", "min"]
    document = types.TextDocumentIdentifier(URI)
    hints = await server.text_document_inlay_hint_async(types.InlayHintParams(document, WHOLE))
    assert hints and [hint.label for hint in hints] == [": split data", ": per data", ": same"]
    assert hints[0].position == position(client.text, client.text.index(", n = load"))


async def _edited(client: Client) -> None:
    """Key strokes, of which the last counts; a rename; formatting."""
    server = client.client
    start = client.text.index("mean # ")
    for before, after in (("m", ""), ("", "m"), ("m", "q")):
        edit = types.Range(position(client.text, start), position(client.text, start + len(before)))
        client.change(types.TextEdit(edit, after))
    (wrong,) = await client.diagnostics()
    assert wrong.code == "CP0404" and wrong.range == _span(client, "qean", 4)
    client.change(types.TextEdit(wrong.range, "mean"))
    assert [each.code for each in await client.diagnostics()] == ["CP1201"]
    renaming = client.place("input g|")
    edit = await server.text_document_rename_async(types.RenameParams(**renaming, new_name="grads"))
    assert edit and edit.changes
    assert applied(client.text, edit.changes[URI]) == client.text.replace("input g", "input grads").replace(
        "reduce g", "reduce grads"
    )
    with pytest.raises(JsonRpcException, match="CP1117"):
        await server.text_document_rename_async(types.RenameParams(**renaming, new_name="data"))
    options = types.FormattingOptions(tab_size=4, insert_spaces=True)
    document = types.TextDocumentIdentifier(URI)
    edits = await server.text_document_formatting_async(types.DocumentFormattingParams(document, options))
    assert edits and "    output x, y\n" in applied(client.text, list(edits))


async def _repaired(client: Client) -> None:
    server, document = client.client, types.TextDocumentIdentifier(URI)
    line = types.Range(types.Position(6, 0), types.Position(6, 1))
    context = types.CodeActionContext(diagnostics=[])
    actions = await server.text_document_code_action_async(types.CodeActionParams(document, line, context))
    titles = [action.title for action in actions or ()]
    assert titles == ["leave the count out", "ignore CP1201 here"]
    everything = types.CodeActionContext(diagnostics=[], only=[types.CodeActionKind.SourceFixAll])
    actions = await server.text_document_code_action_async(
        types.CodeActionParams(document, WHOLE, everything)
    )
    (action,) = list(actions or ())
    assert isinstance(action, types.CodeAction) and action.edit and action.edit.changes
    assert applied(client.text, action.edit.changes[URI]) == client.text.replace("x, n =", "x =")


def test_a_refused_request_is_no_fault_in_the_log():
    def logged(error: Exception) -> bool:
        raised = (type(error), error, None)
        return is_logged(logging.LogRecord("pygls", logging.ERROR, __file__, 1, "failed", None, raised))

    assert not logged(JsonRpcInvalidParams("CP1117"))
    assert logged(ValueError("a mistake of the server"))
    assert is_logged(logging.LogRecord("pygls", logging.ERROR, __file__, 1, "failed", None, None))


def test_a_message_that_cannot_be_read_is_one_line_of_the_log():
    bodies = [b'{"jsonrpc": nonsense', b"\xff", b"[1]", b'{"jsonrpc": "2.0", "method": "exit"}']
    written = b"".join(b"Content-Length: %d\r\n\r\n%b" % (len(body), body) for body in bodies)
    command = [sys.executable, "-m", "commplan", "lsp"]
    done = subprocess.run(command, input=written, capture_output=True, timeout=120, check=False)
    lines = done.stderr.decode().splitlines()
    assert [line.startswith("ERROR:pygls.server:a message cannot be read: ") for line in lines] == [True] * 3
    assert "JSONDecodeError: Expecting value" in lines[0]


def test_a_hover_shows_what_the_compiler_chose():
    async def session() -> str:
        async with connected(["--axis", "data=4"]) as client:
            await client.open(TEXT.replace("axis data = 4", "axis data = ?"))
            for _ in range(300):  # until the compiler has said it; no hover waits for it
                answer = await client.client.text_document_hover_async(
                    types.HoverParams(**client.place("y = re|duce"))
                )
                assert answer and isinstance(answer.contents, types.MarkupContent)
                if "```text" in answer.contents.value:
                    return answer.contents.value
        raise AssertionError("nothing came of the compiler")

    answer = asyncio.run(session())
    assert "all_reduce" in answer and "over data" in answer


def test_bad_texts_end_nothing():
    async def session() -> None:
        async with connected() as client:
            assert await client.open("\ufeff{{{ \r\r\n\x00")
            whole = types.Range(types.Position(0, 0), types.Position(9, 0))
            for text in ("", "plan", "plan p\neach step {\n", "=" * 2000):
                client.version += 1
                document = types.VersionedTextDocumentIdentifier(client.version, URI)
                event = types.TextDocumentContentChangeWholeDocument(text)
                client.client.text_document_did_change(types.DidChangeTextDocumentParams(document, [event]))
                client.text = text
                assert await client.diagnostics()
                request: Any = {
                    "text_document": types.TextDocumentIdentifier(URI),
                    "position": types.Position(0, 1),
                }
                await client.client.text_document_completion_async(types.CompletionParams(**request))
                await client.client.text_document_hover_async(types.HoverParams(**request))
                await client.client.text_document_inlay_hint_async(
                    types.InlayHintParams(types.TextDocumentIdentifier(URI), whole)
                )

    asyncio.run(session())


def _span(client: Client, word: str, length: int) -> types.Range:
    start = client.text.index(word)
    return types.Range(position(client.text, start), position(client.text, start + length))


def test_without_pygls_it_is_said_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(sys.modules, "pygls", None)
    assert main(["lsp"]) == 1
    err = capsys.readouterr().err
    assert "error[CP1118]" in err and "commplan[lsp]" in err
