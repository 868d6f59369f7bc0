"""The shared code of the benches: processes that take turns, one clock, checked results, figures.

Each system under test has a process on every host of the lab, started once. A system is measured in blocks of
repetitions, round robin over the systems, so that other load on the machine affects all of them equally.
While another system is measured, its processes block in `recv` on a Unix socket and use no CPU.
"""
