"""The tables of bench.prediction, from figures with known times."""

from __future__ import annotations

from bench.harness.stage import Figure
from bench.harness.work import Work
from bench.prediction import Pair, picks, summary


def pair(nbytes: int, how: str, measured: float, predicted: float) -> Pair:
    work = Work("all_reduce", (nbytes // 4,), how)
    return Pair(Figure("", "commplan", work, 4, [measured]), predicted)


def test_the_predicted_best_is_compared_with_the_measured_best() -> None:
    pairs = [
        pair(4, "", 1.0, 9.0),  # commplan's choice is not a separate method
        pair(4, "via ring", 1.0, 1.1),
        pair(4, "via native", 2.0, 1.2),
        pair(8, "via ring", 1.04, 1.0),
        pair(8, "via native", 1.0, 1.5),
        pair(16, "via ring", 3.0, 1.0),
        pair(16, "via native", 2.0, 1.5),
        pair(16, "via bruck", 1.0, 1.6),
        pair(32, "via ring", 1.0, 1.0),
    ]
    assert picks(pairs, 5)[1] == ["", "1 of 3", "2 of 3", "4.0%", "200%"]
    assert picks(pairs, 2)[1] == ["", "1 of 3", "2 of 3", "4.0%", "50%"]
    assert picks(pairs[:1], 5) == [["no work was measured in several ways"]]


def test_errors_have_their_median_and_their_90th_percentile() -> None:
    pairs = [pair(4, "via ring", 1.0, 1.0 + error / 100) for error in range(1, 11)]
    assert summary(pairs)[1] == ["all", "10", "5.5%", "9.0%", "10%"]
