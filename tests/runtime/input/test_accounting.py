"""The costs of the input: counted per line as user and system time, merged, and as metrics."""

from __future__ import annotations

import gc
import re
import resource
import shutil
import socket
import sys
import threading
import time
import urllib.request
import warnings
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from batch_feed import batches
from input_plans import Counting, images, schedule
from msgspec.structs import replace

from commplan.diagnostics import CommplanError, Span
from commplan.runtime.input.observe.accounting import Cpu, Meter, Queue, Slow, Summary, merged, thread_cpu
from commplan.runtime.observe import metrics

LINE = Span(3, 5, 3, 20)
BODY = "raw = load images batch 4 visit exactly_once seed 1\npixels, labels = map decode(raw)\noutput pixels"


def metered(rank: int = 0, *, records: int = 4, ready: int = 2) -> Summary:
    meter = Meter("step", "tested", rank)
    meter.line("raw", "load images", LINE)
    meter.add("raw", cpu_s=0.5, system_s=0.125, records=records, nbytes=10 * records, wait_s=0.25, skipped=1)
    meter.count_batch(0, 0.5, first=True)
    meter.count_batch(ready, 0.25)
    meter.checked += records
    return meter.summary(Queue(ready=1, depth=2, slots=3, used=2))


def busy_in_the_system() -> None:
    """Some of this is the kernel's work; how much of it is counted so is the machine's affair."""
    until = time.thread_time() + 0.15
    with Path("/dev/zero").open("rb", buffering=0) as zeros:
        room = bytearray(1 << 22)
        while time.thread_time() < until:
            zeros.readinto(room)


def test_system_time_is_told_apart_as_the_kernel_does():
    system_s = [resource.getrusage(resource.RUSAGE_THREAD).ru_stime]
    samples_of_cpu = list[Cpu]()
    for _ in range(4):
        busy_in_the_system()
        samples_of_cpu.append(thread_cpu())
        system_s.append(resource.getrusage(resource.RUSAGE_THREAD).ru_stime)
    for at, (before, after) in enumerate(pairwise(system_s)):
        assert before <= samples_of_cpu[at].system_s <= after
    for earlier, later in pairwise(samples_of_cpu):
        spent = later - earlier
        assert spent.system_s >= 0 and spent.both_s >= 0.15


def test_time_goes_to_the_line_that_took_it():
    meter = Meter("step")
    meter.line("a", "load a", LINE)
    meter.line("b", "map b", LINE)
    with meter.working("a"):
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass
    with meter.working("b", waits=True):
        time.sleep(0.02)
    with meter.working("a"):
        time.sleep(0.02)
    first, second = meter.summary().lines
    assert first.cpu_s >= 0.02 and first.wait_s == 0
    assert second.cpu_s < 0.02 <= second.wait_s
    assert first.user_s == pytest.approx(first.cpu_s - first.system_s)


def test_the_least_leaves_out_what_could_not_be_ready():
    summary = metered()
    assert (summary.queue.least, summary.queue.mean, summary.ready_mean) == (2, 1.0, 1.0)
    assert (summary.queue.ready, summary.queue.depth, summary.queue.slots, summary.queue.used) == (1, 2, 3, 2)
    assert Meter("step").summary().queue == Queue()


def test_the_member_that_others_waited_for_is_named():
    meter = Meter("step")
    assert meter.summary().slow is None
    meter.slowed(1, 32, 0.5)
    meter.slowed(2, 64, 0.25)
    meter.slowed(1, 16, 0.25)
    assert meter.summary().slow == Slow(1, 16, 0.75)


def test_summaries_of_ranks_add_up():
    first, second = metered(0), replace(metered(1, records=6, ready=0), slow=Slow(1, 8, 0.5))
    both = merged([second, first])
    (line,) = both.lines
    assert (line.records, line.nbytes, line.skipped, line.wait_s) == (10, 100, 2, 0.5)
    assert (line.cpu_s, line.system_s, both.cpu_s, both.system_s, both.skipped) == (1.0, 0.25, 1.0, 0.25, 2)
    assert (both.batches, both.wait_s, both.checked, both.rank, both.ranks) == (4, 1.5, 10, 0, 2)
    assert both.ready_mean == 0.5 and both.queue.least == 0 and both.slow == Slow(1, 8, 0.5)
    other = Meter("step")
    other.line("x", "map decode", LINE)
    assert len(merged([first, other.summary()]).lines) == 2


def test_batches_count_their_lines():
    program = schedule(BODY)
    with batches(program, Counting(images(10))) as feed:
        for _ in feed:
            pass
        summary = feed.summary()
    load, decode = summary.lines
    assert (load.what, load.records, decode.what, decode.records) == ("load images", 12, "map decode", 12)
    assert decode.nbytes == 12 * (36 + 4) and decode.cpu_s > 0 and decode.wait_s == 0
    assert summary.plan == "tested" and summary.batches == 3 and summary.queue.depth == 2
    assert summary.queue.slots == 0


# --- as a file ---

SAMPLE = re.compile(r'^(\w+)\{((?:\w+="(?:[^"\\]|\\.)*",?)*)\} (\S+)$')


def samples(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """The samples by name; whatever is neither a sample nor a comment fails."""
    families: dict[str, list[tuple[dict[str, str], float]]] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        match = SAMPLE.match(line)
        assert match, line
        labels = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', match[2]))
        families.setdefault(match[1], []).append((labels, float(match[3])))
    return families


def test_the_text_is_prometheus_s():
    text = metrics.text([metered(3), replace(metered(4), slow=Slow(1, 8, 0.5))])
    families = samples(text)
    for name in families:
        (kind,) = re.findall(rf"^# TYPE {name} (\w+)$", text, re.M)
        assert re.search(rf"^# HELP {name} \S", text, re.M)
        assert (kind == "counter") == name.endswith("_total")
        assert text.index(f"# HELP {name} ") < text.index(f"# TYPE {name} ") < text.index(f"\n{name}{{")
    cpu = families["commplan_input_cpu_seconds_total"]
    labels = {"plan": "tested", "phase": "step", "line": "3", "stage": "load images", "rank": "3"}
    assert cpu[0] == ({**labels, "mode": "user"}, 0.375)
    assert cpu[1] == ({**labels, "mode": "system"}, 0.125)
    assert families["commplan_input_records_total"] == [(labels, 4.0), ({**labels, "rank": "4"}, 4.0)]
    assert families["commplan_input_slow_member_behind_records"][0][0]["member"] == "1"
    assert {sample_labels["rank"] for sample_labels, _ in families["commplan_input_ready_batches"]} == {
        "3",
        "4",
    }


def test_labels_are_escaped():
    meter = Meter('a"b\\c\nd')
    meter.line("x", "map x", LINE)
    assert r'phase="a\"b\\c\nd"' in metrics.text([meter.summary()])


def test_a_file_is_whole_at_any_time(tmp_path: Path):
    path, contents = tmp_path / "input.prom", set[str]()
    texts = ["a" * 200_000, "b" * 100_000]
    metrics.write(path, texts[0])
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            contents.add(path.read_text())

    thread = threading.Thread(target=look)
    thread.start()
    for number in range(100):
        metrics.write(path, texts[number % 2])
    ended.set()
    thread.join()
    assert contents <= set(texts) and [file.name for file in tmp_path.iterdir()] == ["input.prom"]


def test_a_file_is_written_now_on_a_period_and_at_the_end(tmp_path: Path):
    meter = Meter("step", "tested")
    meter.line("raw", "load images", LINE)
    path = tmp_path / "input.prom"

    def records() -> float:
        return samples(path.read_text())["commplan_input_records_total"][0][1]

    with metrics.Metrics(path, lambda: [meter.summary()], 0.05) as writer:
        assert records() == 0
        meter.add("raw", records=5)
        until = time.monotonic() + 30
        while records() != 5 and time.monotonic() < until:
            time.sleep(0.01)
        assert records() == 5
        meter.add("raw", records=1)
    assert records() == 6
    writer.close()


def scraped(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        return answer.read().decode()


def test_an_address_is_scraped_with_and_without_a_file(tmp_path: Path):
    meter = Meter("step", "tested")
    meter.line("raw", "load images", LINE)
    path = tmp_path / "input.prom"
    for place in (path, None):
        listens = metrics.listening("0", 3)
        with metrics.Metrics(place, lambda: [meter.summary()], 600, listens) as writer:
            assert writer.address.startswith("127.0.0.1:")
            meter.add("raw", records=5)
            assert "commplan_input_records_total" in scraped(writer.address)
            records = samples(scraped(writer.address))["commplan_input_records_total"][0][1]
        with pytest.raises(OSError):
            scraped(writer.address)
    assert records == 10 and samples(path.read_text())["commplan_input_records_total"][0][1] == 5


def test_addresses_are_read():
    assert metrics.listening("9464", 0) == ("127.0.0.1", 9464)
    assert metrics.listening("0.0.0.0:9464", 3) == ("0.0.0.0", 9467)
    assert metrics.listening("[::1]:0", 3) == ("::1", 0)
    for wrong in ("localhost", "a:b", "", "-1", "70000"):
        with pytest.raises(CommplanError) as caught:
            metrics.listening(wrong, 0)
        assert caught.value.diagnostics[0].code == "CP0963"
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(CommplanError) as caught:
        metrics.Metrics(None, list, 600, listener.getsockname())
    assert caught.value.diagnostics[0].code == "CP0960"


def test_a_write_that_fails_beside_is_said_once(tmp_path: Path):
    path = tmp_path / "folder" / "input.prom"
    path.parent.mkdir()
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        writer = metrics.Metrics(path, list, 0.01)
        shutil.rmtree(path.parent)
        until = time.monotonic() + 30
        while not caught_warnings and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.1)
        path.parent.mkdir()
        writer.close()
    assert [str(each.message).partition(": ")[0] for each in caught_warnings] == ["metrics are not updated"]


def test_whatever_kills_a_thread_is_said_and_it_goes_on(tmp_path: Path):
    exits = [SystemExit("out of it")]

    def dies() -> list[Summary]:
        if exits and threading.current_thread().name == "commplan-metrics":
            raise exits.pop()
        return [metered(3)]

    path = tmp_path / "input.prom"
    with warnings.catch_warnings(record=True) as caught_warnings, metrics.Metrics(path, dies, 0.01):
        warnings.simplefilter("always")
        until = time.monotonic() + 30
        while (exits or not caught_warnings) and time.monotonic() < until:
            time.sleep(0.01)
        path.unlink()
        while not path.exists() and time.monotonic() < until:
            time.sleep(0.01)
        assert path.exists()
    assert [each.category for each in caught_warnings] == [RuntimeWarning] and "out of it" in str(
        caught_warnings[0].message
    )


def test_an_address_that_answers_no_more_is_said():
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        writer = metrics.Metrics(None, list, 0.01, metrics.listening("0", 0))
        writer._server.shutdown()
        until = time.monotonic() + 30
        while not caught_warnings and time.monotonic() < until:
            time.sleep(0.01)
        writer.close()
    assert f"the server at {writer.address} no longer answers" in str(caught_warnings[0].message)


def test_a_write_that_hangs_ends_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(metrics, "STUCK_S", 0.05)
    go_on = threading.Event()

    def hangs() -> list[Summary]:
        if threading.current_thread().name == "commplan-metrics":
            go_on.wait(60)
        return []

    writer = metrics.Metrics(tmp_path / "input.prom", hangs, 0.01)
    until = time.monotonic() + 30
    while not writer._writing.locked() and time.monotonic() < until:
        time.sleep(0.01)
    for call in (writer.write, writer.close):  # the second is the last write
        with pytest.raises(CommplanError, match="a write has hung for"):
            call()
    go_on.set()


def test_without_the_client_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.setitem(sys.modules, "prometheus_client.core", None)
    with pytest.raises(CommplanError, match=re.escape("commplan[metrics]")) as caught:
        metrics.text([])
    assert caught.value.diagnostics[0].code == "CP0962"


def test_a_ledger_remembers_batches_that_are_gone():
    ledger = metrics.Ledger()
    program = schedule(BODY)
    for _ in range(2):
        feed = batches(program, images(8))
        ledger.add(feed, feed.meters)
        ledger.add(feed, feed.meters)  # two members of one process share a meter
        assert len(list(feed)) == 2
        feed.close()
        (summary,) = ledger.summaries()
        del feed
        gc.collect()
    (summary,) = ledger.summaries()
    assert (summary.batches, summary.lines[0].records, summary.ranks) == (4, 16, 1)
    assert ledger.summaries() == [summary]


def test_several_processes_write_files_of_their_own(tmp_path: Path):
    assert metrics.rank_file(tmp_path / "a.prom", 0, 1) == tmp_path / "a.prom"
    assert metrics.rank_file(tmp_path / "a.prom", 3, 8) == tmp_path / "a.rank3.prom"
    assert metrics.rank_file(tmp_path / "{rank}.prom", 3, 8) == tmp_path / "3.prom"


def test_what_cannot_be_written_is_an_error(tmp_path: Path):
    with pytest.raises(CommplanError) as caught:
        metrics.write(tmp_path / "no" / "such.prom", "")
    assert caught.value.diagnostics[0].code == "CP0960"
    for period in (0, -1, float("nan"), float("inf"), True, "5"):
        with pytest.raises(CommplanError) as caught:
            metrics.checked_period(period)  # pyright: ignore[reportArgumentType]
        assert caught.value.diagnostics[0].code == "CP0961"
    assert metrics.checked_period(2) == 2.0
    assert np.isfinite(metrics.PERIOD_S)
