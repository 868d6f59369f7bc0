"""The two graphs of a plan: `plan`, the checked source, and `schedule`, the compiled form.

`stages` and `ops` define the nodes, one module per kind. `symbolic` defines their semantics, `types` and
`values` their operands and results. `analysis` holds analyses of a graph, and `serialization` its file
formats.
"""
