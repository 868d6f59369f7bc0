"""Training steps compiled ahead of time for clusters of H100: a plan's beside what XLA makes of them."""
