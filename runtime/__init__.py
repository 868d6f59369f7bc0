"""The runtime of programs.

`run` is a bound program, `phases` its phases, `spmd` its steps, and `machines` the hardware it runs on.
`context` holds the schedule, machine and functions of a run. `input` makes batches, `param_server` is a
server process, `preflight` compares processes before the first step, and `observe` monitors a run.
`calibrate` and `rehearse` measure and check before a run.
"""
