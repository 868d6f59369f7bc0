"""Machines apart from steps: what a server lacks, flags that may differ, exchanges that time out."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from commplan.diagnostics import CommplanError
from commplan.runtime.context.identity import ByIdentity
from commplan.runtime.machines import gather
from commplan.runtime.machines.environment import is_local
from commplan.runtime.machines.server import ServerMachine


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
    comm = SimpleNamespace(Get_rank=lambda: 1, isend=lambda *_: sent, improbe=lambda *_: None)
    groups = SimpleNamespace(along=lambda _: (0, 1, 2))
    backend: Any = SimpleNamespace(sizes={"data": 3}, channel=SimpleNamespace(groups=groups))
    looks: list[None] = []
    joint: Any = SimpleNamespace(look=lambda: looks.append(None))
    texts = Ranks(None, comm, backend, joints={(0, 1, 2): joint}).gather("mine", 0.01)
    assert texts == {1: None, 2: None}  # an empty text would be that of a rank that arrived
    assert looks


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
