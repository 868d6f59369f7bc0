"""The reference for shared input: members as separate processes, on the same records, in the same run.

The processes of each system are started once for a number of members and cores; they block on their standard
input and use no CPU while another is measured. Systems take turns block by block.
"""
