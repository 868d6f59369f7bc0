"""Input: sources, order of records, host functions, work ahead, sharing between members and processes."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from commplan.runtime.input.group import Group as Group
from commplan.runtime.input.group import group as group  # eager: the submodule has the same name

if TYPE_CHECKING:
    from commplan.runtime.input.host_batch import HostBatch as HostBatch
    from commplan.runtime.input.iterator import PhaseBatches as PhaseBatches
    from commplan.runtime.input.observe.accounting import LineUsage as LineUsage
    from commplan.runtime.input.observe.accounting import Summary as Summary
    from commplan.runtime.input.sources.adapters import Source as Source
    from commplan.runtime.input.sources.adapters import column as column
    from commplan.runtime.input.sources.adapters import serial as serial
    from commplan.runtime.input.sources.folders import Files as Files
    from commplan.runtime.input.sources.folders import folder as folder
    from commplan.runtime.input.sources.folders import paths as paths

# Loaded on first use: a member of a feed needs only some of these modules.
_NAMES = {
    "host_batch": ("HostBatch",),
    "iterator": ("PhaseBatches",),
    "observe.accounting": ("LineUsage", "Summary"),
    "sources.adapters": ("Source", "column", "serial"),
    "sources.folders": ("Files", "folder", "paths"),
}
_HOMES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
