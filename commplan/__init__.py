"""commplan compiles communication plans for training. Everything public is here."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commplan import optax as optax
    from commplan.api import Plan as Plan
    from commplan.api import Program as Program
    from commplan.api import load as load
    from commplan.api import loads as loads
    from commplan.diagnostics import CommplanError as CommplanError
    from commplan.diagnostics import Diagnostic as Diagnostic
    from commplan.feeds import join as join
    from commplan.runtime.input.sources.adapters import column as column
    from commplan.runtime.input.sources.adapters import serial as serial
    from commplan.runtime.input.sources.folders import folder as folder
    from commplan.runtime.input.sources.folders import paths as paths
    from commplan.runtime.run import Run as Run
    from commplan.topology import Topology as Topology
    from commplan.topology import load_topology as load_topology

__version__ = "0.1.0"
__all__ = [
    "CommplanError", "Diagnostic", "Plan", "Program", "Topology", "column", "folder", "join", "load",
    "load_topology", "loads", "paths", "serial",
]  # fmt: skip
# Where the rest of the face is found. `Run` and `optax` need jax, and `import *` must do without it.
_NAMES = {
    "commplan.api": ("Plan", "Program", "load", "loads"),
    "commplan.diagnostics": ("CommplanError", "Diagnostic"),
    "commplan.feeds": ("join",),
    "commplan.runtime.input.sources.adapters": ("column", "serial"),
    "commplan.runtime.input.sources.folders": ("folder", "paths"),
    "commplan.runtime.run": ("Run",),
    "commplan.topology": ("Topology", "load_topology"),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}
importlib.import_module("commplan.ending")  # before programs register handlers of their own


def __getattr__(name: str) -> Any:
    """Each part is loaded when it is first asked for: `commplan check` and `fmt` do without the compiler."""
    if name == "optax":
        return importlib.import_module("commplan.optax")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The public names and nothing else, whatever else was imported."""
    return sorted({*_HOMES, "optax"})
