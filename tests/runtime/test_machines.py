"""Machines apart from steps: what a server lacks, flags that may differ, exchanges that time out."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from commplan.diagnostics import CommplanError
from commplan.runtime.context.identity import ByIdentity
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


def test_values_by_identity_end_with_their_objects() -> None:
    marks = ByIdentity[str]()
    one, equal = np.zeros(3), np.zeros(3)
    marks[one] = "reduced"
    assert marks.get(one) == "reduced"
    assert marks.get(equal) is None
    del one
    gc.collect()
    assert len(marks) == 0
