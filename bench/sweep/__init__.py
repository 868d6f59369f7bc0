"""A sweep on one host: programs that are started by themselves, die and come back, and share one input.

`timetable` says when each is started, killed and started again, from a seed; `program` is one of them, of
commplan or of a peer; `stage` carries the timetable out; `account` holds what they were given against what
they should be, and what it cost against what nobody can do without.
"""
