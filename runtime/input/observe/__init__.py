"""What can be told of the input while it runs: `accounting` of its cost per line, `visit_check` of who read
what, `wait_log` of waits that last, `batch_record` for the record of the run.
"""
