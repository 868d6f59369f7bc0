"""Analyses of a graph.

They compute definitions and uses, the values that depend on sources alone, the ops that use servers, the
rounds of exchanges of a hidden phase, and the leaves of an optimizer state that belong to each weight.
"""
