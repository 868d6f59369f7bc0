"""The results that the bench of input across hosts computes from its measurements."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

pytest.importorskip("mpi4py")

from bench.harness.stage import Surroundings, topology
from bench.input_hosts import __main__ as input_hosts
from bench.input_hosts import ranks
from bench.netlab import Lab, Shape

WHERE = Surroundings(
    "2026-11-21", Shape(), "reno", {"host": 24e6}, ["a", "b", "c", "d"], "", 2, (0.0, 0.0, 0.0), "3.11", {}
)
ORDERS = ranks.Orders("records", ["all_shared"], 2, 64, 1, 2, "out")


def epoch(**changed: Any) -> ranks.Epoch:
    usual = {"wall_s": 5.0, "batch_s": 0.32, "cpu_s": 2.0, "sent": 10_000_000, "received": 9_000_000}
    usual |= {"busy": 0.5, "network": 0.2}
    return ranks.Epoch(**{**usual, "right": True, **changed})


@pytest.mark.parametrize(
    ("design", "readers", "produced", "moved"),
    [
        ("duplicate", 2, 256, 0),
        ("all_shared", 2, 64, 48),
        ("single_broadcast", 2, 64, 96),
        ("single_broadcast", 1, 64, 64),
        ("multi_broadcast", 4, 64, 48),
    ],
)
def test_the_least_that_a_batch_takes(design: str, readers: int, produced: int, moved: int):
    assert input_hosts.least(design, 4, readers, 64) == (produced, moved)


def test_the_slowest_member_of_the_usual_epoch_counts():
    epochs = [
        [epoch(), epoch(batch_s=0.4), epoch(), epoch()],
        [epoch(), epoch(), epoch(batch_s=0.5, sent=20_000_000), epoch()],
    ]
    measured = input_hosts.figure("all_shared", epochs, ORDERS, 1000, 0.0016, WHERE)
    assert measured.batch_s == pytest.approx(0.45)
    assert measured.spread == pytest.approx(0.05 / 0.45)
    assert measured.links_s == pytest.approx(48 * 224 * 224 * 3 / 24e6)
    assert measured.cores_s == pytest.approx(64 * 0.0016 / 2)
    assert measured.binds == "links"
    assert measured.cpu_s == pytest.approx(8.0 / 1000 / 4)
    assert (measured.sent, measured.received) == (15_000.0, 9_000.0)
    assert measured.right


@pytest.mark.parametrize(("busy", "binds"), [(0.6, "links"), (0.96, "cores")])
def test_links_bind_where_cores_have_time_left(busy: float, binds: str):
    epochs = [[epoch(busy=busy, network=0.5)] * 4] * 2
    measured = input_hosts.figure("all_shared", epochs, ORDERS, 1000, 0.0016, WHERE)
    assert (measured.busy, measured.network, measured.binds) == (busy, 0.5, binds)


@pytest.mark.parametrize(("rate", "design"), [(12e6, "no share"), (1.2e9, "all_shared")])
def test_the_choice_for_such_hosts_depends_on_their_links(rate: float, design: str):
    where = msgspec.structs.replace(WHERE, topology=topology(Lab(Shape(), "none"), {"host": rate}))
    assert input_hosts.chosen(where, ORDERS, 0.0016).startswith(f"{design}: ")


def test_a_record_that_is_missing_shows():
    epochs = [[epoch(), epoch(right=False)]]
    measured = input_hosts.figure("duplicate", epochs, ORDERS, 1000, 0.0016, WHERE)
    results = input_hosts.Results(WHERE, 1000, 64, 2, 0.0016, [measured], {"duplicate": epochs})
    assert not measured.right
    assert input_hosts.rows(results)[1][-1] == "WRONG"
    assert msgspec.json.decode(msgspec.json.encode(results), type=input_hosts.Results) == results


@pytest.mark.parametrize(
    "words", [["--records", "100"], ["--designs", "none"], ["--readers", "5"], ["--records", "64"]]
)
def test_what_cannot_be_measured_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        input_hosts.main(words)
    assert "error:" in capsys.readouterr().err
