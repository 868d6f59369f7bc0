"""Steps that are compiled once more, with a profile of their instruction times."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from test_audit_profile import AWAITED_FIRST, MACHINE, OVERLAPPED

import commplan
from commplan.diagnostics import CommplanError
from commplan.lowering.audit import Machine, target
from commplan.lowering.gpu.profile import LatencyProfile, latency_profile
from commplan.lowering.jax import _jit
from commplan.lowering.jax._jit import PROFILE

H100 = "NVIDIA H100 80GB HBM3"


def gpus(*processes: int, kind: str = H100) -> list[Any]:
    return [SimpleNamespace(platform="gpu", device_kind=kind, process_index=p) for p in processes]


class Executable:
    """The text of the program that XLA compiles."""

    def __init__(self, text: str) -> None:
        self.text = text

    def as_text(self) -> str:
        return self.text


def test_what_is_compiled_again_is_what_runs() -> None:
    profiles: list[str] = []

    def recompile(plain: Any, again: Any) -> Any:
        profiles.append(plain.as_text())
        return again(b'costs { name: "add" cost_us: 1.0 }')

    step = _jit.jit(lambda x, n: x * n, {}, recompile=recompile, static_argnums=1, donate_argnums=0)
    for size in (3, 3, 4):
        assert step(jnp.ones(size), 2)[0] == 2
    assert len(profiles) == 2 and "f32[3]" in profiles[0] and "f32[4]" in profiles[1]
    lowered = step.lower(jnp.ones(5), 2)
    assert lowered.compile()(jnp.ones(5))[0] == 2
    assert _jit.has_profile(lowered) is True and _jit.has_profile(jax.jit(abs).lower(1)) is None
    assert step(jnp.ones(5), 2)[0] == 2 and len(profiles) == 3
    assert "add" not in lowered.compile(compiler_options={PROFILE: b""}).as_text() and len(profiles) == 3
    assert jax.jit(lambda x: step(x, 2))(jnp.ones(6))[0] == 2 and len(profiles) == 3


@pytest.mark.parametrize("has_profile", [True, False])
def test_an_audit_reports_whether_the_compiled_step_has_a_profile(has_profile: bool) -> None:
    def recompile(plain: Any, again: Any) -> Any:
        other = again(b"")
        return other if has_profile else plain

    step = _jit.jit(lambda x: x + 1, {}, recompile=recompile)
    text = "plan p\naxis data = 1\ninput x : f32[4] same\neach step {\n    output x\n}\n"
    program = commplan.loads(text).compile()
    result = program.audit(step, jnp.ones(3))
    assert result.data()["pgle"] is has_profile
    words = "with a profile" if has_profile else "without a profile, which makes it no faster"
    assert f"; compiled by run.jit {words} (pgle)" in str(result)
    assert "pgle" not in str(program.audit(jax.jit(abs), jnp.ones(3)))


@pytest.mark.parametrize(("before", "after", "winner"), [(0, 1, 1), (1, 0, 1), (1, 1, 1)])
def test_a_profile_is_used_where_the_step_gets_faster(before: int, after: int, winner: int) -> None:
    texts, profiles = (AWAITED_FIRST, OVERLAPPED), list[bytes]()
    plain = Executable(texts[before])

    def again(profile: bytes) -> Executable:
        profiles.append(profile)
        return Executable(texts[after])

    chosen = LatencyProfile("estimated", MACHINE).recompile(plain, again)
    assert chosen.text == texts[winner] and (chosen is plain) == (before >= after)
    assert len(profiles) == 1 and b'name: "start" cost_us: 7000000.000' in profiles[0]


def test_rates_by_name_by_rates_and_by_devices(tmp_path: Path) -> None:
    def machine(setting: Any, devices: list[Any]) -> Machine | None:
        profile = latency_profile(setting, devices)
        return profile and profile.machine

    assert latency_profile(False, gpus(0)) is None
    assert (
        machine("h100:4x8", gpus(0))
        == target("h100:4x8").machine
        == machine(True, gpus(*(n // 8 for n in range(32))))
    )
    assert machine(True, gpus(0, 0)) == target("h100:1x2").machine
    assert machine(True, gpus(0, 0, kind="NVIDIA A100-SXM4-80GB")) == target("a100:1x2").machine
    assert machine(MACHINE, gpus(0)) == MACHINE
    for devices in (gpus(0, 1), gpus(0, 0, 1), gpus(0, kind="Tesla V100"), gpus(0, 0, kind="")):
        with pytest.raises(CommplanError, match=r"CP0859.*pgle=True needs rates for"):
            latency_profile(True, devices)
    with pytest.raises(CommplanError, match="CP1150"):
        latency_profile("h999:1x8", gpus(0))


def test_a_measured_profile_is_a_file_of_this_step(tmp_path: Path) -> None:
    file = tmp_path / "step.pbtxt"
    with pytest.raises(CommplanError, match=r"CP0859.*cannot be read: No such file"):
        latency_profile(str(file), gpus(0))
    file.write_text("nothing")
    with pytest.raises(CommplanError, match=r"CP0859.*is not a profile of instructions"):
        latency_profile(file, gpus(0))
    texts = b'costs { name: "start" cost_us: 7.0 }\ncosts { name: "product" cost_us: 7.0 }'
    message = b"\n\x10\n\x05start\x11" + bytes(8) + b"\n\x12\n\x07product\x11" + bytes(8)
    for data in (texts, message):
        file.write_bytes(data)
        profile = latency_profile(str(file), gpus(0))
        assert profile is not None and profile.source.startswith("profile step.pbtxt (sha256 ")
        chosen = profile.recompile(Executable(OVERLAPPED), lambda more: Executable(more.decode("latin1")))
        assert chosen.text.encode("latin1") == data
        with pytest.warns(RuntimeWarning, match="CP0860.* names 0 of the 2 collectives and products"):
            other = OVERLAPPED.replace("%start", "%begin").replace("%product", "%dot")
            profile.recompile(Executable(other), lambda _: None)


@pytest.mark.parametrize("target", [True, "h100:1x8", MACHINE])
def test_cpus_take_no_profile_and_run_all_the_same(target: Any) -> None:
    plan = commplan.loads(
        "plan mean\naxis data = 2\ninput grads : f32[4] partial data\n"
        "each step {\n    grads = reduce grads over data by mean\n    output grads\n}\n"
    )
    run = plan.compile(mesh := jax.make_mesh((2,), ("data",))).bind(mesh)
    with pytest.warns(RuntimeWarning, match=r"CP0860.*compiles for CPU devices"):
        step = run.jit(lambda x: x + 1, pgle=target)
    assert step(jnp.ones(2))[0] == 2
    with pytest.raises(CommplanError, match="CP1150"):
        run.jit(lambda x: x, pgle="h999:1x8")
