"""What is seen of a run: its steps before they run and meanwhile, collectives on known data, metrics of the
input, and the end of a process that others would wait for."""
