"""Schedule files: the same bytes everywhere, strict reading, and refusals with the path of the error."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.byhand import HERE, compiled, ensemble_plan, reduce_plan, sharded_plan, tree
from support.random_case import make_case

import commplan
from commplan.cli import main
from commplan.cli.saved import read_saved
from commplan.diagnostics import CommplanError, Span
from commplan.ir.remark import Choice
from commplan.ir.schedule import SCHEMA_VERSION
from commplan.ir.serialization import canonical_json
from commplan.ir.serialization.canonical_json import decode, encode, plan_digest, schedule_digest
from commplan.ir.serialization.text import print_saved
from commplan.passes.base import PassContext
from commplan.passes.pipeline.manager import write_reproducer
from commplan.passes.pipeline.reproducer import read_reproducer
from commplan.render.human import human
from commplan.verify import load_schedule, verify

GIVEN = tree(w=(3, 3), b=(2,))
SCHEDULE = compiled(reduce_plan("mean"), None, grads=GIVEN)
DATA = encode(SCHEDULE)
ROOT = Path(__file__).parents[2]


def refusal(data: bytes, read: Any = load_schedule) -> Any:
    with pytest.raises(CommplanError) as caught:
        read(data, "x.json")
    (problem,) = caught.value.diagnostics
    assert problem.file == "x.json"
    return problem


def edited(*path: str | int, to: Any, digest: bool = True) -> bytes:
    """The file with one field changed, its digest made to fit."""
    content = msgspec.json.decode(DATA)
    node = content["schedule"]
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = to
    if digest:
        try:
            from commplan.ir.schedule import Schedule  # noqa: PLC0415

            content["digest"] = schedule_digest(msgspec.convert(content["schedule"], Schedule))
        except msgspec.ValidationError:
            pass
    return msgspec.json.encode(content)


@pytest.mark.parametrize(
    "schedule",
    [
        SCHEDULE,
        compiled(sharded_plan(), None, params=GIVEN, grads=GIVEN),
        compiled(ensemble_plan(), None),
        compiled(reduce_plan("sum"), None, grads=()),
    ],
    ids=["reduce", "sharded", "ensemble", "empty"],
)
def test_what_is_written_is_read(schedule: Any) -> None:
    assert load_schedule(encode(schedule)) == schedule
    assert decode(encode(schedule)) == schedule
    assert encode(load_schedule(encode(schedule))) == encode(schedule)


@settings(max_examples=25)
@given(st.integers(0, 10**6))
def test_random_schedules_are_read_back(seed: int) -> None:
    case = make_case(seed)
    plan = commplan.loads(case.text, "x.plan")
    sizes = {axis.name: case.sizes[axis.name] for axis in plan.graph.axes}
    schedule = plan.compile(axes=sizes, shapes=case.shapes, passes=case.pipeline).schedule
    assert load_schedule(encode(schedule)) == schedule


def test_the_head_of_a_file() -> None:
    content = msgspec.json.decode(DATA)
    assert list(content) == ["format", "schema", "digest", "schedule"]
    assert content["format"] == "commplan-schedule"
    assert content["schema"] == SCHEMA_VERSION
    assert content["digest"] == schedule_digest(SCHEDULE)
    assert DATA.endswith(b"}\n")


def test_places_are_no_part_of_digests() -> None:
    moved = msgspec.structs.replace(SCHEDULE, file="elsewhere.plan")
    phase = msgspec.structs.replace(moved.phases[0], span=Span(7, 7, 7, 7))
    moved = msgspec.structs.replace(moved, phases=(phase,))
    assert moved != SCHEDULE
    assert schedule_digest(moved) == schedule_digest(SCHEDULE)
    plan = reduce_plan("mean")
    assert plan_digest(msgspec.structs.replace(plan, file="elsewhere.plan")) == plan_digest(plan)
    axis = msgspec.structs.replace(plan.axes[0], span=HERE.to(Span(3, 3, 3, 3)))
    assert plan_digest(msgspec.structs.replace(plan, axes=(axis,))) == plan_digest(plan)
    assert plan_digest(reduce_plan("sum")) != plan_digest(plan)


def test_texts_that_look_like_places_are_part_of_digests() -> None:
    """The digest is that of the JSON without members `span`, `file` and `topology`, whatever texts say."""

    def without(value: Any) -> Any:
        if isinstance(value, dict):
            items = cast("dict[str, Any]", value).items()
            return {key: without(item) for key, item in items if key not in ("span", "file", "topology")}
        return [without(item) for item in cast("list[Any]", value)] if isinstance(value, list) else value

    odd = '"span":{"line":1},"file":"x", \\"file":null,"topology":{"name":"x"}'
    choices = (Choice(odd, f"{odd}\\", "span", HERE), Choice("file", "b", odd, None, (odd, "span")))
    schedule = msgspec.structs.replace(SCHEDULE, file=odd, choices=choices)
    plain = without(msgspec.json.decode(msgspec.json.encode(schedule)))
    expected = hashlib.sha256(msgspec.json.encode(plain, order="sorted")).hexdigest()
    assert schedule_digest(schedule) == expected
    assert schedule_digest(msgspec.structs.replace(schedule, choices=choices[:1])) != expected


PROGRAM = """
import sys
sys.path.insert(0, "tests")
import commplan
from commplan.ir.serialization.canonical_json import encode
from commplan.ir.serialization.text import print_plan, print_schedule
t = {"w": {"shape": [3, 4], "dtype": "f32"}, "b": {"shape": [], "dtype": "f32"}}
for name in ("ensemble_training", "sharded_update", "two_level", "parameter_hub"):
    plan = commplan.load(f"examples/plans/{name}.plan")
    names = [r[:-2] for r in plan.graph.inputs if str(plan.graph.value(r).type) == "tree"]
    schedule = plan.compile(shapes=dict.fromkeys(names, t)).schedule
    sys.stdout.write(print_plan(plan.graph) + print_schedule(schedule) + encode(schedule).decode())
    sys.stdout.write(plan.digest)
"""


def test_the_same_bytes_whatever_the_hash_seed() -> None:
    outputs: set[bytes] = set()
    for seed in ("0", "1", "4242", "random"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        command = [sys.executable, "-W", "error", "-c", PROGRAM]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True)
        outputs.add(done.stdout)
    assert len(outputs) == 1
    assert len(next(iter(outputs))) > 10_000


@pytest.mark.parametrize(
    "data",
    [b"", b"plan x", b"[]", b"3", b'{"format": "commplan-schedule"}', b"\xff\xfe", DATA[:-40], b"[" * 100_000,
     b'{"a":' * 100_000, DATA.replace(b'"digest"', b'"digests"', 1)],
)  # fmt: skip
def test_no_schedule_file(data: bytes) -> None:
    assert refusal(data).code == "CP1001"


def test_another_kind_of_file() -> None:
    problem = refusal(DATA.replace(b"commplan-schedule", b"commplan-trace", 1))
    assert (problem.code, problem.message) == (
        "CP1001", "this is a `commplan-trace` file, not a `commplan-schedule`",
    )  # fmt: skip


@pytest.mark.parametrize("schema", [4, SCHEMA_VERSION - 1, SCHEMA_VERSION + 1])
def test_another_schema_version(schema: int) -> None:
    problem = refusal(DATA.replace(b'"schema": %d' % SCHEMA_VERSION, b'"schema": %d' % schema, 1))
    assert problem.code == "CP1002"
    assert f"this commplan reads {SCHEMA_VERSION}" in problem.message


def test_a_file_of_schema_3_is_refused_with_a_fix(capsys: pytest.CaptureFixture[str]) -> None:
    """An earlier compiler wrote the file: its collectives lack `stage`, its unpacks lack `like`."""
    path = Path(__file__).with_name("schema_3.json")
    with pytest.raises(CommplanError) as caught:
        commplan.Program.load(path)
    (problem,) = caught.value.diagnostics
    assert problem.code == "CP1002"
    assert problem.message == f"the file has schema version 3, this commplan reads {SCHEMA_VERSION}"
    assert [note.text for note in problem.notes] == ["compile the plan again"]
    for verb in ("verify", "simulate"):
        assert main([verb, str(path)]) == 1
        assert "error[CP1002]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "to", "message"),
    [
        (("axes", 0, "size"), "eight", "Expected `int`, got `str` - at `$.axes[0].size`"),
        (("axes", 0, "kind"), "ring", "Invalid enum value 'ring' - at `$.axes[0].kind`"),
        (
            ("phases", 0, "ops", 0, "type"),
            "teleport",
            "Invalid value 'teleport' - at `$.phases[0].ops[0].type`",
        ),
        (("phases", 0, "ops", 0, "sort"), 1, "unknown field `sort` - at `$.phases[0].ops[0]`"),
        (("phases", 0, "color"), "red", "unknown field `color` - at `$.phases[0]`"),
        (("wings",), 2, "unknown field `wings` - at `$`"),
        (("entry", 0, "leaves", 0, "dtype"), "f8", "Invalid enum value 'f8'"),
        (("entry", 0, "leaves", 0, "shape"), [1.5], "Expected `int`, got `float`"),
        (("phases", 0, "ops"), None, "Expected `array`, got `null` - at `$.phases[0].ops`"),
        (
            ("phases", 0, "ops", 1, "hints"),
            {"overlap": "backwardx"},
            "Invalid enum value 'backwardx' - at `$.phases[0].ops[1].hints.overlap`",
        ),
    ],
)
def test_a_wrong_field_and_its_path(path: tuple[str | int, ...], to: Any, message: str) -> None:
    problem = refusal(edited(*path, to=to))
    assert problem.code == "CP1003"
    assert message in problem.message


def test_lists_of_other_lengths_differ() -> None:
    difference = canonical_json._difference({"a": [1, 2]}, {"a": [1]}, "$")  # pyright: ignore[reportPrivateUsage]
    assert difference == "Expected `array` of length 1, got 2 - at `$.a`"


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "/tmp/evil", "a b", "", "e\x1b[31m", "x\n"])
@pytest.mark.parametrize(
    "path", [("plan",), ("axes", 0, "name"), ("phases", 0, "name"), ("states", 0), ("plan_digest",)], ids=str
)
def test_names_and_digests_are_no_paths(path: tuple[str | int, ...], name: str) -> None:
    content = msgspec.json.decode(
        encode(compiled(sharded_plan(), None, params=GIVEN, grads=GIVEN, adam=GIVEN))
    )
    node = content["schedule"]
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = name
    problem = refusal(msgspec.json.encode(content))
    assert problem.code == "CP1003"
    assert "$." + str(path[0]) in problem.message
    assert "\x1b" not in human([problem], {}, color=False)


def test_no_file_is_written_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / "inside" / "folder"
    folder.mkdir(parents=True)
    evil = msgspec.structs.replace(SCHEDULE, plan="../evil")
    place = folder / "evil.schedule.json"
    place.write_bytes(encode(evil))
    with pytest.raises(CommplanError, match="CP1003"):
        commplan.Program.load(place).save(folder)
    with pytest.raises(CommplanError, match="CP1008"):
        read_saved(print_saved(evil), "evil.txt", verify)
    reproducer = write_reproducer(SCHEDULE, "bucket", PassContext(), "", folder)
    reproducer.write_text(reproducer.read_text().replace(f'"plan": "{SCHEDULE.plan}"', '"plan": "../evil"'))
    with pytest.raises(CommplanError, match="CP0723"):
        read_reproducer(reproducer)
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {place.name, reproducer.name}


def test_an_edit_is_noticed() -> None:
    data = edited("choices", 0, "why", to="because I said so", digest=False)
    problem = refusal(data)
    assert problem.code == "CP1004"
    assert schedule_digest(SCHEDULE) in problem.notes[1].text
    assert refusal(data, decode).code == "CP1004"
    load_schedule(edited("choices", 0, "why", to="because I said so"))


@pytest.mark.parametrize(
    ("path", "to", "code", "message"),
    [
        (("axes", 0, "size"), -3, "CP0734", "axis `data` has size -3"),
        (("phases", 0, "ops", 0, "parts", 0, "value"), "grads.7", "CP0730", "reads `grads.7`"),
        (("phases", 0, "ops", 0, "parts", 0, "size"), 1000, "CP0731", "are not inside"),
        (("phases", 0, "ops", 1, "nbytes"), 1, "CP0732", "has 44 bytes, not 1"),
        (("phases", 0, "ops", 1, "after"), ["grads.1"], "CP0733", "a cycle or a wrong order"),
        (("phases", 0, "ops", 1, "axes"), ["dta"], "CP0734", "there is no axis `dta`"),
        (("phases", 0, "ops", 1, "root"), 2, "CP0735", "root 2 cannot be combined"),
        (("phases", 0, "period"), 0, "CP0735", "has period 0"),
        (("inputs",), [], "CP0730", "the values on entry are not the inputs and states"),
    ],
)
def test_nonsense_that_reads_well(path: tuple[str | int, ...], to: Any, code: str, message: str) -> None:
    problem = refusal(edited(*path, to=to))
    assert problem.code == "CP1005"
    assert any(note.text.startswith(code) and message in note.text for note in problem.notes)


@given(st.integers(0, len(DATA)), st.integers(0, 20), st.binary(max_size=4))
def test_damaged_files_are_refused_or_unchanged(start: int, length: int, put: bytes) -> None:
    damaged = DATA[:start] + put + DATA[start + length :]
    try:
        read = load_schedule(damaged)
    except CommplanError as error:
        assert error.diagnostics[0].code in ("CP1001", "CP1002", "CP1003", "CP1004", "CP1005")
    else:
        assert schedule_digest(read) == schedule_digest(SCHEDULE)
