"""Messages between processes about a part that failed."""

from __future__ import annotations

import pytest

from commplan.diagnostics import CommplanError, Diagnostic, Note
from commplan.runtime.input.shm import slot_status

PLACE = slot_status.BatchPosition(1, 2, 3)


@pytest.mark.parametrize("long", [1, 1000])
def test_what_is_no_text_travels_too(long: int) -> None:
    """Names of files may hold bytes that stand for no character."""
    odd = "photo \udcff.jpg" * long
    error = CommplanError(Diagnostic("CP0906", odd, notes=(Note(odd),), file="odd \udcff.plan"))
    place, (received,), other, process = slot_status.read_status(slot_status.encode_status(PLACE, error, 5))
    assert (place, received.code, other, process) == (PLACE, "CP0906", "", 5)
    assert received.message.startswith(r"photo \udcff.jpg") and received.file == r"odd \udcff.plan"
    _, problems, other, _ = slot_status.read_status(slot_status.encode_status(PLACE, SystemExit(odd)))
    assert problems == () and other.startswith(r"SystemExit: photo \udcff.jpg")
