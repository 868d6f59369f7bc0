"""Predictions: native, flat, hierarchical, formulas for large groups, and measured curves."""

from __future__ import annotations

import msgspec
import pytest

from commplan.collectives import registry
from commplan.cost import Calibration, CollectiveQuery, Network, Predictor, collective_time, one_group
from commplan.cost.calibration import Curve, MeasuredLevel
from commplan.cost.collective.cost import UNMEASURED
from commplan.cost.network.network import shape_of
from commplan.ir.ops.base import Work
from commplan.ir.plan import Algorithm, Arg, AxisKind
from commplan.ir.schedule import Axis, CollectiveKind, Form
from commplan.topology import Level, Topology, assign_levels

TWO_RACKS = Topology("two_rack", (Level("host", 4, 60e-6, 25e6), Level("rack", 2, 120e-6, 25e6)))
CLUSTER = Topology(
    "cluster",
    (Level("gpu", 8, 3e-6, 450e9), Level("node", 32, 6e-6, 400e9), Level("pod", 256, 12e-6, 6400e9)),
)
NETWORK = Network.for_topology(TWO_RACKS)
MIB = 2**20


def hierarchical(**levels: str) -> Algorithm:
    return Algorithm("hierarchical", tuple(Arg(name, level) for level, name in levels.items()))


def mesh(topology: Topology, **sizes: int) -> tuple[Axis, ...]:
    return assign_levels(
        tuple(Axis(name, AxisKind.REPLICA, size) for name, size in sizes.items()), topology, {}
    )


def seconds(
    predictor: Predictor,
    algorithm: Algorithm,
    nbytes: int,
    form: Form | None = None,
    chunk: int | None = None,
) -> float:
    prediction = predictor.predict("all_reduce", algorithm, ("data",), nbytes, form=form, chunk=chunk)
    assert prediction is not None
    return prediction.seconds


def test_a_pipelined_hierarchy_reaches_the_bound_of_two_racks_and_a_sequential_one_does_not() -> None:
    axes = mesh(TWO_RACKS, data=8)
    both = hierarchical(host="ring", rack="ring")
    under_mpi, under_jax = (Predictor(TWO_RACKS, axes, backend=b) for b in ("mpi", "jax"))
    cut = seconds(under_mpi, both, 64 * MIB, chunk=MIB // 2)
    assert cut == pytest.approx(1.75 * 64 * MIB / 25e6, rel=0.01)
    assert seconds(under_mpi, both, 64 * MIB) == pytest.approx(2.5 * 64 * MIB / 25e6, rel=0.01)
    sequential = 2.5 * 64 * MIB / 25e6
    assert seconds(under_jax, both, 64 * MIB) == pytest.approx(UNMEASURED * sequential, rel=0.01)


def test_interleaved_ranks_hurt_what_follows_the_rank_order() -> None:
    axes, crossed = mesh(TWO_RACKS, data=8), (0, 4, 1, 5, 2, 6, 3, 7)
    predictor = Predictor(TWO_RACKS, axes, backend="mpi", places=crossed)
    ours = seconds(predictor, Algorithm("ring"), 16 * MIB)
    assert seconds(predictor, Algorithm("native"), 16 * MIB) > 2 * ours
    assert ours == pytest.approx(
        seconds(Predictor(TWO_RACKS, axes, backend="mpi"), Algorithm("ring"), 16 * MIB)
    )


@pytest.mark.parametrize("kind", ["broadcast", "reduce", "scatter", "gather"])
@pytest.mark.parametrize("names", [("ring", "ring"), ("binomial_tree", "chain"), ("double_tree", "ring")])
def test_a_hierarchy_takes_as_long_from_every_root(kind: CollectiveKind, names: tuple[str, str]) -> None:
    if not all(registry.supports(name, kind) for name in names):
        pytest.skip("no such program")
    predictor = Predictor(TWO_RACKS, mesh(TWO_RACKS, rack=2, worker=4), backend="mpi")
    way = hierarchical(worker=names[0], rack=names[1])
    for chunk in (None, 64 << 10):
        predictions = [
            predictor.predict(kind, way, ("rack", "worker"), MIB, root=root, chunk=chunk, form="call")
            for root in range(8)
        ]
        times = [prediction.seconds for prediction in predictions if prediction is not None]
        assert times == pytest.approx([times[0]] * 8, rel=0.2)


def test_levels_are_named_by_axes_or_by_the_topology() -> None:
    named = Predictor(TWO_RACKS, mesh(TWO_RACKS, rack=2, host=4), backend="mpi")
    algorithm = hierarchical(host="ring", rack="halving_doubling")
    by_axes = named.predict("all_reduce", algorithm, ("rack", "host"), MIB)
    by_level = Predictor(TWO_RACKS, mesh(TWO_RACKS, data=8), backend="mpi").predict(
        "all_reduce", algorithm, ("data",), MIB
    )
    assert by_axes == by_level
    assert by_axes is not None


@pytest.mark.parametrize(
    "algorithm",
    [
        Algorithm("bruck"),
        hierarchical(rack="ring", host="ring"),
        hierarchical(host="ring", pod="ring"),
        hierarchical(host="native", rack="bruck"),
    ],
    ids=str,
)
def test_what_there_is_no_program_for_is_not_predicted(algorithm: Algorithm) -> None:
    assert (
        collective_time(algorithm, CollectiveQuery("scatter", one_group([0, 1, 2, 4, 5]), MIB, NETWORK))
        is None
    )


def test_predictors_of_one_machine_share_their_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    axes, work = mesh(TWO_RACKS, data=8), Work("all_reduce", "", 12_345, ("data",), Algorithm("ring"))
    first = Predictor(TWO_RACKS, axes, backend="mpi").query(work)
    other = Predictor(TWO_RACKS, axes, backend="jax").query(work)
    assert first is not None and first != other
    monkeypatch.delattr("commplan.cost.schedule.predictor.collective_time")
    assert Predictor(TWO_RACKS, axes, backend="mpi").query(work) is first


def test_one_rank_takes_no_time() -> None:
    prediction = collective_time(
        Algorithm("ring"), CollectiveQuery("all_reduce", one_group([3]), MIB, NETWORK)
    )
    assert prediction is not None
    assert (prediction.seconds, prediction.bound) == (0.0, 0.0)


def test_bytes_and_the_critical_level_are_told() -> None:
    query = CollectiveQuery("all_reduce", one_group([0, 4, 1, 5, 2, 6, 3, 7]), 8e6, NETWORK)
    prediction = collective_time(Algorithm("ring"), query)
    assert prediction is not None
    assert dict(prediction.nbytes) == pytest.approx({"host": 14e6, "rack": 56e6})
    assert prediction.level == "rack"
    assert prediction.seconds > prediction.bound > 0


def test_an_all_gather_is_asked_for_by_operand() -> None:
    predictor = Predictor(TWO_RACKS, mesh(TWO_RACKS, data=8), backend="mpi")
    prediction = predictor.predict("all_gather", Algorithm("ring"), ("data",), MIB)
    assert prediction is not None
    assert dict(prediction.nbytes)["host"] == pytest.approx(7 * MIB)


def test_all_to_all_sends_every_row_to_its_rank() -> None:
    predictor = Predictor(TWO_RACKS, mesh(TWO_RACKS, data=8))
    prediction = predictor.predict("all_to_all", Algorithm("native"), ("data",), 8 * MIB)
    assert prediction is not None
    assert dict(prediction.nbytes) == pytest.approx({"host": 7 * MIB, "rack": 16 * MIB})


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce"])
def test_65536_ranks_are_predicted_without_writing_their_programs_out(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    program = registry.program

    def counted(name: str, kind: str, n: int, **more: int) -> object:
        written.append(n)
        return program(name, kind, n, **more)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(registry, "program", counted)
    predictor = Predictor(CLUSTER, mesh(CLUSTER, pod=256, node=32, gpu=8))
    over = ("pod", "node", "gpu")
    algorithms = [Algorithm("native"), Algorithm("ring"), hierarchical(gpu="ring", node="ring", pod="ring")]
    for algorithm in algorithms:
        for nbytes in (4096, 100_000_000):
            prediction = predictor.predict(kind, algorithm, over, nbytes)  # pyright: ignore[reportArgumentType]
            assert prediction is not None
            assert prediction.seconds >= prediction.bound > 0
    assert max(written, default=0) <= 256


# Curves


def calibration(**more: object) -> Calibration:
    shape = shape_of(one_group([0, 1, 2, 3]), NETWORK)
    curves = (
        Curve("all_reduce", "ring", "call", shape, (1000.0, 100_000.0), (1e-3, 1e-1)),
        Curve("all_reduce", "native", "call", shape, (1000.0,), (5e-3,)),
    )
    level = (MeasuredLevel("host", 1e-3, 1e6),)
    result = Calibration("2026-11-21", "mpi", ("a", "b", "c", "d"), 1e-5, 1e-9, 1e-4, 1e-5, level, curves)
    return msgspec.structs.replace(result, **more)


def test_what_was_measured_is_answered_from_its_curve() -> None:
    measured = calibration()
    predictor = Predictor(TWO_RACKS, mesh(TWO_RACKS, data=4), calibration=measured, backend="mpi")
    assert predictor.calibration is not None
    prediction = predictor.predict("all_reduce", Algorithm("native"), ("data",), 900)
    assert prediction is not None
    assert (prediction.seconds, prediction.source) == (5e-3, "measured 2026-11-21")


SCALED = "model, scaled to the messages measured 2026-11-21"


def test_of_messages_of_another_size_only_the_comparison_is_modeled() -> None:
    curves = calibration()
    measured, modeled = (
        Predictor(TWO_RACKS, mesh(TWO_RACKS, data=4), calibration=each, backend="mpi")
        for each in (curves, msgspec.structs.replace(curves, curve_list=()))
    )

    def seconds(predictor: Predictor, chunk: int | None) -> float:
        prediction = predictor.predict("all_reduce", Algorithm("ring"), ("data",), 10_000_000, chunk=chunk)
        assert prediction is not None
        sources = {"model"} if predictor is modeled else {"measured 2026-11-21", SCALED}
        assert prediction.source in sources
        return prediction.seconds

    small = 8 << 10
    assert seconds(modeled, small) != seconds(modeled, None)
    of_model = seconds(modeled, small) / seconds(modeled, None)
    assert seconds(measured, small) / seconds(measured, None) == pytest.approx(of_model, rel=1e-4)


def test_between_sizes_the_logarithms_are_interpolated() -> None:
    curve = calibration().curve_list[0]
    assert curve.at(1) == 1e-3
    assert curve.at(10_000) == pytest.approx(1e-2)
    assert curve.at(100_000) == 1e-1
    assert curve.at(1_000_000) == pytest.approx(1.0)


def test_what_was_not_measured_is_modeled_with_measured_levels() -> None:
    measured = calibration()
    for axes, backend, algorithm in (
        (mesh(TWO_RACKS, data=3), "mpi", "ring"),
        (mesh(TWO_RACKS, data=4), "jax", "ring"),
        (mesh(TWO_RACKS, data=4), "mpi", "chain"),
    ):
        predictor = Predictor(TWO_RACKS, axes, calibration=measured, backend=backend)
        prediction = predictor.predict("all_reduce", Algorithm(algorithm), ("data",), 4_000_000)
        assert prediction is not None
        assert prediction.source == "model"
        assert prediction.seconds > 4  # a megabyte a second


def test_groups_that_share_links_are_not_answered_from_one_group() -> None:
    rack = shape_of(one_group([0, 4]), NETWORK)
    curve = Curve("all_reduce", "ring", "call", rack, (1000.0,), (1e-3,))
    measured = calibration(curve_list=(curve,))
    alone = Predictor(TWO_RACKS, mesh(TWO_RACKS, rack=2), calibration=measured, backend="mpi")
    shared = Predictor(TWO_RACKS, mesh(TWO_RACKS, rack=2, host=4), calibration=measured, backend="mpi")
    predictions = [p.predict("all_reduce", Algorithm("ring"), ("rack",), 1000) for p in (alone, shared)]
    assert [prediction.source for prediction in predictions if prediction] == ["measured 2026-11-21", "model"]
