"""Host batches on devices: `batches` gives them as sharded arrays, `maps` runs device functions on single
records, `pinned` is memory of the host that devices copy from directly.
"""
