"""One file for each algorithm: a function from the number of ranks to a chunk program, and its entry for the
registry (`commplan.collectives.registry`), which finds it here. Nothing else imports these files."""
