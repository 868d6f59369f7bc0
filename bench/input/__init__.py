"""The yardstick of shared input: members in processes of their own, on the same records, in the same run.

Every system has its processes started once for a number of members and cores; they wait on their standard
input and burn nothing while another is measured. Systems take turns block by block."""
