"""Proofs that a schedule is sound, run after every pass and on every file that is loaded.

`structural` is the entry point and calls the other modules:

- `equivalence` compares a schedule with its plan symbolically;
- `algorithms` proves that collectives keep their postconditions, `programs` one chunk program at a time;
- `input` proves the visitation contract of every load;
- `ownership` proves that each state on servers has exactly one owner;
- `memory` bounds the bytes of one rank.

`claims` lists the properties that are proved, assumed and not checked.
"""

from __future__ import annotations

from commplan.ir.schedule import Schedule
from commplan.ir.serialization.canonical_json import decode
from commplan.verify.structural import verify as verify


def load_schedule(data: bytes, file: str = "<schedule>") -> Schedule:
    """Load and verify a schedule written by `Program.save`.

    Args:
        data: contents of the schedule file.
        file: name of the file, used in diagnostics.

    Raises:
        CommplanError: CP1001 to CP1005 (see `ir.serialization.canonical_json.decode`).
    """
    return decode(data, file, verify)
