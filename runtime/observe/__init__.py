"""Monitor a run: its steps, metrics of its input, and the end of a process that others would wait for."""
