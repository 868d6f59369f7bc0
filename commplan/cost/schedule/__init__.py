"""The time of a whole phase: predictions of schedules, and their traces.

`list_scheduler` runs tasks on lanes, with collectives that share links; `network.message_simulation` runs the
messages of one collective.
"""
