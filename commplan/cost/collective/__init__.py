"""Seconds of one collective: step by step on a network (`step_model`), for a named algorithm or hierarchy
(`cost`, `stages`), and what no algorithm can beat (`bounds`)."""
