"""Models of GPUs, for steps that are compiled and need not run: `targets` and their rates, `estimate` of a
step's time, the lower `bound` of its waiting, and a latency `profile` for XLA's scheduler.
"""
