"""Twice the plan is twice the work: calls are counted, of Python and of C, from the text to the schedule."""

from __future__ import annotations

import cProfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import commplan
from bench.compile_time import HEAD, elastic, leaves, machine, ranks, reduces
from commplan.collectives import registry
from commplan.collectives.program import Ints
from commplan.cost.collective import stages
from commplan.cost.network.network import Layout
from commplan.explain.report import explain_plan
from commplan.ir.serialization.text import parse_schedule, print_schedule
from commplan.passes.search import trials

ROOT = Path(__file__).resolve().parents[2]
TOPOLOGY = ROOT / "examples" / "topologies" / "h100_64.toml"
RACKS = ROOT / "examples" / "topologies" / "two_rack.toml"
SMALL, LARGE, GROWTH = 40, 80, 2.1
Case = Callable[[int], tuple[str, dict[str, Any]]]


def tree(count: int) -> dict[str, Any]:
    return leaves(count)[1]["grads"]


def example(name: str, *trees: str) -> Case:
    text = (ROOT / "examples" / "plans" / f"{name}.plan").read_text()
    return lambda count: (text, {tree_name: tree(count) for tree_name in trees})


def repeated(declared: str, start: str, stages: str, head: str = HEAD) -> Case:
    """Expand the text in braces once for each number."""

    def case(count: int) -> tuple[str, dict[str, Any]]:
        def times(text: str) -> str:
            return "".join(f"{text}\n".replace("#", str(number)) for number in range(count))

        begin = f"at start {{\n{times(start)}}}\n" if start else ""
        return f"{head}{times(declared)}{begin}each step {{\n{times(stages)}}}\n", {}

    return case


UPDATE = "fn update(f32[64], f32[64]) -> f32[64] on device elementwise\n"
PLANS: dict[str, Case] = {
    "leaves": leaves,
    "reduces": reduces,
    "hints": example("data_parallel", "params", "grads"),
    "sharded": example("sharded_update", "params", "grads", "adam"),
    "levels": example("two_level", "grads"),
    "elastic": example("easgd_sync", "params", "center"),
    "rates": elastic,
    "dedicated": example("parameter_server_dedicated", "params", "grads", "weights"),
    "functions": repeated(
        "input g# : f32[64] partial data\nfn f#(f32[64]) -> f32[64] on device",
        "",
        "s# = reduce g# over data by sum\nr# = map f#(s#)\noutput r#",
    ),
    "exchanges": repeated(
        "input g# : f32[64] partial data\ninput p# : f32[64] per data\nstate c# : f32[64]",
        "c# = broadcast p# over data from 0",
        "c# = exchange g# into c# with update over data by mean via parameter_server\noutput c#",
        f"{HEAD}{UPDATE}",
    ),
    "servers": repeated(
        "input g# : f32[64] partial data\ninput p# : f32[64] per data\nstate c# : f32[64] on hub",
        "c# = broadcast p# over data from 0",
        "c# = exchange g# into c# with update over data by mean\noutput c#",
        f"{HEAD}server hub = 2\n{UPDATE}",
    ),
}


def calls(work: Callable[[], object]) -> int:
    profile = cProfile.Profile()
    profile.runcall(work)
    return sum(entry.callcount for entry in profile.getstats())  # pyright: ignore[reportUnknownMemberType]


def compiled(case: Case, count: int, **options: Any) -> tuple[commplan.Plan, commplan.Program]:
    text, shapes = case(count)
    plan = commplan.loads(text)
    return plan, plan.compile(shapes=shapes, **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {"backend": backend}) for name in PLANS for backend in ("jax", "mpi")),
        *((name, {"topology": TOPOLOGY}) for name in ("leaves", "reduces", "levels")),
        *((name, {"topology": RACKS, "backend": "mpi"}) for name in ("leaves", "reduces")),
    ],
    ids=lambda value: (
        value if isinstance(value, str) else "-".join(getattr(v, "stem", v) for v in value.values())
    ),
)
def test_compiling_grows_with_the_plan(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "SCHEDULES", 4)  # of a larger plan more sizes of buckets are tried
    compiled(PLANS[name], 20, **options)  # cached results are not counted
    once, twice = (calls(lambda n=n: compiled(PLANS[name], n, **options)) for n in (SMALL, LARGE))
    assert twice < GROWTH * once, (once, twice)


@pytest.mark.parametrize("name", PLANS)
def test_reading_and_explaining_grow_with_the_plan(name: str, tmp_path: Path) -> None:
    def work(count: int) -> Callable[[], None]:
        plan, program = compiled(PLANS[name], count)
        path = program.save(tmp_path / f"{count}.json")

        def read() -> None:
            assert commplan.Program.load(path) == program
            assert parse_schedule(print_schedule(program.schedule)) == program.schedule
            explain_plan(plan.graph, program.schedule).text()

        return read

    work(20)()
    once, twice = calls(work(SMALL)), calls(work(LARGE))
    assert twice < GROWTH * once, (once, twice)


def test_candidates_over_many_ranks_share_their_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hierarchies of other algorithms have the same groups, which are listed once however many are priced."""
    count, sizes = 2**15, list[int]()

    def counted(groups: Ints) -> Layout:
        sizes.append(groups.size)
        return Layout(groups)

    monkeypatch.setattr(stages, "Layout", counted)
    (tmp_path / "machine.toml").write_text(machine(count))
    compiled(ranks, count, topology=tmp_path / "machine.toml", backend="mpi")
    assert 0 < sum(sizes) <= 4 * count  # one for each level


def test_the_formula_of_an_algorithm_is_not_a_loop_over_ranks() -> None:
    for name in registry.algorithms("all_reduce"):
        assert calls(lambda name=name: registry.formula(name, "all_reduce", 2**20 - 1)) < 1000, name
