"""Observation of the input while it runs.

`accounting` sums the cost per plan line, `visit_check` checks the records that are read, `wait_log` reports
long waits, `overdue_calls` detects calls that do not return, `batch_record` writes the record of the run.
"""
