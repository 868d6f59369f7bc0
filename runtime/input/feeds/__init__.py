"""Feeds: independently started programs share the input of one host.

The memory of a feed is an anonymous file (`memfd_create`) that its processes keep open, so the kernel frees
it when the last process ends for any reason. A new process finds it among the open files of the user's
processes (`ring.meeting`). Each process holds a record lock until it ends, which shows whether it is alive
(`ring.memory`). A unit is made by any process with a free thread (`ring.producers`) and kept until all
members have taken it. A member that joins later reads earlier units itself (`feed`).
"""
