"""The network: links of a topology, places of ranks, loads of links, and single messages."""
