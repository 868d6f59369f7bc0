"""Analyses of a graph.

- `def_use`: definitions and uses of values.
- `input_slice`: the values that depend on sources alone.
- `server_ops`: the ops that use servers.
- `rounds`: the rounds of exchanges of a hidden phase.
- `optimizer_leaf_match`: the leaves of an optimizer state that belong to each weight.
"""
