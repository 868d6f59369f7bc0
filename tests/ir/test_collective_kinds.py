"""The table of properties covers every kind, and agrees with the ends of chunk programs."""

from __future__ import annotations

from typing import get_args

import pytest

from commplan.collectives.program import KINDS, Kind
from commplan.collectives.registry import algorithms, program
from commplan.ir.collective_kinds import PROPERTIES
from commplan.ir.schedule import CollectiveKind


def test_every_kind_has_properties() -> None:
    assert PROPERTIES.keys() == {*get_args(CollectiveKind), *KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_properties_agree_with_chunk_programs(kind: Kind) -> None:
    """A program of three ranks adds if its kind does."""
    rounds = program(algorithms(kind)[0], kind, 3).rounds
    sends = [send for number in range(len(rounds)) for send in rounds[number]]
    assert any(send.reduce for send in sends) == PROPERTIES[kind].reduces
