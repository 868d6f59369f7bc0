"""Files of schema 2: they are read, and say what compiling their plan again says."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import numpy as np
import pytest

import commplan
from commplan.cli.saved import read_saved
from commplan.diagnostics import CommplanError
from commplan.ir.schedule import SCHEMA_VERSION, Collective, Op, Schedule
from commplan.ir.serialization.canonical_json import decode, is_of
from commplan.ir.serialization.text import parse_plan, print_plan
from commplan.verify import load_schedule, verify

FOLDER = Path(__file__).parent / "schema2"
EXAMPLES = Path(__file__).parents[2] / "examples" / "plans"
FILES = sorted(path for path in FOLDER.iterdir() if path.suffix != ".plan")
TREE = {"w": np.zeros((3, 3), np.float32), "b": np.zeros(2, np.float32)}


def plan_of(path: Path) -> commplan.Plan:
    name = path.name.partition(".")[0]
    own = FOLDER / f"{name}.plan"
    return commplan.load(own if own.exists() else EXAMPLES / f"{name}.plan")


def compiled(plan: commplan.Plan) -> Schedule:
    graph = plan.graph
    refs = [ref for ref in (*graph.inputs, *graph.states) if str(graph.value(ref).type) == "tree"]
    sizes = {axis.name: axis.size for axis in graph.axes if axis.size is not None}
    return plan.compile(axes=sizes, shapes={ref.partition(".")[0]: TREE for ref in refs}).schedule


def read(path: Path) -> Schedule:
    return read_saved(path.read_text(), path.name, verify)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_they_mean_what_they_meant(path: Path) -> None:
    old, plan = read(path), plan_of(path)
    new = compiled(plan)
    assert is_of(old, plan.graph) and old.plan_digest != new.plan_digest
    since = {
        "plan_digest": new.plan_digest,
        "file": new.file,
        "origin": new.origin,
        "state_shards": new.state_shards,
        "choices": new.choices,  # which say the same in other words
    }
    assert [choice.by for choice in old.choices] == [choice.by for choice in new.choices]
    assert old.origin is None and unordered(msgspec.structs.replace(old, **since)) == unordered(new)
    assert old.schema == SCHEMA_VERSION


def unordered(schedule: Schedule) -> Schedule:
    """`schedule` without what its collectives come after: axes have had chains of their own since."""
    phases = [
        msgspec.structs.replace(
            phase,
            ops=tuple(
                msgspec.structs.replace(op, after=()) if isinstance(op, Collective) else op
                for op in phase.ops
            ),
        )
        for phase in schedule.phases
    ]
    return msgspec.structs.replace(schedule, phases=tuple(phases))


def test_all_ops_are_among_them() -> None:
    kinds = {type(op) for path in FILES for phase in read(path).phases for op in phase.ops}
    assert kinds == set(Op.__args__)


@pytest.mark.parametrize(
    ("edit", "by"), [(r'"minor": \["rack"\]', '"minor": ["worker"]'), (r'"axis": "worker"', '"axis": "rack"')]
)
def test_an_edit_is_noticed(edit: str, by: str) -> None:
    text, count = re.subn(edit, by, (FOLDER / "parameter_hub.saved.json").read_text(), count=1)
    assert count == 1
    with pytest.raises(CommplanError) as caught:
        load_schedule(text.encode())
    assert caught.value.diagnostics[0].code in ("CP1004", "CP1005")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_an_edit_that_is_sound_is_noticed(path: Path) -> None:
    text, count = re.subn(r'(plan"?( =|:) "?)\w+', r"\1other", path.read_text(), count=1)
    assert count == 1
    with pytest.raises(CommplanError) as caught:
        read_saved(text, path.name, lambda schedule: ())
    assert caught.value.diagnostics[0].code == "CP1004"


def test_a_field_of_one_schema_is_unknown_in_the_other() -> None:
    text = (FOLDER / "easgd_sync.saved.json").read_text()
    with pytest.raises(CommplanError, match="missing required field `axes`"):
        load_schedule(text.replace('"schema": 2', '"schema": 3').encode())


def test_a_program_of_schema_2_is_one_of_its_plan() -> None:
    path = FOLDER / "parameter_hub.saved.json"
    assert commplan.Program.load(path, plan=plan_of(path)).schedule.plan == "parameter_hub"
    with pytest.raises(CommplanError, match="CP1007"):
        commplan.Program.load(path, plan=plan_of(FOLDER / "easgd_sync.saved.json"))


def test_plans_as_text_are_read_as_well() -> None:
    for path in sorted(EXAMPLES.glob("*.plan")):
        plan = commplan.load(path).graph
        text = print_plan(plan)
        older = re.sub(r"(= (?:gather|scatter|slice) .*)axes=\[(\w+)\]", r"\1over=\2", text)
        older = re.sub(r"(= (?:broadcast|elastic|exchange|reduce|share) .*)axes=", r"\1over=", older)
        assert parse_plan(older) == plan


@pytest.mark.parametrize("field", ["state_shards", "origin"])
def test_a_file_of_schema_2_has_no_fields_of_schema_3(field: str) -> None:
    """Its digest does not cover them."""
    content = msgspec.json.decode((FOLDER / "easgd_sync.saved.json").read_bytes())
    state = content["schedule"]["states"][0]
    shards = [{"state": state, "ownership": {"axes": [content["schedule"]["axes"][0]["name"]]}}]
    origin = msgspec.to_builtins(compiled(commplan.load(EXAMPLES / "easgd_sync.plan")).origin)
    content["schedule"][field] = {"state_shards": shards, "origin": origin}[field]
    with pytest.raises(CommplanError) as caught:
        decode(msgspec.json.encode(content), "x.json")
    (problem,) = caught.value.diagnostics
    assert problem.code == "CP1003"
    assert "schema 2 has no `origin`, `state_shards` or `stacked`" in problem.message
