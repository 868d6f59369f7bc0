"""Observation of the input while it runs: `accounting` of cost per line, `visit_check` of the records read,
`wait_log` of long waits, `batch_record` for the record of the run.
"""
