"""`commplan lsp`: the language server, on standard input and output."""

from __future__ import annotations

import logging
from argparse import Namespace

from commplan.cli.console import Console
from commplan.diagnostics import fail


def run(args: Namespace, console: Console) -> int:
    """Serve one editor until it says goodbye. Raises CP1118 where the extra `lsp` is not installed."""
    try:
        import pygls  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError:
        message = "the language server needs pygls, which is not installed here"
        fail("CP1118", message, "pip install 'commplan[lsp]'")
    from commplan.lsp.server import server

    logging.basicConfig(level=logging.ERROR)  # to stderr, which editors show as the server's log
    server().start_io()
    return 0
