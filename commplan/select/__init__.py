"""Selects the algorithm and message size of collectives, for the passes `bucket`, `decompose` and `select`.

`options` lists candidates, `algorithm_search` selects the fastest, and `size_thresholds` decides without a
topology. Only passes import this package.
"""
