"""Analyses of a graph.

They compute definitions and uses, values that depend on sources alone, ops that use servers, and the leaves
of an optimizer state that belong to each weight.
"""
