"""The two graphs: `plan` as it was checked, `schedule` as it runs, and what all rooms ask of them.

`stages` and `ops` define what a line and an op are, one file each; `symbolic` is their meaning on symbols,
`types` and `values` what they hold, `analysis` what is asked of a graph, `serialization` how it is written.
"""
