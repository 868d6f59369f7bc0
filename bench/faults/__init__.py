"""Faults, one a job, in every place where processes wait for one another: who is blamed, and how soon."""
