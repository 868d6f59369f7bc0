"""The table of properties covers every kind, and agrees with the ends of chunk programs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from commplan.collectives.program import KINDS, Kind
from commplan.collectives.registry import algorithms, program
from commplan.ir.collective_kinds import PROPERTIES
from commplan.ir.schedule import CollectiveKind


def test_every_kind_has_properties() -> None:
    assert PROPERTIES.keys() == {*get_args(CollectiveKind), *KINDS}


def test_the_engine_numbers_kinds_in_the_order_of_the_table() -> None:
    engine = Path(__file__).parents[2] / "lowering/mpi/engine/engine.h"
    enum = re.search(r"enum Collective : int64_t \{ (.*) \};", engine.read_text())
    assert enum is not None
    numbered = [re.sub(r"(?<=.)([A-Z])", r"_\1", name[1:]).lower() for name in enum[1].split(", ")]
    assert [*numbered, "shift", "swap"] == list(PROPERTIES)


@pytest.mark.parametrize("kind", KINDS)
def test_properties_agree_with_chunk_programs(kind: Kind) -> None:
    """A program of three ranks adds if its kind does."""
    rounds = program(algorithms(kind)[0], kind, 3).rounds
    sends = [send for number in range(len(rounds)) for send in rounds[number]]
    assert any(send.reduce for send in sends) == PROPERTIES[kind].reduces
