"""array_record files as sources, through Grain; and the error if it is not installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from batch_feed import code, epoch, no_thread_is_left_behind
from input_plans import ensemble, images

from commplan.diagnostics import CommplanError
from commplan.runtime.input.sources import adapters
from commplan.runtime.input.sources.files import as_source

pytestmark = pytest.mark.usefixtures(no_thread_is_left_behind.__name__)
HAS_GRAIN = all(importlib.util.find_spec(name) for name in ("grain", "array_record"))
needs_grain = pytest.mark.skipif(not HAS_GRAIN, reason="Grain or array_record is not installed")


def written(path: Path, records: list[bytes]) -> Path:
    from array_record.python.array_record_module import ArrayRecordWriter  # noqa: PLC0415  # pyright: ignore

    writer: Any = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
    return path


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("train.array_record", True),
        ("train.array_record-00001-of-00010", True),
        ("train.array_record-*", True),
        ("train.array_recorder", False),
        (".array_record", False),
        ("train.record", False),
        (b"train.array_record", False),
    ],
)
def test_names_of_array_record_files(name: Any, is_one: bool) -> None:
    assert adapters.is_array_record(name) is is_one


@needs_grain
@pytest.mark.parametrize(
    ("kind", "workers"),
    [*((kind, "threads") for kind in ("path", "text", "list", "pattern", "source")), ("list", "processes")],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_array_record_files_are_records(tmp_path: Path, kind: str, workers: str) -> None:
    records = images(40)
    shards = [
        written(tmp_path / f"x.array_record-0000{n}-of-00002", records[20 * n : 20 * n + 20]) for n in (0, 1)
    ]
    source: Any = {
        "path": written(tmp_path / "x.array_record", records),
        "text": str(tmp_path / "x.array_record"),
        "list": shards,
        "pattern": tmp_path / "x.array_record-*",
        "source": as_source(list(map(str, shards)), is_bytes=True),
    }[kind]
    results = epoch(ensemble("", 1, hints="{ cores = 2 }"), source, workers=workers)
    assert sorted(int(n) for batch in results for n in batch["labels"]) == list(range(40))


@needs_grain
def test_one_record_at_a_time(tmp_path: Path) -> None:
    source = as_source(written(tmp_path / "x.array_record", images(3)), is_bytes=True)
    assert source is not None and adapters.batched(source) is None


def refused(source: object) -> CommplanError:
    with pytest.raises(CommplanError) as error:
        epoch(ensemble("", 1), source)
    return error.value


def test_files_that_are_not_there(tmp_path: Path) -> None:
    error = refused(str(tmp_path / "x.array_record"))
    assert error.diagnostics[0].code == "CP0951" and "there is no array_record file" in str(error)
    assert refused(str(tmp_path / "x.array_record-*")).diagnostics[0].code == "CP0951"


@needs_grain
def test_files_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "x.array_record").write_bytes(b"none of it")
    error = refused(tmp_path / "x.array_record")
    assert error.diagnostics[0].code == "CP0951" and "cannot be read as array_record" in str(error)


def test_grain_that_is_missing_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.array_record").write_bytes(b"")
    for name in ("grain", "grain.sources", "grain.python"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(CommplanError) as error:
        adapters.array_record([tmp_path / "x.array_record"])
    assert code(error) == "CP0951" and "pip install 'commplan[sources]'" in str(error.value)
