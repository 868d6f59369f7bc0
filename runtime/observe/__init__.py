"""What is seen of a run: its steps before they run, metrics of the input, and the end of a rank that others
would wait for."""
