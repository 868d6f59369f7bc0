"""Faults, one a job, in every place where processes wait for one another: who is blamed, in which line, how soon."""
