"""The time of a whole phase: predictions of schedules, and their traces.

`predictor` has the time of one op: `input_time` of loads and shared batches, `requests` and `server_traffic`
of messages to servers. `step` and `step_profile` have the computation that overlaps with the phase.
`list_scheduler` runs tasks on lanes, with collectives that share links; `network.message_simulation` runs the
messages of one collective.
"""
