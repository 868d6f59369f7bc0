"""The network model: links, fair shares, steps against flows, bounds; small cases by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commplan.collectives import registry
from commplan.collectives.program import KINDS, Kind
from commplan.cost.collective import step_model
from commplan.cost.collective.bounds import busiest_bytes, lower_bound
from commplan.cost.network import message_simulation
from commplan.cost.network.link_traffic import Pattern, lay_out
from commplan.cost.network.message_simulation import max_min
from commplan.cost.network.network import Layout, Network, layout_over, one_group, places_of, shape_of
from commplan.cost.schedule.predictor import Predictor
from commplan.diagnostics import CommplanError
from commplan.ir.plan import AxisKind
from commplan.ir.schedule import Axis, Spread
from commplan.topology import MOST, Level, Topology, assign_levels

TWO_RACKS = Topology("two_rack", (Level("host", 4, 60e-6, 25e6), Level("rack", 2, 120e-6, 25e6)))
NETWORK = Network.for_topology(TWO_RACKS)
IN_ORDER, INTERLEAVED = [0, 1, 2, 3, 4, 5, 6, 7], [0, 4, 1, 5, 2, 6, 3, 7]
LAYOUTS = {
    "one rack": [0, 1, 2, 3],
    "uneven racks": [0, 1, 2, 4, 5],
    "in order": IN_ORDER,
    "interleaved": INTERLEAVED,
    "pair": [0, 4],
}
CASES = [(kind, name) for kind in KINDS for name in registry.algorithms(kind)]


def pattern(name: str, kind: Kind, places: list[int], network: Network = NETWORK) -> Pattern:
    return lay_out(registry.program(name, kind, len(places)), one_group(places), network)


def exact(overhead: float = 0.0, gamma: float = 0.0) -> Network:
    return Network(TWO_RACKS, TWO_RACKS.levels, overhead, gamma, 0.0, 0.0)


# Links


def test_a_message_between_racks_uses_four_links() -> None:
    laid = pattern("chain", "broadcast", [0, 4])
    lanes = laid.rounds[0].lanes
    assert lanes.level.tolist() == [1]
    assert len(lanes.used) == 4
    assert laid.load.tolist() == [1.0, 1.0]


def test_an_interleaved_ring_puts_every_message_on_the_uplinks() -> None:
    ring = pattern("ring", "all_reduce", IN_ORDER).load / 8
    crossed = pattern("ring", "all_reduce", INTERLEAVED).load / 8
    assert ring.tolist() == [1.75, 1.75]
    assert crossed.tolist() == [1.75, 7.0]


def test_groups_that_run_at_once_share_the_links_outside() -> None:
    axes = assign_levels(
        (Axis("rack", AxisKind.REPLICA, 2), Axis("host", AxisKind.REPLICA, 4)), TWO_RACKS, {}
    )
    layout = layout_over(axes, ("rack",), places_of(NETWORK, axes))
    assert layout.groups.tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    laid = lay_out(registry.program("ring", "all_reduce", 2), layout, NETWORK)
    assert (laid.load / laid.chunks).tolist() == [1.0, 4.0]


def test_groups_that_lie_unevenly_are_counted_one_by_one() -> None:
    layout = Layout(np.array([[0, 4], [1, 2]]))
    laid = lay_out(registry.program("ring", "all_gather", 2), layout, NETWORK)
    assert laid.load.tolist() == [1.0, 1.0]


def test_ranks_that_share_a_place_use_no_link() -> None:
    laid = pattern("ring", "all_gather", [3, 3])
    assert laid.load.tolist() == [0.0, 0.0]
    assert step_model.seconds(laid, exact(gamma=1e-9), 100.0, 1, blocking=False) == pytest.approx(100e-9)


def test_an_axis_over_two_levels_fills_the_inner_one_first() -> None:
    axes = assign_levels((Axis("data", AxisKind.REPLICA, 8),), TWO_RACKS, {})
    assert axes[0].levels == (Spread("host", 4), Spread("rack", 2))
    assert places_of(NETWORK, axes).tolist() == IN_ORDER


def test_an_axis_that_lies_nowhere_is_refused() -> None:
    with pytest.raises(CommplanError, match=r"CP0750.*axis `data` does not fit topology `two_rack`"):
        places_of(NETWORK, (Axis("data", AxisKind.REPLICA, 8),))
    with pytest.raises(CommplanError, match="CP0750"):
        places_of(NETWORK, (Axis("data", AxisKind.REPLICA, 8, (Spread("gpu", 8),)),))


def test_more_ranks_than_a_table_holds_are_refused() -> None:
    ranks = 2 * MOST
    with pytest.raises(CommplanError, match=rf"CP0713.*times of {ranks:,} ranks"):
        Predictor(TWO_RACKS, (Axis("data", AxisKind.REPLICA, ranks, (Spread("host", ranks),)),))


def test_layouts_that_lie_alike_have_one_shape() -> None:
    assert shape_of(one_group([0, 1, 2, 3]), NETWORK) == "host 0 1 2 3"
    assert shape_of(one_group([4, 5, 6, 7]), NETWORK) == "host 0 1 2 3"
    assert shape_of(one_group([4, 0, 5]), NETWORK) == "rack/host 0/0 1/1 0/2"
    wide = Network.for_topology(Topology("wide", (Level("host", 128, 1e-6, 1e9),)))
    assert shape_of(one_group(list(range(128))), wide).startswith("host 128 ranks ")


# Fair shares


def test_flows_on_one_link_share_it_and_the_rest_is_taken() -> None:
    use = np.array([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
    rates = max_min(use, np.array([10.0, 4.0]), np.full(3, np.inf))
    assert rates.tolist() == pytest.approx([8.0, 2.0, 2.0])


def test_a_slow_flow_leaves_its_share_to_others() -> None:
    rates = max_min(np.ones((3, 1)), np.array([9.0]), np.array([1.0, np.inf, np.inf]))
    assert rates.tolist() == pytest.approx([1.0, 4.0, 4.0])


@settings(max_examples=60)
@given(st.integers(1, 7), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_fair_shares_fill_links_and_cannot_be_improved(flows_: int, links: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    use = (random.random((flows_, links)) < 0.5).astype(float)
    use[use.sum(axis=1) == 0, 0] = 1.0
    capacity = random.uniform(1, 10, links)
    rates = max_min(use, capacity, np.full(flows_, np.inf))
    carried = rates @ use
    assert (carried <= capacity * (1 + 1e-9)).all()
    for flow in range(flows_):
        # Every flow has a full link on which no other flow is faster: only slower ones could give way.
        full = (carried >= capacity * (1 - 1e-6)) & (use[flow] > 0)
        fastest = [(rates[use[:, link] > 0]).max() for link in np.flatnonzero(full)]
        assert fastest
        assert rates[flow] >= min(fastest) * (1 - 1e-6)


# Steps


def test_one_message_takes_alpha_and_beta() -> None:
    laid = pattern("chain", "broadcast", [0, 1])
    assert step_model.seconds(laid, exact(), 25e6, 1, blocking=False) == pytest.approx(1 + 60e-6)
    assert step_model.seconds(laid, exact(overhead=1e-3), 25e6, 1, blocking=False) == pytest.approx(1.00206)


def test_a_ring_takes_its_formula() -> None:
    laid = pattern("ring", "all_reduce", [0, 1, 2, 3])
    took = step_model.seconds(laid, exact(gamma=1e-9), 25e6, 1, blocking=False)
    assert took == pytest.approx(6 * (1 + 60e-6) + 3 * 25e6 * 1e-9)
    sent = sum(np.bincount(step.src, step.size, 4) for step in laid.rounds)
    assert np.array_equal(sent, [6, 6, 6, 6])


def test_a_pipelined_chain_takes_its_formula() -> None:
    laid = pattern("chain", "broadcast", [0, 1, 2, 3])
    for slices in (1, 8, 100):
        took = step_model.seconds(laid, exact(), 25e6, slices, blocking=False)
        assert took == pytest.approx((slices + 2) / slices + 3 * 60e-6, rel=1e-6)


def test_rounds_that_wait_for_their_end_do_not_overlap() -> None:
    laid = pattern("chain", "broadcast", [0, 1, 2, 3])
    network = Network(TWO_RACKS, TWO_RACKS.levels, 0.0, 0.0, 0.0, 5e-3)
    assert step_model.seconds(laid, network, 25e6, 1, blocking=True) == pytest.approx(3 * (1 + 60e-6 + 5e-3))


@pytest.mark.parametrize("places", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_neither_steps_nor_flows_are_below_the_bound(kind: Kind, name: str, places: list[int]) -> None:
    laid = pattern(name, kind, places)
    for nbytes, slices in ((4, 1), (2**20, 1), (2**20, 5)):
        bound = lower_bound(kind, nbytes, one_group(places), NETWORK)
        by_steps = step_model.seconds(laid, NETWORK, nbytes / laid.chunks, slices, blocking=False)
        by_flows = message_simulation.seconds(laid, NETWORK, nbytes / laid.chunks, slices)
        waiting = step_model.seconds(laid, NETWORK, nbytes / laid.chunks, slices, blocking=True)
        assert min(by_steps, by_flows, waiting) >= bound * (1 - 1e-9)


@pytest.mark.parametrize("places", [[0, 0, 1, 1], [0, 1, 2, 3]], ids=["shared places", "a place each"])
@pytest.mark.parametrize("name", ["chain", "double_tree"])
def test_flows_end_where_what_is_left_takes_less_than_the_clock_tells(name: str, places: list[int]) -> None:
    """Much later than a microbyte takes: hours over slow links, seconds in a shared memory."""
    laid = pattern(name, "all_reduce", places)
    took = message_simulation.seconds(laid, NETWORK, 1e11 / laid.chunks, 2)
    assert 1e11 / 25e6 <= took < 8 * 1e11 / 25e6


ALIKE = [
    (kind, name)
    for kind, name in CASES
    if name in ("ring", "halving_doubling", "recursive_doubling", "bruck")
    and kind in ("all_reduce", "reduce_scatter", "all_gather")
]


@pytest.mark.parametrize("slices", [1, 3, 8])
@pytest.mark.parametrize(("kind", "name"), ALIKE)
def test_one_rank_stands_for_all_where_all_are_alike(kind: Kind, name: str, slices: int) -> None:
    laid = pattern(name, kind, [0, 1, 2, 3])
    assert laid.alike
    short = step_model.seconds(laid, NETWORK, 1e6, slices, blocking=False)
    assert short == pytest.approx(message_simulation.seconds(laid, NETWORK, 1e6, slices), rel=0.02)


@pytest.mark.parametrize("name", ["ring", "halving_doubling", "chain", "double_tree"])
def test_what_is_extrapolated_is_what_is_followed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    laid = pattern(name, "all_reduce", IN_ORDER)
    predicted = step_model.seconds(laid, NETWORK, 8e6, 150, blocking=False)
    monkeypatch.setattr(step_model, "SIMULATED_SLICES", 1000)
    assert predicted == pytest.approx(step_model.seconds(laid, NETWORK, 8e6, 150, blocking=False), rel=0.01)


@pytest.mark.parametrize("slices", [1, 7])
@pytest.mark.parametrize("name", ["chain", "binomial_tree", "double_tree", "halving_doubling", "torus"])
def test_rounds_of_few_messages_take_the_same_in_loops_and_in_arrays(name: str, slices: int) -> None:
    laid = pattern(name, "all_reduce", IN_ORDER)
    ways = (step_model._sparse_time, step_model._all_ranks_time)  # pyright: ignore[reportPrivateUsage]
    loops, arrays = (way(laid, NETWORK, 3e5, slices) for way in ways)
    assert loops == arrays


def test_pieces_of_one_size_are_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    laid = pattern("chain", "all_reduce", IN_ORDER)
    first = step_model.seconds(laid, NETWORK, 1e6, 100, blocking=False)
    for name in ("_sparse_time", "_all_ranks_time", "_one_rank_time"):
        monkeypatch.delattr(step_model, name)
    assert step_model.seconds(laid, NETWORK, 2e6, 200, blocking=False) > first


# Bounds


def test_the_bound_of_two_racks_is_that_of_the_hosts() -> None:
    layout = one_group(IN_ORDER)
    assert busiest_bytes("all_reduce", 1.0, layout, NETWORK).tolist() == [1.75, 1.0]
    assert lower_bound("all_reduce", 25e6, layout, NETWORK) == pytest.approx(1.75 + 60e-6)


@pytest.mark.parametrize(
    ("kind", "host", "rack"),
    [
        ("reduce_scatter", 7 / 8, 1 / 2),
        ("all_gather", 7 / 8, 1 / 2),
        ("broadcast", 1.0, 1.0),
        ("reduce", 1.0, 1.0),
        ("scatter", 7 / 8, 1 / 2),
        ("gather", 7 / 8, 1 / 2),
        ("all_to_all", 7 / 8, 4 * 4 / 8),
    ],
)
def test_least_bytes_by_hand(kind: str, host: float, rack: float) -> None:
    assert busiest_bytes(kind, 1.0, one_group(IN_ORDER), NETWORK).tolist() == pytest.approx([host, rack])


def test_a_rank_alone_needs_no_time() -> None:
    assert lower_bound("all_reduce", 1e9, one_group([3]), NETWORK) == 0.0
    assert lower_bound("all_reduce", 1e9, one_group([3, 3]), NETWORK) == 0.0


def test_a_word_reaches_eight_ranks_no_sooner_than_a_best_tree_does() -> None:
    # o = 6 us, alpha = 60 us: one rank sends to another every 6 us, and each message arrives 72 us later.
    assert lower_bound("all_reduce", 0.0, one_group(IN_ORDER), NETWORK) >= 13 * 6e-6


def test_a_shift_is_no_broadcast() -> None:
    """Each rank sends to one rank, which takes one latency."""
    bound = lower_bound("shift", 4.0, one_group([0, 1, 2, 3]), NETWORK, root=1)
    assert bound == pytest.approx(4 / 25e6 + 60e-6)
    assert lower_bound("broadcast", 4.0, one_group([0, 1, 2, 3]), NETWORK) > bound
