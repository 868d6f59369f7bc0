"""Who carries out a collective, and in messages of which size: what `bucket`, `decompose` and `select` share.

`options` lists what may carry it out, `algorithm_search` takes the fastest alone, and
`size_thresholds` decides where no machine is known. Imported by passes alone.
"""
