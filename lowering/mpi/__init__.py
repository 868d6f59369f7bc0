"""The MPI lowering: collectives over the ranks of an mpi4py communicator, one device for each."""
