"""Comparisons and trials before the first step of a run, which all processes make together."""
