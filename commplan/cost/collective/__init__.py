"""The time of one collective.

`step_model` simulates a program step by step on a network; `cost` and `stages` predict algorithms and
hierarchies; `nccl` predicts NCCL; `bounds` has lower bounds for all algorithms.
"""
