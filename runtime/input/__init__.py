"""Input: sources, order of records, host functions, work ahead, sharing between members and processes."""

from commplan.runtime.input.accounting import LineUsage as LineUsage
from commplan.runtime.input.accounting import Summary as Summary
from commplan.runtime.input.group import Group as Group
from commplan.runtime.input.group import group as group
from commplan.runtime.input.host_batch import HostBatch as HostBatch
from commplan.runtime.input.iterator import PhaseBatches as PhaseBatches
from commplan.runtime.input.sources.adapters import column as column
from commplan.runtime.input.sources.adapters import serial as serial
from commplan.runtime.input.sources.files import Files as Files
from commplan.runtime.input.sources.files import Source as Source
from commplan.runtime.input.sources.files import folder as folder
from commplan.runtime.input.sources.files import paths as paths
