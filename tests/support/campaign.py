"""Parameters of tests: `make test` takes a few of them, `make test-all` all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def parameters(few: Iterable[Any], more: Iterable[Any]) -> list[Any]:
    """The parameters `few`, and `more` with the mark `campaign`; a tuple has the values of several names."""
    tuples = [case if isinstance(case, tuple) else (case,) for case in more]
    return [*few, *(pytest.param(*values, marks=pytest.mark.campaign) for values in tuples)]
