"""Topology files, and axes on levels."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from support.byhand import reduce_plan, tree

from commplan.compiler import compile_plan
from commplan.diagnostics import CommplanError
from commplan.ir.plan import AxisKind
from commplan.ir.schedule import Axis, Collective
from commplan.topology import Level, Topology, assign_levels, load_topology, parse_topology

FILES = sorted((Path(__file__).parents[2] / "examples" / "topologies").glob("*.toml"))
GOOD = """
name = "small"
[host]
cores = 4
[[level]]
name = "gpu"
count = 4
latency = "3us"
bandwidth = "450GB/s"
[[level]]
name = "node"
count = 2
latency = "1.5ms"
bandwidth = "100 Mbit/s"
"""
SMALL = parse_topology(GOOD)


def axes(**sizes: int) -> tuple[Axis, ...]:
    return tuple(Axis(name, AxisKind.REPLICA, size) for name, size in sizes.items())


def levels(placed: tuple[Axis, ...]) -> dict[str, str | None]:
    return {axis.name: axis.level for axis in placed}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_examples_are_read(path: Path) -> None:
    topology = load_topology(path)
    assert topology.name == path.stem
    assert topology.levels
    assert topology.cores


def test_there_are_examples() -> None:
    assert len(FILES) >= 5
    assert load_topology(next(p for p in FILES if p.stem == "h100_65536")).places == 65536


def test_what_calls_and_rounds_cost() -> None:
    assert (SMALL.call, SMALL.round) == (None, None)
    assert parse_topology(GOOD + '[backend]\ncall = "8us"\nround = "1ms"\n') == replace(
        SMALL, call=8e-6, round=1e-3
    )


def test_the_devices_of_a_topology() -> None:
    assert SMALL.devices is None
    assert parse_topology(GOOD + '[backend]\ndevices = "h200"\n') == replace(SMALL, devices="h200")
    assert {load_topology(path).devices for path in FILES if "h100" in path.stem} == {"h100"}


def test_quantities_are_seconds_and_bytes() -> None:
    assert Topology("small", (Level("gpu", 4, 3e-6, 450e9), Level("node", 2, 1.5e-3, 12.5e6)), 4) == SMALL
    assert SMALL.places == 8
    assert SMALL.level("node").count == 2


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "small"', "name = small", "not valid TOML"),
        ('name = "small"', "", "the topology has no `name`"),
        ('name = "small"', "name = 3", "`name` of the topology must be of type str, not 3"),
        ('name = "small"', 'name = "small"\nlevels = 1', "did you mean `level`?"),
        ("cores = 4", "cores = 0", "the cores of [host] is 0"),
        ("cores = 4", "cpus = 4", "[host] has an unknown key `cpus`"),
        ("[host]\ncores = 4", "host = 4", "`host` is not a table"),
        ("count = 4", "count = 0", "the count of level `gpu` is 0"),
        ("count = 4", f"count = {10**20 - 1}", "the count of level `gpu` is 1e+20, and must be at most 16,7"),
        ("count = 4", "count = 16777216", "has 16777216 x 2 places"),
        ("cores = 4", f"cores = {10**20}", "the cores of [host] is 1e+20"),
        ('name = "node"', r'name = "\u001b[31m"', "`name` of level 2 is '\\x1b[31m'"),
        ("cores = 4", r'names = ["\u001b[31m"]', "in `names` of [host] is not a unique name"),
        ("count = 4", "count = true", "`count` of level `gpu` must be of type int, not True"),
        ("count = 4", "", "level `gpu` has no `count`"),
        ('latency = "3us"', "latency = 3", "`latency` of level `gpu` must be of type str, not 3"),
        ('latency = "3us"', 'latency = "3 hours"', "expected a number with a unit: ns, us, ms, s"),
        ('"450GB/s"', '"-1GB/s"', "the bandwidth of level `gpu` is '-1GB/s'"),
        ('"450GB/s"', '"0GB/s"', "must be above zero"),
        ('name = "node"', 'name = "gpu"', "two levels are called `gpu`"),
        ('name = "node"', 'name = "node"\nwidth = 1', "level 2 has an unknown key `width`"),
        ('name = "small"', 'name = "small"\nbackend = 1', "`backend` is not a table"),
        ("[host]", '[backend]\nround = 7\n[host]', "`round` of [backend] must be of type str, not 7"),
        ("[host]", '[backend]\nrounds = "7us"\n[host]', "did you mean `round`?"),
        ("[host]", '[backend]\ndevices = 3\n[host]', "`devices` of [backend] must be of type str, not 3"),
        ("[host]", '[backend]\ndevices = "b200"\n[host]', "the devices of [backend] are 'b200'"),
        ("cores = 4", f"cores = {'9' * 4301}", "a number or a date that is out of range"),
        ("cores = 4", f"cores = 0x{'f' * 4301}", "an integer of more than 300 digits"),
    ],
)  # fmt: skip
def test_malformed_files(old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(CommplanError) as caught:
        parse_topology(GOOD.replace(old, new, 1), "small.toml")
    assert caught.value.diagnostics[0].code == "CP0712"
    assert caught.value.diagnostics[0].file == "small.toml"
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "text", ['name = "x"', 'name = "x"\nlevel = []', 'name = "x"\nlevel = [3]', "level = 3"]
)
def test_no_levels(text: str) -> None:
    with pytest.raises(CommplanError) as caught:
        parse_topology(text)
    assert caught.value.diagnostics[0].code == "CP0712"


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(CommplanError) as caught:
            load_topology(path)
        assert caught.value.diagnostics[0].code == "CP0712"
        assert "Errno" not in str(caught.value)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CommplanError):
        load_topology(tmp_path / "binary.toml")


def test_axes_go_to_the_level_of_their_name() -> None:
    assert levels(assign_levels(axes(gpu=4, node=2), SMALL, {})) == {"gpu": "gpu", "node": "node"}


def test_the_last_axis_is_innermost() -> None:
    assert levels(assign_levels(axes(data=2, model=4), SMALL, {})) == {"data": "node", "model": "gpu"}
    assert levels(assign_levels(axes(data=4, model=2), SMALL, {})) == {"data": "node", "model": "gpu"}
    assert levels(assign_levels(axes(a=2, b=2, c=2), SMALL, {})) == {"a": "node", "b": "gpu", "c": "gpu"}


def test_an_axis_over_several_levels_waits_for_the_outermost() -> None:
    assert levels(assign_levels(axes(data=8), SMALL, {})) == {"data": "node"}
    assert levels(assign_levels(axes(data=5), SMALL, {})) == {"data": "node"}
    assert levels(assign_levels(axes(data=3), SMALL, {})) == {"data": "gpu"}


def test_an_axis_of_one_stays_inside() -> None:
    assert levels(assign_levels(axes(data=1, model=8), SMALL, {})) == {"data": "gpu", "model": "node"}


def test_a_mapping_says_where() -> None:
    assert levels(assign_levels(axes(data=2, model=2), SMALL, {"model": "node"})) == {
        "data": "gpu",
        "model": "node",
    }


def test_servers_lie_nowhere() -> None:
    hub = Axis("hub", AxisKind.SERVER, 100)
    assert levels(assign_levels((*axes(data=4), hub), SMALL, {})) == {"data": "gpu", "hub": None}


@pytest.mark.parametrize(
    ("sizes", "mapping", "code", "message"),
    [
        ({"data": 9}, {}, "CP0713", "9 ranks do not fit on topology `small`, which has 8 places"),
        ({"gpu": 8}, {}, "CP0713", "gpu=8 does not fit on level `gpu`, which has 4 places"),
        ({"a": 4, "gpu": 2}, {"a": "gpu"}, "CP0713", "a=4 x gpu=2 does not fit on level `gpu`"),
        ({"data": 2}, {"dta": "gpu"}, "CP0714", "did you mean `data`?"),
        ({"data": 2}, {"data": "gpus"}, "CP0714", "did you mean `gpu`?"),
        ({"data": 2}, {"data": "rack"}, "CP0714", "its levels are: gpu, node"),
    ],
)
def test_axes_that_do_not_fit(
    sizes: dict[str, int], mapping: dict[str, str], code: str, message: str
) -> None:
    with pytest.raises(CommplanError) as caught:
        assign_levels(axes(**sizes), SMALL, mapping)
    assert caught.value.diagnostics[0].code == code
    assert message in str(caught.value)


@pytest.mark.parametrize("sizes", [{"data": 9}, {"gpu": 8}, {"a": 3, "b": 5}])
def test_several_ranks_in_one_place(sizes: dict[str, int]) -> None:
    placed = assign_levels(axes(**sizes), SMALL, {}, oversubscribe=True)
    assert all(axis.level in ("gpu", "node") for axis in placed)


def test_a_schedule_knows_its_levels() -> None:
    plan = reduce_plan("sum", node=2, gpu=4)
    schedule = compile_plan(plan, {"grads": tree(w=(3,))}, topology=SMALL)
    assert levels(schedule.axes) == {"node": "node", "gpu": "gpu"}
    collectives = [op for op in schedule.phase("step").ops if isinstance(op, Collective)]
    assert [op.lane for op in collectives] == ["network:node+gpu"]
    path = next(p for p in FILES if p.stem == "h100_64")
    assert compile_plan(plan, {"grads": tree(w=(3,))}, topology=path).axes == schedule.axes


def test_a_mapping_needs_a_topology() -> None:
    with pytest.raises(CommplanError) as caught:
        compile_plan(reduce_plan(), {"grads": tree(w=(3,))}, mapping={"data": "gpu"})
    assert caught.value.diagnostics[0].code == "CP0714"
