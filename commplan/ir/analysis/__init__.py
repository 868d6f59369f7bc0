"""What is asked of a graph: who makes and who reads a value, what depends on sources alone, what stays on
servers, which leaf of an optimiser's state goes with which weight.
"""
