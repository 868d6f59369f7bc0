"""Training steps compiled ahead of time for clusters of H100: with a plan, and by XLA alone."""
