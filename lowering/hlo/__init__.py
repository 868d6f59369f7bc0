"""Reads compiled programs: the text of XLA's executables, and the collectives and work of a step.

`reader` parses the text, `sources` its table of stack frames, `walk` makes a `step.CompiledStep` of it.
"""
