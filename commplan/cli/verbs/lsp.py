"""`commplan lsp`: run the language server on standard input and output."""

from __future__ import annotations

import logging
import os
from argparse import Namespace

from commplan.cli.console import Console
from commplan.diagnostics import import_optional


def run(args: Namespace, console: Console) -> int:
    """Serve one editor until it disconnects. Raises CP1118 if the extra `lsp` is not installed."""
    import_optional("pygls", "CP1118", "language servers", "'commplan[lsp]'")
    from commplan.lsp.server import is_logged, server

    logging.basicConfig(level=logging.ERROR)  # to stderr, the server's log in editors
    for name in ("pygls.protocol.json_rpc", "pygls.server"):
        logging.getLogger(name).addFilter(is_logged)
    # Duplicates, since pygls closes them; stdout is redirected so that prints do not corrupt messages.
    with os.fdopen(os.dup(0), "rb") as messages, os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        server().start_io(messages, answers)
    return 0
