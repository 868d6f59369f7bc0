"""Programs while they run: `run` is a bound program, `phases` its phases, `spmd` its steps, `machines` what
they run on. `input` makes batches, `param_server` is a server's process, `observe` looks at a run,
`calibrate` and `rehearse` measure and try before one.
"""
