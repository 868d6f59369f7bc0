"""States on servers: ownership is proved, bounds are stated, and schedules edited by hand are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.byhand import tree

from commplan import dsl
from commplan.cli import main
from commplan.compiler import compile_plan
from commplan.ir.plan import Hints
from commplan.ir.schedule import Elastic, Exchange, Get, Put, Schedule, results
from commplan.protocol.build_sites import sites
from commplan.protocol.units import StateUnit
from commplan.verify import verify
from commplan.verify.memory import memory
from commplan.verify.ownership import owned_states, ownership_error, server_memory

PLANS = Path(__file__).parents[2] / "examples" / "plans"
GIVEN = tree(w=(300, 7), b=(11,))
EXCHANGE = "parameter_server_dedicated"
LOOK = "phase look {\n    output weights\n}\n"


def alone(schedule: Schedule) -> Schedule:
    """`schedule` without its plan, so that only its internal consistency is proved."""
    return msgspec.structs.replace(schedule, origin=None)


def compiled(name: str, more: str = "", **changes: str) -> Schedule:
    text = (PLANS / f"{name}.plan").read_text().replace("32 KiB", "1 KiB") + more
    for old, new in changes.items():
        text = text.replace(old, new)
    plan, diagnostics = dsl.load(text, name)
    assert plan is not None, diagnostics
    shapes = {v.name: GIVEN for v in plan.values if str(v.type) == "tree" and v.name in ("params", "grads")}
    return compile_plan(plan, shapes, backend="mpi")


def edited(schedule: Schedule, kind: type[Any], **changes: Any) -> list[str]:
    """The error codes after changing the first op of `kind`."""
    done = False
    phases: list[Any] = []
    for phase in schedule.phases:
        ops: list[Any] = []
        for op in phase.ops:
            is_edited = isinstance(op, kind) and not done
            ops.append(msgspec.structs.replace(op, **changes) if is_edited else op)
            done = done or is_edited
        phases.append(msgspec.structs.replace(phase, ops=tuple(ops)))
    assert done
    return [problem.code for problem in verify(msgspec.structs.replace(schedule, phases=tuple(phases)))]


# Sound ones


@pytest.mark.parametrize("name", [EXCHANGE, "easgd_async", "easgd_hogwild", "easgd_round_robin"])
def test_examples_are_proved_and_their_units_cover_everything(name: str) -> None:
    schedule = compiled(name)
    assert verify(schedule) == ()
    for _, owned in owned_states(schedule):
        assert sum(owned.nbytes) == (300 * 7 + 11) * 4
        assert 1 <= owned.balance < 1.2
    assert [ownership_error(layout) for site in sites(schedule).all for layout in site.layouts] == [""] * len(
        [layout for site in sites(schedule).all for layout in site.layouts]
    )


def test_what_a_server_keeps_is_bounded_by_staleness_and_workers() -> None:
    fresh = server_memory(compiled(EXCHANGE))
    stale = server_memory(compiled(EXCHANGE, **{"staleness = 0": "staleness = 3"}))
    assert fresh is not None
    assert stale is not None
    stored_nbytes = max(owned_states(compiled(EXCHANGE))[0][1].nbytes)
    assert fresh.states == stored_nbytes
    assert fresh.arriving == stored_nbytes + 8 * stored_nbytes  # a put, and a term of each of eight workers
    assert stale.arriving == stored_nbytes + 4 * 8 * stored_nbytes
    assert fresh.worker == 2 * (300 * 7 + 11) * 4
    assert server_memory(compiled("easgd_sync")) is None


def test_states_on_servers_are_no_memory_of_workers() -> None:
    nbytes_of = {peak.phase: peak.nbytes for peak in memory(compiled("easgd_async"))}
    weights = (300 * 7 + 11) * 4
    assert nbytes_of["every_4"] == 3 * weights  # parameters, the pull, and the center that the op names


# Layouts


def layout_of(name: str = EXCHANGE) -> Any:
    return sites(compiled(name)).all[0].layout


def units(change: Any) -> Any:
    layout = layout_of()
    return msgspec.structs.replace(layout, units=tuple(change(list(layout.units))))


def moved(state_units: list[StateUnit], index: int, **changes: int) -> list[StateUnit]:
    state_units[index] = msgspec.structs.replace(state_units[index], **changes)
    return state_units


WRONG: list[tuple[Callable[[list[StateUnit]], list[StateUnit]], str]] = [
    (lambda u: u[:-1], "has no owner"),
    (lambda u: u[1:], "has no owner"),
    (lambda u: [*u, u[0]], "is owned twice"),
    (lambda u: moved(u, 0, size=u[0].size + 1), "is owned twice"),
    (lambda u: moved(u, 0, size=u[0].size - 1), "has no owner"),
    (lambda u: moved(u, 0, server=2), "belongs to server 2 of 2"),
    (lambda u: moved(u, 0, server=-1), "belongs to server -1 of 2"),
    (lambda u: moved(u, 1, number=0), "have one number"),
]


@pytest.mark.parametrize(("change", "wrong"), WRONG)
def test_a_state_that_is_not_divided_rightly_is_found_out(change: Any, wrong: str) -> None:
    assert wrong in ownership_error(units(change))


def test_owners_out_of_balance_are_found_out() -> None:
    layout = layout_of()
    units_of_first = tuple(msgspec.structs.replace(unit, server=0) for unit in layout.units)
    assert "the mean is" in ownership_error(msgspec.structs.replace(layout, units=units_of_first))


# Schedules that were edited


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"fn": "adam"}, "CP0730"),
        ({"states": ()}, "CP0731"),
        ({"states": ("grads.0",)}, "CP0734"),
        ({"gradient": "weights.0"}, "CP0734"),
        ({"gradient": "nothing.0"}, "CP0730"),
        ({"axes": ()}, "CP0734"),
        ({"axes": ("hub",)}, "CP0734"),
        ({"axes": ("nowhere",)}, "CP0734"),
        ({"weight": "grads.0"}, "CP0731"),
        ({"hints": Hints(staleness=-1)}, "CP0735"),
        ({"hints": Hints(chunk=0)}, "CP0735"),
    ],
)
def test_an_exchange_with_nonsense_in_it_is_refused(changes: dict[str, Any], code: str) -> None:
    assert code in edited(compiled(EXCHANGE), Exchange, **changes)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"mode": "sync"}, "CP0735"),
        ({"mode": "sync", "result": None}, "CP0730"),
        ({"center": "params.0"}, "CP0734"),
        ({"eta": 0.0}, "CP0735"),
        ({"eta": -0.05}, "CP0735"),
        ({"eta": 20.0}, "CP0735"),
        ({"eta": float("nan")}, "CP0735"),
        ({"rho": float("inf")}, "CP0735"),
        ({"rho": "params.0"}, "CP0731"),
        ({"axes": ("master",)}, "CP0734"),
        ({"hints": Hints(staleness=-2)}, "CP0735"),
        ({"result": None}, "CP0730"),
    ],
)
def test_elastic_averaging_with_nonsense_in_it_is_refused(changes: dict[str, Any], code: str) -> None:
    assert code in edited(compiled("easgd_async"), Elastic, **changes)


def test_the_bound_of_sync_counts_its_workers() -> None:
    schedule = alone(compiled("easgd_sync"))
    assert edited(schedule, Elastic, eta=1.24) == []
    assert "CP0735" in edited(schedule, Elastic, eta=1.25)  # eta rho p = 1


def test_what_is_put_and_got_lies_on_a_server() -> None:
    schedule = compiled(EXCHANGE, LOOK)
    assert verify(schedule) == ()
    assert "CP0730" in edited(schedule, Get, operand="params.0")
    assert "CP0730" in edited(schedule, Put, result="weights.1")
    assert edited(schedule, Put, result="elsewhere.0")


@pytest.mark.parametrize("server", [None, "worker", "nobody"])
def test_a_state_that_lies_elsewhere_is_refused(server: str | None) -> None:
    schedule = compiled(EXCHANGE)
    entry = tuple(
        msgspec.structs.replace(v, placement=msgspec.structs.replace(v.placement, server=server))
        if v.id in schedule.states
        else v
        for v in schedule.entry
    )
    assert [problem.code for problem in verify(msgspec.structs.replace(schedule, entry=entry))]


@pytest.mark.parametrize("count", [0, -1])
def test_no_servers_are_refused(count: int) -> None:
    schedule = alone(compiled(EXCHANGE))
    axes = tuple(msgspec.structs.replace(a, size=count) if a.name == "hub" else a for a in schedule.axes)
    assert [problem.code for problem in verify(msgspec.structs.replace(schedule, axes=axes))] == ["CP0734"]


def test_more_servers_than_units_are_proved() -> None:
    schedule = alone(compiled(EXCHANGE))
    axes = tuple(msgspec.structs.replace(a, size=13) if a.name == "hub" else a for a in schedule.axes)
    other = msgspec.structs.replace(schedule, axes=axes)
    assert verify(other) == ()
    assert owned_states(other)[0][1].nbytes.count(0) > 0


# The command


@pytest.fixture
def shapes(tmp_path: Path) -> str:
    path = tmp_path / "shapes.json"
    path.write_text('{"params": {"w": {"shape": [2111], "dtype": "f32"}}}')
    return str(path)


def test_the_command_says_what_was_proved_of_servers(capsys: pytest.CaptureFixture[str], shapes: str) -> None:
    plan = str(PLANS / "easgd_round_robin.plan")
    assert main(["verify", plan, "--shapes", shapes, "--backend", "mpi"]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0].endswith(", 4 ranks (worker = 4) and 1 server (master = 1): proved")
    assert "`center`: 3 units on 1 server `master`, every element owned once, 8.25 KiB\n" in text
    assert main(["verify", plan, "--shapes", shapes, "--backend", "mpi", "--format", "json"]) == 0
    servers = json.loads(capsys.readouterr().out)["servers"]
    assert servers["states"][0] == {
        "state": "center", "server": "master", "units": 3, "nbytes": [8444], "balance": 1.0,
    }  # fmt: skip
    assert servers["kept"]["arriving"] == 5 * 8444


def test_every_result_of_an_op_is_looked_at() -> None:
    """Exchanges name their states once more as results: another one is refused."""
    schedule = compiled(EXCHANGE)
    op = next(op for phase in schedule.phases for op in phase.ops if isinstance(op, Exchange))
    assert results(op) == ("weights.2",)
    assert edited(schedule, Exchange, results=("weights.9",))
    assert edited(schedule, Exchange, results=())


def test_beside_weights_there_may_be_nothing_or_a_scalar() -> None:
    """The state of an optimizer that remembers nothing, or counts its steps."""
    text = (
        "plan plain\naxis worker = 2\nserver hub = 2\n"
        "input params : tree per worker\ninput rest : tree per worker\ninput grads : tree partial worker\n"
        "state w : tree on hub\nstate m : tree on hub\n"
        "fn update(tree, tree, tree) -> tree, tree on device elementwise\n"
        "at start {\n    w = broadcast params over worker from 0\n"
        "    m = broadcast rest over worker from 0\n}\n"
        "each step {\n    w, m = exchange grads into w, m with update over worker by sum\n    output w\n}\n"
    )
    plan, diagnostics = dsl.load(text, "plain")
    assert plan is not None, diagnostics
    for extra in (tree(), tree(count=())):
        schedule = compile_plan(plan, {"params": GIVEN, "grads": GIVEN, "rest": extra}, backend="mpi")
        assert not verify(schedule)
        assert all(ownership_error(layout) == "" for site in sites(schedule).all for layout in site.layouts)
