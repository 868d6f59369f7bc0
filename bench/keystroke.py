"""How long after a keystroke an editor has the diagnostics of a plan, over the language server's streams.

    python -m bench.keystroke [--lines 500] [--keystrokes 60]

Needs the extra `lsp`. Each keystroke changes one character in the middle of the plan; the time is that from
sending the change to having received the diagnostics of that version, the pause included that the server
waits for more.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time

from lsprotocol import types
from pygls.lsp.client import LanguageClient

URI = "file:///bench/long.plan"
PAIR = """    loads_{n} = map decode_{n}(raw)
    mean_{n}  = reduce grads_{n} over data by mean via ring {{ bucket = 25 MiB, overlap = backward }}
    sum_{n}   = reduce grads_{n} over data by sum    # a comment of some length
    output loads_{n}, mean_{n}, sum_{n}
"""


def plan(lines: int) -> str:
    """A plan of so many lines: functions, inputs, and stages that read them."""
    count = max(1, (lines - 8) // 6)
    text = "plan long\n\naxis data = 8\nsource images : bytes\n"
    text += "".join(f"fn decode_{n}(bytes) -> u8[8] on host\n" for n in range(count))
    text += "".join(f"input grads_{n} : tree partial data\n" for n in range(count))
    text += "\neach step {\n    raw = load images batch 64 visit exactly_once seed 1\n"
    return text + "".join(PAIR.format(n=n) for n in range(count)) + "}\n"


async def measure(text: str, keystrokes: int) -> list[float]:
    """Seconds from each keystroke to its diagnostics."""
    client = LanguageClient("bench", "1")
    published: asyncio.Queue[types.PublishDiagnosticsParams] = asyncio.Queue()

    @client.feature(types.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS)  # pyright: ignore[reportUntypedFunctionDecorator]
    def publish(params: types.PublishDiagnosticsParams) -> None:
        published.put_nowait(params)

    _ = publish
    await client.start_io(sys.executable, "-m", "commplan", "lsp")  # pyright: ignore[reportUnknownMemberType]
    await client.initialize_async(types.InitializeParams(types.ClientCapabilities()))
    client.initialized(types.InitializedParams())
    item = types.TextDocumentItem(URI, "plan", 0, text)
    client.text_document_did_open(types.DidOpenTextDocumentParams(item))
    await published.get()
    line = text[: len(text) // 2].count("\n")
    column = text.splitlines()[line].index("=") + 2
    seconds: list[float] = []
    for version in range(1, keystrokes + 1):
        start = types.Position(line, column)
        end = types.Position(line, column + (version + 1) % 2)
        event = types.TextDocumentContentChangePartial(types.Range(start, end), "x" * (version % 2))
        document = types.VersionedTextDocumentIdentifier(version, URI)
        began = time.perf_counter()
        client.text_document_did_change(types.DidChangeTextDocumentParams(document, [event]))
        while (await published.get()).version != version:
            pass
        seconds.append(time.perf_counter() - began)
        await asyncio.sleep(0.05)
    await client.shutdown_async(None)
    client.exit(None)
    await client.stop()
    return seconds


def main() -> None:
    """Measure and print."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("--lines", type=int, default=500)
    arguments.add_argument("--keystrokes", type=int, default=60)
    args = arguments.parse_args()
    text = plan(args.lines)
    seconds = sorted(asyncio.run(measure(text, args.keystrokes)))
    figures = statistics.median(seconds), seconds[int(0.95 * len(seconds))], seconds[-1]
    median, late, worst = (f"{1000 * figure:.0f} ms" for figure in figures)
    counted = f"{text.count(chr(10))} lines, {len(seconds)} keystrokes"
    print(f"{counted}: median {median}, 95% within {late}, longest {worst}")


if __name__ == "__main__":
    main()
