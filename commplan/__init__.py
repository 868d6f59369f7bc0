"""commplan compiles communication plans for training. This module has the public API."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commplan import guard as guard
    from commplan import optax as optax
    from commplan.api import Plan as Plan
    from commplan.api import Program as Program
    from commplan.api import load as load
    from commplan.api import loads as loads
    from commplan.compile_options import CompileOptions as CompileOptions
    from commplan.diagnostics import CommplanError as CommplanError
    from commplan.diagnostics import Diagnostic as Diagnostic
    from commplan.feeds import join as join
    from commplan.runtime.input.sources.adapters import column as column
    from commplan.runtime.input.sources.adapters import serial as serial
    from commplan.runtime.input.sources.folders import folder as folder
    from commplan.runtime.input.sources.folders import paths as paths
    from commplan.runtime.observe.abort_hook import install_hooks as install_hooks
    from commplan.runtime.run import Run as Run
    from commplan.topology import Topology as Topology
    from commplan.topology import load_topology as load_topology

__version__ = "0.1.0"
__all__ = [
    "CommplanError", "CompileOptions", "Diagnostic", "Plan", "Program", "Topology", "column", "folder",
    "install_hooks", "join", "load", "load_topology", "loads", "paths", "serial",
]  # fmt: skip
# Public names by the module that defines them. `Run` and `optax` require jax, so `__all__` omits them.
_NAMES = {
    "commplan.api": ("Plan", "Program", "load", "loads"),
    "commplan.compile_options": ("CompileOptions",),
    "commplan.diagnostics": ("CommplanError", "Diagnostic"),
    "commplan.feeds": ("join",),
    "commplan.runtime.input.sources.adapters": ("column", "serial"),
    "commplan.runtime.input.sources.folders": ("folder", "paths"),
    "commplan.runtime.observe.abort_hook": ("install_hooks",),
    "commplan.runtime.run": ("Run",),
    "commplan.topology": ("Topology", "load_topology"),
}
_MODULES = ("guard", "optax")  # public submodules
_HOMES = {name: module for module, names in _NAMES.items() for name in names}  # the module of each name
importlib.import_module("commplan.ending")  # must precede exit handlers of the program


def __getattr__(name: str) -> Any:
    """Import public names lazily, so that `commplan check` and `fmt` do not load the compiler."""
    if name in _MODULES:
        return importlib.import_module(f"commplan.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The public names and modules only, regardless of imported submodules."""
    return sorted({*_HOMES, *_MODULES})
