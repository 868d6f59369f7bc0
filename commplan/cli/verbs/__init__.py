"""A file per verb of the command, named like it, with `run(args, console)`, which returns the exit code.

A verb of several files is a folder: `run` has its tables and the live view of its ranks, `verify` the input
and the servers, `calibrate` the costs of the input. What verbs share stands in the folder above.
"""
