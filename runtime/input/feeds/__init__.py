"""Programs that were started by themselves and share the input of one host.

The memory of a feed is a file without a name (`memfd_create`) that its members hold open, so that nothing
of it is left when the last of them has ended, whatever it died of. Who comes later finds it among the open
files of the user's processes (`directory`). Who is there is told by locks that the kernel lets go of
(`memory`): one for each member, one for each process, and one for each core that makes units. A unit is a
batch of the plan, made by whichever process has a core for it (`maker`), and kept until every member has
let go of it. A member reads what has gone before it came by itself (`feed`).
"""
