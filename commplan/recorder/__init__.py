"""Flight records in memory that outlives a rank: the file, the blocking ranks, traces and summaries.

A rank under MPI maps a file below `/dev/shm`. The engine writes the begin and the end of each collective into
a ring buffer in this file (`lowering/mpi/engine/recorder.cpp` has the same layout). `collectives` merges the
records of a run, and `clocks` aligns the clocks of its machines. Readers need neither JAX nor MPI.
"""

from commplan.recorder.blame import Blame as Blame
from commplan.recorder.blame import blame as blame
from commplan.recorder.blame import state as state
from commplan.recorder.collectives import Run as Run
from commplan.recorder.collectives import read_run as read_run
from commplan.recorder.file import Record as Record
from commplan.recorder.reading import read_records as read_records
from commplan.recorder.summary import Summary as Summary
from commplan.recorder.summary import summary as summary
from commplan.recorder.trace import trace as trace
