"""The live view and the tables of `commplan run`."""

from __future__ import annotations

import io
import threading
from collections.abc import Sequence

import pytest
from rich.console import Console as Rich

from commplan.cli.console import Console
from commplan.cli.verbs.run.tables import RankCost, by_line
from commplan.cli.verbs.run.view import View, live
from commplan.diagnostics import Diagnostic, Span
from commplan.runtime.input.observe.accounting import Meter, Queue, Slow, Summary, remarks

LINE = Span(3, 5, 3, 20)


def metered(records: int = 8, cpu_s: float = 0.5) -> Meter:
    meter = Meter("step", "tested")
    meter.line("raw", "load [images]", LINE)
    meter.line("pixels", "share pixels via all_shared", Span(4, 1, 4, 9))
    meter.add("raw", cpu_s=cpu_s, system_s=cpu_s / 4, records=records, nbytes=64, wait_s=0.25, skipped=1)
    meter.count_batch(2, 0.5)
    return meter


def drawn(view: View) -> str:
    out = io.StringIO()
    Rich(file=out, width=200, force_terminal=False, highlight=False).print(view.table())
    return out.getvalue()


def test_the_view_shows_costs_and_how_fast_they_grow() -> None:
    meter = metered()
    queue = Queue(ready=1, depth=2, slots=3, used=2)
    view = View(lambda: [meter.summary(queue)], "rank 0 of 4")
    view.progress("step", 3, 10)
    text = drawn(view)
    assert "rank 0 of 4: step 3/10" in text and "load [images] (1 skipped)" in text
    assert "ready 1 of 2 (mean 2.0, least 2), slots 2 of 3" in text and "waited 0.50 s" in text
    quiet = drawn(view)  # nothing happened since
    assert next(line for line in quiet.splitlines() if "load" in line).split()[6] == "0"
    meter.add("raw", records=1_000_000, cpu_s=5.0)
    meter.checked += 7
    meter.slowed(2, 64, 0.5)
    text = drawn(view)
    assert int(next(line for line in text.splitlines() if "load" in line).split()[6]) > 0
    assert "7 ids checked" in text and "member 2 is 64 records behind" in text


def test_there_is_no_view_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    def summaries() -> Sequence[Summary]:
        raise AssertionError("nobody looks")

    before = threading.active_count()
    with live(Console(), summaries) as progress:
        assert progress is None and threading.active_count() == before
    with live(Console(style="json"), summaries) as progress:
        assert progress is None
    assert capsys.readouterr() == ("", "")


def test_stages_of_one_line_are_one_row() -> None:
    meter = Meter("step")
    for key, stage in (("a", "map decode"), ("b", "share pixels via all_shared")):
        meter.line(key, stage, LINE)
        meter.add(key, cpu_s=0.5, system_s=0.25, records=6, nbytes=60, wait_s=0.125)
    (row,) = by_line(meter.summary().lines).values()
    assert (row.records, row.nbytes, row.cpu_s, row.system_s, row.wait_s) == (6, 60, 1.0, 0.5, 0.25)


def test_remarks_name_the_emptiest_queue_and_the_slowest_member() -> None:
    ranks = [
        RankCost(0, 4, 0.0, 1.0, 5, "2 threads", 0, Queue(mean=2.0, least=1, depth=2), None, ()),
        RankCost(
            1,
            4,
            0.0,
            1.0,
            6,
            "2 threads",
            1,
            Queue(mean=0.5, least=0, depth=2, slots=3),
            Slow(3, 16, 0.5),
            (),
        ),
    ]
    assert remarks(ranks) == [
        "batches ready at a request: 0.50 of 2 on average, at least 0; 3 slots of shared memory",
        "worked on by 2 threads; replaced after they ended: 1 worker process",
        "11 record ids checked against the contract",
        "the slowest member is 3: 16 records behind, waited for 0.500 s",
    ]
    assert remarks([]) == []


def test_a_summary_is_printed_as_a_table() -> None:
    assert (
        str(metered(records=8192).summary(Queue(ready=2, depth=2, slots=3)))
        == """\
input of phase step of plan tested, rank 0: 1 batch, waited 0.500 s for them
line  stage                        records  bytes  CPU s  waited s  skipped
   3  load [images]                  8,192   64 B  0.500     0.250        1
   4  share pixels via all_shared        0    0 B  0.000     0.000        0
batches ready at a request: 2.00 of 2 on average, at least 2; 3 slots of shared memory"""
    )


def test_a_summary_without_a_queue_says_nothing_of_batches_made_ahead() -> None:
    meter = metered()
    meter.slowed(1, 32, 0.25)
    text = str(meter.summary())
    assert "batches ready at a request" not in text
    assert text.endswith("the slowest member is 1: 32 records behind, waited for 0.250 s")


def test_ranks_speak_together() -> None:
    pytest.importorskip("mpi4py")
    pytest.importorskip("mpi4jax")
    from commplan.runtime.rehearse.mpi import merge_errors  # noqa: PLC0415  brings MPI along

    bad, peer_died = Diagnostic("CP0906", "broken"), Diagnostic("CP0920", "process 1 of 2 died")
    assert merge_errors({0: [bad], 1: [bad]}, 2) == [bad]
    (diagnostic,) = merge_errors({0: [peer_died], 1: [bad]}, 2)
    assert diagnostic.code == "CP0906" and diagnostic.notes[-1].text == "on rank 1"
    (two,) = merge_errors({0: [peer_died], 2: [peer_died]}, 3)
    assert two.notes[-1].text == "on ranks 0, 2"
