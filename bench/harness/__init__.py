"""What the benches share: processes that stay up and wait their turn, one clock, checked results, figures.

Each system under test has a process on every host of the lab, started once. A system is measured in blocks of
repetitions, round robin over the systems, so that whatever else the machine does falls on all of them alike.
While another is measured its processes sit in `recv` on a Unix socket and burn nothing.
"""
