"""Flight records in memory that outlives a rank: the file, the blocking ranks, traces and summaries.

A rank under MPI maps a file below `/dev/shm`. The engine writes the begin and the end of each collective into
a ring buffer in this file (`lowering/mpi/engine/recorder.cpp` has the same layout). `collectives` merges the
records of a run, and `clocks` aligns the clocks of its machines. Readers need neither JAX nor MPI.
"""
