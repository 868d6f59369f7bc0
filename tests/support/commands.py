"""What the command has printed, for tests that run it in their own process."""

from __future__ import annotations

import json
from typing import Any

import pytest


def document(capsys: pytest.CaptureFixture[str]) -> Any:
    """The one JSON document on stdout; nothing stands on stderr."""
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)
