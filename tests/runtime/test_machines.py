"""Machines apart from steps: what a server lacks, flags that may differ, exchanges that time out."""

from __future__ import annotations

import gc
import itertools
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from commplan.diagnostics import CommplanError
from commplan.recorder.file import Recording
from commplan.recorder.notice import Notice
from commplan.runtime.context.identity import ByIdentity
from commplan.runtime.machines import gather
from commplan.runtime.machines.environment import is_local
from commplan.runtime.machines.server import ServerMachine
from commplan.runtime.observe import joint_calls
from commplan.runtime.observe.joint_calls import JointCalls
from commplan.runtime.preflight.preflight import Hello, Preflight


def test_a_server_has_no_unknown_attribute_and_refuses_the_known_ones() -> None:
    machine: Any = ServerMachine(None, cast("Any", SimpleNamespace(name="server 0 of `hub`")))
    assert not hasattr(machine, "unknown")
    assert not hasattr(machine, "_repr_html_")  # as notebooks ask
    for name in ("layout", "zeros", "index"):  # of a machine, and of a backend
        with pytest.raises(CommplanError, match="CP0853"):
            getattr(machine, name)


@pytest.mark.parametrize(
    "flag",
    [
        "--xla_dump_to=/tmp/x", "--xla_log_hlo_text=x", "--xla_gpu_kernel_cache_file=/x",
        "--xla_force_host_platform_device_count=8", "--xla_gpu_per_fusion_autotune_cache_dir=/x",
        "--xla_gpu_pgle_profile_file_or_directory_path=/x",
    ],
)  # fmt: skip
def test_flags_that_name_files_and_logs_may_differ(flag: str) -> None:
    assert is_local(flag)


@pytest.mark.parametrize(
    "flag",
    [
        "--xla_gpu_target_config_topology=a", "--xla_gpu_enable_logical_names=true",
        "--xla_disable_hlo_passes=dump,file=,log", "--xla_gpu_use_profile=true",
    ],
)  # fmt: skip
def test_flags_with_log_or_file_inside_a_word_or_value_are_compared(flag: str) -> None:
    assert not is_local(flag)


def test_a_rank_knows_of_no_other_if_the_first_does_not_answer() -> None:
    pytest.importorskip("mpi4py")
    from commplan.runtime.machines.ranks import Ranks  # noqa: PLC0415  of MPI

    sent = SimpleNamespace(Test=lambda: True)
    comm = SimpleNamespace(
        Get_rank=lambda: 1, issend=lambda *_: sent, isend=lambda *_: sent, improbe=lambda *_: None
    )
    groups = SimpleNamespace(along=lambda _: (0, 1, 2))
    backend: Any = SimpleNamespace(sizes={"data": 3}, channel=SimpleNamespace(groups=groups))
    looks: list[None] = []
    joint: Any = SimpleNamespace(look=lambda: looks.append(None))
    texts = Ranks(None, comm, backend, joints={(0, 1, 2): joint}).gather("mine", 0.01)
    assert texts == {1: None, 2: None}  # an empty text would be that of a rank that arrived
    assert looks


@pytest.mark.parametrize(
    ("me", "has_arrived", "expected"),
    [
        (0, True, "ranks 1, 2 have not arrived"),
        (1, False, "rank 0 has not arrived"),
        (2, False, ""),
        (1, True, ""),
    ],
)
def test_ranks_report_late_ones_that_no_other_reports(
    me: int, has_arrived: bool, expected: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The first rank knows which are late, the others only whether it is, and report it one by one."""
    pytest.importorskip("mpi4py")
    from commplan.runtime.machines import ranks  # noqa: PLC0415  of MPI

    clock = itertools.count()
    monkeypatch.setattr(ranks.time, "monotonic", lambda: next(clock) / 100)
    sent = SimpleNamespace(Test=lambda: has_arrived)
    comm = SimpleNamespace(
        Get_rank=lambda: me, issend=lambda *_: sent, isend=lambda *_: sent, improbe=lambda *_: None
    )
    groups = SimpleNamespace(along=lambda _: (0, 1, 2))
    backend: Any = SimpleNamespace(sizes={"data": 3}, channel=SimpleNamespace(groups=groups))
    joint: Any = SimpleNamespace(look=lambda: None)
    machine = ranks.Ranks(None, comm, backend, joints={(0, 1, 2): joint})
    machine.gather("mine", 0.2, Notice(["it waits"], 0.2 if me == 2 else 0.1, "rank"))
    assert capsys.readouterr().err == (
        f"commplan: {expected} within 0 s\nnote: it waits\n" if expected else ""
    )


@pytest.mark.parametrize(("me", "expected"), [(1, "processes 0, 2 have not arrived"), (3, "")])
def test_the_first_of_the_processes_that_have_arrived_reports_the_others_once(
    me: int, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def late(*_: object) -> None:
        time.sleep(0.6)  # several looks
        raise TimeoutError("DEADLINE_EXCEEDED")

    monkeypatch.setattr(gather.jax, "process_index", lambda: me)
    monkeypatch.setattr(gather.coordinator, "all_gather_text", late)
    monkeypatch.setattr(gather.coordinator, "texts", lambda _: {1: "", 3: ""})
    monkeypatch.setattr(gather.coordinator, "barrier", lambda *_: None)
    gather.gathered("p", "", (0, 1, 2, 3), 1.0, Notice(["it waits"], 0.1))
    text = re.sub(r"\d+ s", "N s", capsys.readouterr().err)
    assert text == (f"commplan: {expected} within N s\nnote: it waits\n" if expected else "")


@pytest.mark.parametrize("attends", [True, False])
def test_a_comparison_reports_late_processes_only_if_no_sidecar_does(
    attends: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(joint_calls, "is_attended", lambda: attends)
    monkeypatch.setenv("COMMPLAN_RECORDS", str(tmp_path))
    notices: list[Notice | None] = []

    def exchange(text: str, timeout_s: float, notice: Notice | None = None) -> dict[int, str]:
        notices.append(notice)
        return {0: text}

    for joint in (JointCalls(), JointCalls(Recording("job", "x", 0, 2), is_put=True)):
        machine: Any = SimpleNamespace(
            layout="global", process=lambda: (0, 2), participants=lambda: (0,), gather=exchange, joint=joint
        )
        Preflight(machine, "x.plan", 1.0).exchange(Hello())
    unwatched, watched = notices
    assert unwatched is not None and (watched is None) is attends


def test_the_processes_of_an_exchange_that_one_misses_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "gathered", lambda *_: ({0: "[1,2]"}, "DEADLINE_EXCEEDED"))
    with pytest.raises(CommplanError, match="CP0849") as caught:
        gather.gathered_values("p", [1, 2], (0, 1), 3.0, gather.Absence("bind `p`", "bind it everywhere"))
    text = str(caught.value)
    for words in ("processes 0, 1 bind `p`: one did not arrive", "DEADLINE_EXCEEDED", "bind it everywhere"):
        assert words in text
    monkeypatch.setattr(gather, "gathered", lambda *_: ({0: "[1,2]", 1: "[3]"}, ""))
    values = gather.gathered_values("p", [1, 2], (0, 1), 3.0, gather.Absence("bind `p`", ""))
    assert values == {0: [1, 2], 1: [3]}


def test_values_by_identity_end_with_their_objects() -> None:
    marks = ByIdentity[str]()
    one, equal = np.zeros(3), np.zeros(3)
    marks[one] = "reduced"
    assert marks.get(one) == "reduced"
    assert marks.get(equal) is None
    del one
    gc.collect()
    assert len(marks) == 0
