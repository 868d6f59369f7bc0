"""What is seen of a run: its steps before they run, collectives on known data, metrics of the input, and the
end of a rank that others would wait for."""
