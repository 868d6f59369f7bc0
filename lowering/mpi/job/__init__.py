"""The ranks of an MPI job: rendezvous, communicators, failures, and the order in which ranks exit."""
