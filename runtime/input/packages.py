"""Import of optional third-party packages."""

from __future__ import annotations

import importlib
from types import ModuleType

from commplan.diagnostics import fail


def package(module: str, purpose: str, install: str) -> ModuleType:
    """Import `module`. Raises CP0918 with `purpose` if its package is not installed."""
    top = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != top:
            raise
        fail("CP0918", f"{purpose} need {top}, which is not installed", f"pip install {install}")
