"""Host batches on devices: `batches` returns them as sharded arrays, `maps` runs device functions on single
records, and `clocked_phases` finds the stream of members with different rates.
"""
