"""The parts of `bench.gpu`, small, on CPU devices of this process."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.compiled import models
from bench.on_gpu import calibration, content, ensemble, feeding, mock, rows, tax, unconnected
from bench.on_gpu.findings import Findings, result_of
from bench.on_gpu.scale import Scale
from bench.on_gpu.timing import in_turns, wait
from commplan.runtime.machines import mesh as machines

ON_GPU = Path(mock.__file__).parent
SMALL = Scale(True, 1)
Result = dict[str, Any]


@pytest.fixture(autouse=True)
def small_vocabularies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "VOCABULARY", 512)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[Any]]:
    """Let JAX find no more than so many devices."""
    every = jax.devices()

    def limited(count: int) -> list[Any]:
        monkeypatch.setattr(jax, "devices", lambda *_: every[:count])
        monkeypatch.setattr(jax, "device_count", lambda *_: count)
        return every[:count]

    return limited


def findings_of(measure: Callable[[Scale, Findings], None], reports: list[Result] | None = None) -> Result:
    findings = Findings((reports if reports is not None else []).append)
    measure(SMALL, findings)
    return findings.result


def small(part: str) -> Result:
    return findings_of(importlib.import_module(f"bench.on_gpu.{part}").measure)


def test_libraries_train_with_a_plan(devices: Any) -> None:
    devices(2)
    losses = small("smoke")["numpy"]
    assert losses[-1] < losses[0]


# --- times ---


def test_arrays_that_a_later_call_took_are_not_waited_for() -> None:
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    arrays = [jnp.zeros(8)]
    donated: list[Any] = []

    def call() -> Any:
        donated.append(arrays[0])
        arrays[0] = step(arrays[0])
        return {"x": arrays[0], "number": 3}

    times = in_turns({"step": call}, rounds=2, repeat=3)
    assert all(x.is_deleted() for x in donated) and len(donated) == 7
    assert len(times["step"]) == 2 and float(arrays[0][0]) == 7
    wait([donated[0], arrays[0], "text"])


def test_calls_are_repeated_alike_in_the_small_mode() -> None:
    """One call in a row would hide that a call takes the arrays that the last one gave."""
    for path in ON_GPU.glob("*.py"):
        text = path.read_text()
        assert not re.search(r"repeat=(scale\.pick\(1,|1\b)", text), path
        if path.name not in ("scale.py", "machine.py", "mock.py", "ensemble.py"):
            assert "scale.small" not in text, f"{path} does not differ in sizes alone"


def test_progress_is_reported_after_every_call_and_round() -> None:
    states: list[dict[str, int]] = []
    calls = {"a": lambda: jnp.zeros(1), "b": lambda: jnp.ones(1)}
    in_turns(calls, 2, progress=lambda times: states.append({n: len(each) for n, each in times.items()}))
    assert states == [{"a": 0}, {"a": 0, "b": 0}, {"a": 1, "b": 1}, {"a": 2, "b": 2}]


# --- steps ---


def test_the_tax_on_two_devices_is_reported_round_by_round(devices: Any) -> None:
    devices(2)
    reports: list[Result] = []
    findings = findings_of(tax.measure, reports)
    assert findings["apart"] < 0.01 and set(findings["exposed"]) == {tax.ALONE, tax.PLANNED}
    assert [report["lines"] for report in reports[:3]] == [[f"{n} step(s) compiled"] for n in (1, 2, 3)]
    assert all(report["interim"] for report in reports[:-1]) and "tax" in reports[-2]


def test_packing_is_measured_in_three_ways_on_random_numbers() -> None:
    findings = small("packing")
    buckets = {f"{name}, {way}" for name in ("default", "25 MiB") for way in ("packed", "as they are")}
    assert set(findings["ways"]["bfloat16"]["traffic"]) == {"mean alone", *buckets}
    assert set(findings["ways"]["float32"]["traffic"]) == {"mean alone", *buckets, "bf16 wire, packed"}
    numbers = np.asarray(unconnected.random_tree(jax.ShapeDtypeStruct((4096,), "float32")))
    assert len(np.unique(numbers)) > 4000 and 0.018 < numbers.std() < 0.022


def test_arrays_as_they_are_are_not_packed() -> None:
    like = {name: jax.ShapeDtypeStruct((2**19,), "float32") for name in "abc"}
    grads = unconnected.random_tree(like)
    text: dict[str, str] = {}
    for name, way in unconnected.phases(like, "float32").items():
        text[name] = str(jax.make_jaxpr(way)(grads))
        results = way(grads)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), results) == jax.tree.map(
            lambda x: (x.shape, x.dtype), grads
        )
        if "wire" not in name:
            for leaf, result in zip(grads.values(), results.values(), strict=True):
                np.testing.assert_allclose(result, leaf / unconnected.RANKS, rtol=1e-6)
    assert "concatenate" in text["default, packed"] and "concatenate" not in text["default, as they are"]
    assert "bf16" in text["bf16 wire, packed"]
    assert all("optimization_barrier" in each for each in text.values())


@pytest.mark.campaign
def test_the_estimate_stands_beside_the_time() -> None:
    findings = small("estimate")
    assert all(step["estimate"] > 0 and step["seconds"] for step in findings["steps"].values())
    assert (
        set(findings["steps"]) == {"transformer", "ResNet-50"}
        and findings["steps"]["transformer"]["tflops"] > 0
    )


@pytest.mark.campaign
def test_the_step_of_one_of_eight() -> None:
    names = {"no reduction", "default, packed", "default, as they are", "25 MiB, as they are"}
    assert set(small("eight")["seconds"]) == names


def test_a_tiny_step() -> None:
    assert set(small("dispatch")["seconds"]) == {"jax.jit", "run.jit"}


# --- mocked GPUs ---


def test_the_programs_for_mocked_gpus_train_alike(devices: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "processes_of", lambda mesh: tuple(range(mock.GPUS)))  # which do not exist
    monkeypatch.setattr(jax, "process_count", lambda: mock.GPUS)
    mesh, model = mock.mesh_of(devices(2)), models.Transformer(1, 128, 1, 32)
    weights: dict[str, Any] = {}
    for name, step in mock.programs(mesh, model).items():
        params, tokens = mock.arguments(mesh, model)
        assert tokens.shape == (2, 32) and not params["embed"].is_deleted()
        weights[name] = step(params, tokens)
        assert params["embed"].is_deleted()
    assert set(weights) == {tax.ALONE, *mock.OPTIONS}
    for name in mock.OPTIONS:
        for ours, alone in zip(
            jax.tree.leaves(weights[name]), jax.tree.leaves(weights[tax.ALONE]), strict=True
        ):
            np.testing.assert_allclose(np.float32(ours), np.float32(alone), atol=1e-3)


def test_mocked_gpus_need_a_gpu(devices: Any) -> None:
    devices(1)
    (line,) = findings_of(mock.measure)["lines"]
    assert "this needs a GPU; 3 steps are built" in line


def test_mocked_topologies_are_tried_until_one_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "part.sh"
    program.write_text(
        '#!/bin/sh\n[ "$JAX_MOCK_GPU_TOPOLOGY" = 4x8x1 ] || { echo "wrong topology"; exit 1; }\n'
        'echo \'result: {"lines": ["32 GPUs"], "seconds": {}}\'\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr(mock.sys, "executable", str(program))
    findings = Findings(lambda _: None)
    mock.measure(Scale(False, 1), findings)
    assert findings.lines == ["4x1x8: status 1: wrong topology", "32 GPUs"]
    assert findings.figures["topology"] == "4x8x1"
    program.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(RuntimeError, match="no mocked client"):
        mock.measure(Scale(False, 1), findings)


def test_fewer_devices_than_mocked_are_an_error(devices: Any) -> None:
    devices(2)
    with pytest.raises(SystemExit, match="2 devices, not 32"):
        mock.main()


# --- bytes ---


def test_the_checksum_of_a_row_depends_on_every_byte_and_its_place() -> None:
    records = rows.NumberedRows(200, 64)
    every = np.stack([records[i] for i in range(len(records))])
    assert records.sums() == rows.host_sums(every)
    assert rows.wrong_rows(records.sums(), [rows.device_sums(jnp.asarray(every))]) == 0
    for change in ("byte", "place", "number", "unknown"):
        wrong = every.copy()
        if change == "byte":
            wrong[7, 50] ^= 1
        elif change == "place":
            wrong[7, [50, 51]] = wrong[7, [51, 50]]
        elif change == "number":
            wrong[7, :4] = wrong[8, :4]
        else:
            wrong[7, :4] = 255
        assert rows.wrong_rows(records.sums(), [rows.device_sums(jnp.asarray(wrong))]) == 1, change


def flipped(self: Any, number: int) -> Any:
    """A record whose last byte is another in one of 20."""
    row = genuine(self, number).copy()
    row[-1] ^= number % 20 == 3
    return row


genuine = rows.NumberedRows.__getitem__


def test_every_byte_on_the_device_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = small("content")["content"]
    assert set(findings) == {"0", "1", "2"}
    for counts in findings.values():
        assert counts["rows"] == 2 * 160 and counts["wrong"] == counts["later"] == counts["missing"] == 0
    monkeypatch.setattr(rows.NumberedRows, "__getitem__", flipped)
    with pytest.raises(AssertionError, match="not those of the records"):
        findings_of(content.measure)


def test_fed_bytes_are_compared_with_those_of_the_host(devices: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    devices(1)
    findings = small("feeding")
    assert set(findings) >= {"bus", "rates", "step_s", "nbytes"} and findings["wrong_copies"] == 0
    assert all(rate["wrong"] == 0 and rate["rows"] > 0 for rate in findings["rates"].values())
    monkeypatch.setattr(feeding, "_bus", lambda *_: ({"pinned": 1e9}, 0))
    monkeypatch.setattr(feeding, "_step", lambda *_: jax.jit(lambda x: x.sum()))
    monkeypatch.setattr(feeding.Records, "__getitem__", lambda self, n: self._rows[n % len(self._rows)] ^ 1)
    with pytest.raises(AssertionError, match="not the host's"):
        findings_of(feeding.measure)


# --- machines ---


def test_links_are_measured_between_several_devices(devices: Any) -> None:
    devices(1)
    assert "nothing to measure" in findings_of(calibration.measure)["lines"][0]
    devices(2)
    assert "calibration" in findings_of(calibration.measure)


def test_members_need_photographs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ensemble, "missing", lambda *names: ["sklearn"])
    (line,) = findings_of(ensemble.measure)["lines"]
    assert line.startswith("not measured") and "scikit-learn" in line


@pytest.mark.timeout(300)
def test_members_are_measured_on_a_device() -> None:
    if ensemble.missing(*ensemble.PICTURES):
        pytest.skip("the ensemble's records are made of photographs that scikit-learn and scikit-image have")
    results = findings_of(lambda scale, findings: ensemble.of_members(scale, (1,), findings))
    assert {name for name, cell in results["cells"].items() if cell["rate"]} == {"all_shared 1", "plain 1"}


def test_a_result_is_a_line_of_its_own() -> None:
    assert result_of('result: {"lines": []}\n') == {"lines": []}
    assert result_of("lines\n") is None
