"""One module for each verb of the command, with `run(args, console)`, which returns the exit code.

Verbs with several modules are folders: `run` has tables and a live view, `verify` has the input and servers,
`calibrate` has input costs. Code shared by verbs is in the parent folder.
"""
