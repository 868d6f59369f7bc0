"""Schedule files whose plan, sizes or shards were edited by hand, with new digests: each is refused with the
error and its place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from support.byhand import compiled as by_hand
from support.byhand import sharded_plan, tree

import commplan
from commplan.diagnostics import CommplanError
from commplan.ir.schedule import SCHEMA_VERSION, Leaf, Schedule
from commplan.ir.serialization.canonical_json import FORMAT, encode, plan_digest, schedule_digest
from commplan.ir.shard_shapes import cut, row_size
from commplan.ir.types import LARGEST, MOST_SERVERS, DType
from commplan.protocol.chunks import assign
from commplan.verify import load_schedule, verify

ROOT = Path(__file__).parents[2]
SHAPES = {"w": np.zeros((3, 3), np.float32), "b": np.zeros(2, np.float32)}
HUGE = 10**400
Edit = Callable[[Any], None]


def example(name: str) -> Schedule:
    plan = commplan.load(ROOT / "examples" / "plans" / f"{name}.plan")
    graph = plan.graph
    refs = [ref for ref in (*graph.inputs, *graph.states) if str(graph.value(ref).type) == "tree"]
    sizes = {axis.name: axis.size or 4 for axis in graph.axes}
    return plan.compile(axes=sizes, shapes={ref.partition(".")[0]: SHAPES for ref in refs}).schedule


def to(*path: str | int, value: Any) -> Edit:
    def edit(content: Any) -> None:
        for key in path[:-1]:
            content = content[key]
        content[path[-1]] = value

    return edit


def of_plan(*path: str | int, value: Any) -> Edit:
    return to("origin", "plan", *path, value=value)


def of_stage(phase: int, stage: int, *path: str | int, value: Any) -> Edit:
    return of_plan("phases", phase, "stages", stage, *path, value=value)


def saved(content: Any) -> bytes:
    """The file, with matching digests if it can be read."""
    digest = ""
    try:
        read = msgspec.convert(content, Schedule)
        if read.origin is not None:
            content["plan_digest"] = plan_digest(read.origin.plan)
        digest = schedule_digest(msgspec.convert(content, Schedule))
    except msgspec.ValidationError:
        pass
    return msgspec.json.encode(
        {"format": FORMAT, "schema": SCHEMA_VERSION, "digest": digest, "schedule": content}
    )


def refusal(name: str, edit: Edit) -> list[str]:
    content = msgspec.json.decode(msgspec.json.encode(example(name)))
    edit(content)
    with pytest.raises(CommplanError) as caught:
        load_schedule(saved(content), "x.json")
    (problem,) = caught.value.diagnostics
    assert problem.code in ("CP1003", "CP1005")
    return [problem.message, *(note.text for note in problem.notes)]


def read_of(content: Any) -> Any:
    return next(op for op in content["phases"][0]["ops"] if op["type"] == "read")


def clock(content: Any) -> None:
    read_of(content)["clock"] = "zz"


def no_axes(content: Any) -> None:
    next(op for op in content["phases"][0]["ops"] if op["type"] == "share")["axes"] = []


def servers(number: int) -> Edit:
    def edit(content: Any) -> None:
        index = next(i for i, axis in enumerate(content["axes"]) if axis["kind"] == "server")
        content["axes"][index]["size"] = content["origin"]["sizes"][index] = number
        content["origin"]["plan"]["axes"][index]["size"] = number

    return edit


EDITS = {
    "clock": ("ensemble_rates", clock, "CP0734: there is no axis `zz`"),
    "clock of the plan": (
        "ensemble_rates",
        of_stage(0, 0, "clock", value="zz"),
        "CP0734: `load` of the schedule's plan: there is no axis `zz`",
    ),
    "shard": (
        "parameter_hub",
        to("state_shards", 0, "ownership", "axes", value=["zz"]),
        "owners of `moment.0`: there is no axis `zz`",
    ),
    "owners": (
        "parameter_hub",
        to("state_shards", 0, "ownership", "owners", value=[99]),
        "there is no such owner among",
    ),
    "operand": (
        "weighted_mean",
        of_stage(0, 0, "operand", value="zz.0"),
        "CP0730: `reduce` of the schedule's plan: it reads `zz.0`, which the phase does not have",
    ),
    "made": ("weighted_mean", of_stage(0, 0, "result", value="zz.0"), "`zz.0` is made but not declared"),
    "twice": ("weighted_mean", of_stage(0, 0, "result", value="loss.1"), "`loss.1` is made twice"),
    "scalar": (
        "weighted_mean",
        of_stage(0, 0, "op", "weight", value="grads.0"),
        "CP0731: `reduce` of the schedule's plan: `grads.0` is",
    ),
    "shapes": (
        "weighted_mean",
        of_stage(0, 1, "operand", value="grads.0"),
        "CP0731: `reduce` of the schedule's plan: `grads.0`, `loss.1` have different shapes",
    ),
    "type": (
        "weighted_mean",
        of_plan("values", 1, "type", value={"type": "array", "dtype": "f32", "shape": [7]}),
        "CP0731: `count.0` of the schedule's plan is no f32[7]",
    ),
    "axis": (
        "weighted_mean",
        of_stage(0, 0, "axes", value=["\0"]),
        "CP0734: `reduce` of the schedule's plan: there is no axis `\0`",
    ),
    "output": (
        "weighted_mean",
        of_plan("phases", 0, "outputs", 0, "value", value="grads.7"),
        "CP0730: in the schedule's plan `grads` is bound to `grads.7`",
    ),
    "source": ("ensemble_readers", of_stage(0, 0, "source", value="zz"), "there is no source `zz`"),
    "function": ("ensemble_readers", of_stage(0, 1, "fn", value="zz"), "there is no function `zz`"),
    "arity": ("ensemble_readers", of_stage(0, 1, "operands", value=[]), "takes 1 value, found 0"),
    "results": ("parameter_hub", of_stage(1, 0, "results", value=[]), "Expected `array` of length >= 1"),
    "fewer results": (
        "parameter_hub",
        of_stage(1, 0, "results", value=["weights.2"]),
        "returns 2 values, found 1 name for them",
    ),
    "no axes": ("ensemble_readers", no_axes, "Expected `array` of length >= 1"),
    "record": (
        "ensemble_readers",
        of_plan("fns", 0, "results", 0, "shape", 0, value=-(10**30)),
        "Expected `int` >= 0",
    ),
    "dimension": (
        "weighted_mean",
        to("origin", "values", 0, "leaves", 0, "shape", value=[HUGE]),
        f"Expected `int` <= {LARGEST}",
    ),
    "bytes": (
        "weighted_mean",
        to("origin", "values", 0, "leaves", 0, "shape", value=[LARGEST]),
        "CP0731: `grads.0` has more bytes than can be counted",
    ),
    "servers": ("easgd_async", servers(2**64), f"has size {2**64}, of at most {MOST_SERVERS}"),
    "few servers": ("easgd_async", servers(2**16 + 1), f"has size {2**16 + 1}, of at most {MOST_SERVERS}"),
    "no plan": ("weighted_mean", to("origin", value=None), "`origin`, its plan, is missing"),
}


@pytest.mark.parametrize(("name", "edit", "reason"), EDITS.values(), ids=EDITS)
def test_an_edited_file_is_refused_with_its_reason(name: str, edit: Edit, reason: str) -> None:
    assert any(reason in message for message in refusal(name, edit)), refusal(name, edit)


def test_sizes_are_divided_exactly() -> None:
    for size in (2**53 + 1, 2**60 + 7, LARGEST):
        leaf = Leaf("w", (size,), DType.U8)
        rows = size // 3 + (size % 3 > 0)
        assert cut("tree", leaf, 3).shape == cut("array", leaf, 3).shape == (rows,)
        assert row_size("tree", leaf, 3) == row_size("array", leaf, 3) == rows


def test_a_value_is_cut_from_the_leaves_that_its_operand_has() -> None:
    """Five elements and six are cut four ways into rows of two."""
    schedule = by_hand(sharded_plan(), None, params=tree(w=(6,)), grads=tree(w=(6,)))
    assert verify(schedule) == ()
    cut_values = [value for phase in schedule.phases for value in phase.values if value.whole]
    assert cut_values
    for at, phase in enumerate(schedule.phases):
        for index, value in enumerate(phase.values):
            if not value.whole:
                continue
            other = msgspec.structs.replace(value, whole=(Leaf("w", (5,), DType.F32),))
            values = (*phase.values[:index], other, *phase.values[index + 1 :])
            phases = (
                *schedule.phases[:at],
                msgspec.structs.replace(phase, values=values),
                *schedule.phases[at + 1 :],
            )
            problems = verify(msgspec.structs.replace(schedule, phases=phases))
            assert {problem.code for problem in problems} & {"CP0731", "CP0766"}, value.id


def test_chunks_go_to_the_owner_with_the_fewest_bytes() -> None:
    assert assign([5, 1, 1, 1, 0, 9], 3) == (0, 1, 2, 1, 2, 2)


def test_records_that_are_gathered_are_proved_again(tmp_path: Path) -> None:
    """A tree that is made record by record is cut between records: gathered, it has all of them."""
    text = """plan gathered

axis data = 2
source files : f32[4]
fn embed(f32[4]) -> tree on device

each step {
    x = load files batch 8 split data visit at_most_once seed 0
    y = map embed(x)
    z = gather y over data
    output z
}
"""
    path = tmp_path / "gathered.plan"
    path.write_text(text)
    shapes = {"y": {"w": np.zeros(3, np.float32)}}
    schedule = commplan.load(path).compile(axes={"data": 2}, shapes=shapes).schedule
    assert load_schedule(encode(schedule), "x.json") == schedule
