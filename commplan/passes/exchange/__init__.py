"""Parameter exchanges between workers: who owns and updates which part of a state.

`place` is the pass `place`; `owner_selection` lists who may own what, `lower_exchange` writes it as
ordinary ops, by `owner_shards` where only some ranks own a part.
"""
