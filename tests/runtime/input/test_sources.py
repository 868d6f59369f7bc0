"""Sources and functions of the data runtime, checked when they are bound."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from batch_feed import batches, code, epoch, no_thread_is_left_behind
from input_plans import DECLARATIONS, FUNCTIONS, decode, ensemble, images, schedule

from commplan.diagnostics import CommplanError
from commplan.runtime.input.iterator import PhaseBatches
from commplan.runtime.input.sources.folders import folder, paths

pytestmark = pytest.mark.usefixtures(no_thread_is_left_behind.__name__)


def test_a_folder_is_sorted_and_leaves_hidden_files_out(tmp_path: Any) -> None:
    for name in ("b.jpg", "a.jpg", "B.jpg", ".hidden", "ä.jpg"):
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "sub").mkdir()
    (tmp_path / "empty.jpg").write_bytes(b"")
    files = folder(tmp_path)
    assert [files[i].decode() for i in range(len(files))] == ["B.jpg", "a.jpg", "b.jpg", "", "ä.jpg"]


@pytest.mark.parametrize("kind", ["list", "tuple", "folder", "path", "paths"])
def test_paths_represent_the_bytes_of_their_files(tmp_path: Any, kind: str) -> None:
    records = images(8)
    names = [tmp_path / f"{i:02}.bin" for i in range(8)]
    for name, record in zip(names, records, strict=True):
        name.write_bytes(record)
    source = {
        "list": names,
        "tuple": tuple(map(str, names)),
        "folder": folder(tmp_path),
        "path": tmp_path,
        "paths": paths(names),
    }[kind]
    results = epoch(ensemble("", 1), source)
    assert sorted(results[0]["labels"].tolist()) == list(range(8))


def bind_error(**sources: object) -> CommplanError:
    with pytest.raises(CommplanError) as error:
        PhaseBatches(ensemble("", 1), "step", sources, FUNCTIONS)
    return error.value


def test_sources_are_checked_when_they_are_bound(tmp_path: Any) -> None:
    assert [d.code for d in bind_error().diagnostics] == ["CP0900"]
    assert [d.code for d in bind_error(pictures=images(3)).diagnostics] == ["CP0900", "CP0900"]
    assert bind_error(images=tmp_path / "none").diagnostics[0].code == "CP0901"
    assert bind_error(images=str(tmp_path)).diagnostics[0].code == "CP0901"
    assert bind_error(images=iter(images(3))).diagnostics[0].code == "CP0902"
    assert bind_error(images={1: b""}).diagnostics[0].code == "CP0902"
    assert bind_error(images=[]).diagnostics[0].code == "CP0903"


def test_an_epoch_without_a_batch_is_refused() -> None:
    program = schedule(
        """raw = load images batch 8 visit at_most_once seed 1 tail drop
        pixels, labels = map decode(raw)
        output labels"""
    )
    with pytest.raises(CommplanError) as error:
        batches(program, images(7))
    assert code(error) == "CP0903"


@pytest.mark.parametrize(
    ("name", "function", "message"),
    [
        ("decode", None, "not bound"),
        ("decode", 3, "is of type `int`, which cannot be called"),
        ("decode", lambda: None, "cannot be called as the plan does"),
        ("flip", lambda pixels: pixels, "cannot be called as the plan does"),
    ],
)
def test_functions_are_checked_when_they_are_bound(name: str, function: Any, message: str) -> None:
    with pytest.raises(CommplanError) as error:
        batches(ensemble("", 1), images(8), functions={name: function})
    assert code(error) == "CP0908"
    assert message in str(error.value)


STEP_BODY = """raw = load images batch 8 visit exactly_once seed 1
pixels, labels = map decode(raw)
batch = map flip(pixels) per member
output batch"""


def test_binding_a_program_checks_its_sources_and_host_functions(tmp_path: Any) -> None:
    """`bind` refuses invalid sources and functions before anything is compiled or trained."""
    import jax  # noqa: PLC0415  only here: the data runtime itself needs no JAX

    import commplan  # noqa: PLC0415

    text = f"plan tested\nensemble member = 2\n{DECLARATIONS}\neach step {{\n{STEP_BODY}\n}}\n"
    program = commplan.loads(text).compile()
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("member",))
    for source, functions, expected in (
        (tmp_path / "none", FUNCTIONS, "CP0901"),
        (iter(images(3)), FUNCTIONS, "CP0902"),
        ([], FUNCTIONS, "CP0903"),
        (images(3), {**FUNCTIONS, "decode": lambda: None}, "CP0908"),
    ):
        hosts = {name: functions[name] for name in ("decode", "flip")}
        with pytest.raises(CommplanError) as error:
            program.bind(mesh, sources={"images": source}, functions=hosts)
        assert code(error) == expected
    assert program.bind(
        mesh, sources={"images": images(3)}, functions={"decode": decode, "flip": FUNCTIONS["flip"]}
    )
