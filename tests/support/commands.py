"""The output of the command, for tests that run it in this process."""

from __future__ import annotations

import json
from typing import Any

import pytest


def document(capsys: pytest.CaptureFixture[str]) -> Any:
    """The one JSON document on stdout; stderr must be empty."""
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)
