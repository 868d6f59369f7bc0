"""Batches between hosts: the same bits, errors that reach all, and a carrier that is called as it must be.

The hosts are pretended: processes of one machine that map different memory and exchange their parts in files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.sharing import Processes

from commplan.diagnostics import CommplanError
from commplan.input.work_partition import division
from commplan.runtime.input.group import group

DESIGNS = [
    "all_shared",
    *(f"single_broadcast(readers = {readers})" for readers in (1, 3)),
    "multi_broadcast(readers = 2)",
]


class Hosts(Processes):
    def __init__(self, folder: Path) -> None:
        super().__init__("input_process.py")
        self.folder = folder

    def told(self, hosts: list[int], **orders: Any) -> list[list[dict[str, Any]]]:
        """The output of the processes on `hosts`, a list for each. Those with `dies_at` are killed."""
        each = orders.pop("each", {})
        common = {"count": len(hosts), "hosts": hosts, "carrier": str(self.folder), **orders}
        self.begin({"index": index, **common, **each.get(index, {})} for index in range(len(hosts)))
        reports = self.ended()
        codes = [-9 if "dies_at" in each.get(index, {}) else 0 for index in range(len(hosts))]
        assert [code for code, _ in reports] == codes
        return [[json.loads(line) for line in lines] for _, lines in reports]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(tmp_path) as processes:
        yield processes


def steps(reports: list[dict[str, Any]]) -> list[Any]:
    return [(x["epoch"], x["step"], x["sums"], x["count"]) for x in reports if "sums" in x]


def last(reports: list[dict[str, Any]], key: str) -> Any:
    return next(x[key] for x in reversed(reports) if key in x)


@pytest.mark.parametrize("by_caller", [False, True], ids=["own thread", "caller"])
@pytest.mark.parametrize("design", DESIGNS)
def test_batches_between_hosts_are_the_same_bits(hosts: Hosts, design: str, by_caller: bool) -> None:
    """Processes 0, 2 and 3 on one host, process 1 on another; the last batch is short."""
    places = [0, 1, 0, 0]
    orders = {"design": design, "records": 43, "epochs": 2, "by_caller": by_caller}
    processes = hosts.told(places, **orders, hints="tail short")
    [alone] = hosts.told([0], design="duplicate", records=43, epochs=2, members=4, hints="tail short", run="")
    assert len(steps(alone)) == 12
    for reports in processes:
        assert [x for x in reports if "code" in x] == []
        assert [x[:2] + x[3:] for x in steps(reports)] == [x[:2] + x[3:] for x in steps(alone)]
        shared = [ref for ref in steps(reports)[0][2] if not ref.startswith("batch")]
        assert shared
        for shared_step, own_step in zip(steps(reports), steps(alone), strict=True):
            assert {r: shared_step[2][r] for r in shared} == {r: own_step[2][r] for r in shared}
        assert last(reports, "threads") == []
        assert last(reports, "carrier")[1] >= 1, "closed in every process"
    ahead = [last(reports, "carrier")[0] for reports in processes]
    assert ahead[0] == ahead[1] == list(range(12)), (
        "the first process of each host leads, once for each batch"
    )
    assert ahead[2] == ahead[3] == []
    readers = 4 if design == "all_shared" else int(design[-2])
    assert [len(last(reports, "read")) > 0 for reports in processes] == [i < readers for i in range(4)]


def test_a_carrier_is_told_how_users_count_a_batch(hosts: Hosts) -> None:
    processes = hosts.told([0, 1], design="all_shared", at={"epoch": 1, "step": 2}, epochs=2)
    for reports in processes:
        assert last(reports, "carrier")[0] == [0, 1, 2, 3, 4, 5, 6, 7][: len(last(reports, "counted"))]
        assert last(reports, "counted") == [8, 9, 10, 11, 12, 13, 14, 15]


@pytest.mark.parametrize("by_caller", [False, True], ids=["own thread", "caller"])
def test_an_error_on_one_host_is_the_error_of_all(hosts: Hosts, by_caller: bool) -> None:
    processes = hosts.told([0, 0, 1, 1], design="all_shared", bad=[7], by_caller=by_caller)
    problems = [next(x for x in reports if "code" in x) for reports in processes]
    assert {p["code"] for p in problems} == {"CP0906"}
    assert {p["message"] for p in problems} == {
        "host function `decode` on record 7 raised ValueError: truncated"
    }
    assert len({len(steps(reports)) for reports in processes}) == 1
    assert sum(any("raised in process" in note for note in p["notes"]) for p in problems) == 3
    ahead = [last(reports, "carrier")[0] for reports in processes]
    assert ahead[0] == ahead[2] and ahead[1] == ahead[3] == []


def test_hosts_that_stand_at_different_places_are_told(hosts: Hosts, tmp_path: Path) -> None:
    state = {"epoch": 0, "step": 2}
    processes = hosts.told([0, 1], design="all_shared", each={1: {"at": state}})
    problems = [next(x for x in reports if "code" in x) for reports in processes]
    assert {p["code"] for p in problems} == {"CP0922"}


def test_other_hosts_receive_the_error_of_a_process_that_has_left(hosts: Hosts) -> None:
    """Even if the caller of the process that moves batches could raise the error before it is sent."""
    each = {0: {"look_late": 1.0}, 1: {"stop_after": 2}}
    processes = hosts.told([0, 0, 1], design="all_shared", records=400, each=each)
    for reports in (processes[0], processes[2]):
        problem = next(x for x in reports if "code" in x)
        assert problem["code"] == "CP0920" and "process 1 of 3 left" in problem["message"]


def test_an_heir_completes_the_transfer_in_which_the_leader_died(hosts: Hosts) -> None:
    """Also if it tries to reserve the transfer before it has freed the claims of the dead process."""
    each = {0: {"dies_at": 2}, 1: {"reap_late": True}}
    orders = {"design": "all_shared", "records": 96, "hints": "{ on_failure = continue }", "timeout": 5.0}
    _, heir, other = hosts.told([0, 0, 1], each=each, **orders)
    assert len(steps(heir)) == len(steps(other)) == 12, heir
    for mine, others in zip(steps(heir), steps(other), strict=True):
        assert {**mine[2], "batch.0": 0} == {**others[2], "batch.0": 0}
    assert last(heir, "carrier")[0] == list(range(2, 12))


def test_a_step_may_take_longer_than_the_timeout_of_the_group(hosts: Hosts) -> None:
    """The callers hold batches meanwhile: batches whose slots they hold are not waited for."""
    slow = {"then_timeout": 0.8, "pause": 1.3, "pauses": [0], "stop_after": 6}
    for reports in hosts.told([0, 1], design="all_shared", records=96, **slow):
        assert [x["step"] for x in reports if "step" in x] == list(range(7)), reports


def test_a_host_may_be_behind_while_nobody_waits_for_its_rows(hosts: Hosts) -> None:
    """Both callers compute for longer than the timeout of the transport, process 1 a batch earlier: its host
    has no free slot for a batch that the other host has made."""
    each = {0: {"pauses": [1]}, 1: {"pauses": [0]}}
    orders = {"pause": 4.0, "silence_s": 2.0, "stop_after": 6, "records": 96}
    for reports in hosts.told([0, 1], design="all_shared", each=each, **orders):
        assert [x["step"] for x in reports if "step" in x] == list(range(7)), reports


def test_a_host_whose_rows_are_waited_for_is_named(hosts: Hosts) -> None:
    orders = {"pause": 4.0, "silence_s": 0.5, "stop_after": 6, "records": 96}
    each = {0: {"pauses": []}, 1: {"pauses": [0]}}
    reports, _ = hosts.told([0, 1], design="all_shared", each=each, **orders)
    assert next(x["code"] for x in reports if "code" in x) == "CP0937"


def test_a_leader_that_carries_nothing_is_named(hosts: Hosts) -> None:
    """The caller of process 0, which transfers the batches of its host, is away: process 1 does not hang."""
    slow = {0: {"pause": 4.0, "stop_after": 1}, 1: {"then_timeout": 0.5}, 2: {"stop_after": 1}}
    processes = hosts.told([0, 0, 1], design="all_shared", records=400, by_caller=True, each=slow)
    problem = next(x for x in processes[1] if "code" in x)
    assert problem["code"] == "CP0921"
    assert "process 0 of 3 is alive, but was silent for 1 s" in problem["message"]


def test_groups_on_several_hosts_need_a_carrier() -> None:
    with pytest.raises(CommplanError) as error:
        group("x", 0, 2, hosts=(0, 1))
    assert error.value.diagnostics[0].code == "CP0924"
    with pytest.raises(CommplanError) as error:
        group("x", 0, 2, hosts=(0,))
    assert error.value.diagnostics[0].code == "CP0924"
    with pytest.raises(CommplanError) as error:
        group("x", 0, 2, readers=3)
    assert error.value.diagnostics[0].code == "CP0924"


def test_a_host_is_led_by_its_first_process() -> None:
    split = division("all_shared", (1, 0, 1, 0))
    assert [split.leader(host) for host in (0, 1)] == [1, 0]
    assert split.readers == (0, 2, 1, 3)
