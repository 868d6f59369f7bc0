"""What a rank began and ended, in memory that outlives it: the file, who held whom, and a trace of it.

A rank under MPI maps a file below `/dev/shm`; the engine writes each collective's begin and end into a ring
in it (`lowering/mpi/engine/recorder.cpp` has the same layout). Reading needs neither JAX nor MPI.
"""

from commplan.recorder.blame import Blame as Blame
from commplan.recorder.blame import blame as blame
from commplan.recorder.blame import state as state
from commplan.recorder.file import Record as Record
from commplan.recorder.file import read_records as read_records
from commplan.recorder.trace import trace as trace
