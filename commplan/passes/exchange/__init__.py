"""Parameter exchanges between workers: assigns owners of states and lowers exchanges to ordinary ops.

`place` is the pass, `owner_selection` predicts the costs of owner assignments, `lower_exchange` emits the
ops, and `owner_shards` handles states owned by only some of the ranks.
"""
