"""Proofs that a schedule is sound: after every pass, and of every file that is read."""

from __future__ import annotations

from commplan.ir.schedule import Schedule
from commplan.ir.serialization import decode
from commplan.verify.structural import verify as verify


def load_schedule(data: bytes, file: str = "<schedule>") -> Schedule:
    """The schedule in `data`, as `Program.save` writes it, verified.

    Raises CommplanError: CP1001 to CP1005 (see `ir.serialization.decode`).
    """
    return decode(data, file, verify)
