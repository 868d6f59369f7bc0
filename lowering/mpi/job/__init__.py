"""The ranks of a job: who they are, how they wait for one another, how a failure is told, how they part."""
