"""Input: sources, order of records, host functions, work ahead, sharing between members and processes."""

from commplan.runtime.data.adapters import column as column
from commplan.runtime.data.adapters import serial as serial
from commplan.runtime.data.batches import PhaseBatches as PhaseBatches
from commplan.runtime.data.group import Group as Group
from commplan.runtime.data.group import group as group
from commplan.runtime.data.handing import HostBatch as HostBatch
from commplan.runtime.data.sources import Files as Files
from commplan.runtime.data.sources import Source as Source
from commplan.runtime.data.sources import folder as folder
from commplan.runtime.data.sources import paths as paths
from commplan.runtime.data.usage import LineUsage as LineUsage
from commplan.runtime.data.usage import Summary as Summary
