"""The machines on which a bound program runs (`machine.Machine`).

There are three kinds: a mesh of devices, the ranks of a communicator, and a parameter server. A fourth kind
is one more file.
"""
