"""Proofs that a schedule is sound: after every pass, and of every file that is read.

`structural` begins, and asks the others: `equivalence` compares a schedule with its plan on symbols,
`algorithms` its collectives with what they promise (`programs`: one chunk program), `input` proves what an
epoch promises, `ownership` that states on servers have one owner, `memory` bounds a rank's bytes. `claims`
says what is proved, believed and not looked at.
"""

from __future__ import annotations

from commplan.ir.schedule import Schedule
from commplan.ir.serialization.canonical_json import decode
from commplan.verify.structural import verify as verify


def load_schedule(data: bytes, file: str = "<schedule>") -> Schedule:
    """The schedule in `data`, as `Program.save` writes it, verified.

    Raises CommplanError: CP1001 to CP1005 (see `ir.serialization.canonical_json.decode`).
    """
    return decode(data, file, verify)
