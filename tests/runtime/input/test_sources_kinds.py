"""Records of other libraries' kinds, columns of data sets, and how often each record is fetched."""

from __future__ import annotations

import io
import pickle
import re
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batch_feed import code, epoch, no_thread_is_left_behind
from input_plans import decode, images, schedule

import commplan
from commplan.diagnostics import CommplanError
from commplan.runtime.input.iterator import PhaseBatches
from commplan.runtime.input.sources import adapters
from commplan.runtime.input.sources.files import bind_sources

pytestmark = pytest.mark.usefixtures(no_thread_is_left_behind.__name__)

IMAGES_AND_LABELS = """
raw    = load images batch 8 visit exactly_once seed 3 {hints}
given  = load labels batch 8 visit exactly_once seed 3
pixels, first = map decode(raw)
output pixels, first, given"""
DECLARATIONS = """
source images : bytes
source labels : i32
fn decode (bytes) -> u8[6, 6], i32 on host
"""


class Pairs:
    """A map-style data set: (record, label), and how often each was fetched."""

    def __init__(self, count: int, broken: Sequence[int] = ()) -> None:
        self.records, self.broken = images(count), broken
        self.fetched: list[int] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Any:
        assert type(index) is int
        with self._lock:
            self.fetched.append(index)
        if index in self.broken:
            raise OSError("gone")
        return self.records[index], index


class Table:
    """A data set with named columns, batched access and a choice of columns, as Hugging Face's have them."""

    def __init__(self, columns: Mapping[str, Sequence[Any]], log: list[Any] | None = None) -> None:
        self.columns: list[Any] = [] if log is None else log
        self.data = dict(columns)
        self.format: dict[str, str | None] = {"type": None}

    @property
    def column_names(self) -> list[str]:
        return list(self.data)

    def select_columns(self, names: list[str]) -> Table:
        return Table({name: self.data[name] for name in names}, self.columns)

    def __len__(self) -> int:
        return len(next(iter(self.data.values())))

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.columns.append(([index], list(self.data)))
        return {name: column[index] for name, column in self.data.items()}

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        assert all(type(index) is int for index in indices)
        self.columns.append((indices, list(self.data)))
        return [{name: column[index] for name, column in self.data.items()} for index in indices]


def made(hints: str = "") -> Any:
    return schedule(IMAGES_AND_LABELS.format(hints=hints), declarations=DECLARATIONS)


def run(sources: Mapping[str, object], hints: str = "", **functions: Any) -> list[dict[str, Any]]:
    plan = made(hints)
    with PhaseBatches(plan, "step", sources, {"decode": decode, **functions}) as feed:
        names = {b.value: b.name for b in plan.phase("step").outputs}
        return [{names[ref]: a for ref, a in batch.values.items()} for batch in feed]


def seen(batches: list[dict[str, Any]], name: str = "given") -> list[int]:
    return [int(n) for batch in batches for n in batch[name]]


def test_columns_of_a_tuple_fetch_each_record_once() -> None:
    pairs = Pairs(40)
    results = run({"images": commplan.column(pairs, 0), "labels": commplan.column(pairs, 1)}, "{ cores = 2 }")
    assert sorted(seen(results)) == list(range(40))
    assert seen(results) == seen(results, "first"), "rows of both columns belong together"
    assert sorted(pairs.fetched) == list(range(40))


def test_columns_read_in_other_orders_are_right_too() -> None:
    pairs = Pairs(24)
    text = IMAGES_AND_LABELS.replace("exactly_once seed 3 {hints}", "exactly_once seed 4")
    plan = schedule(text, declarations=DECLARATIONS)
    sources = {"images": commplan.column(pairs, 0), "labels": commplan.column(pairs, 1)}
    with PhaseBatches(plan, "step", sources, {"decode": decode}) as feed:
        labels = [int(n) for batch in feed for n in batch.values["given.0"]]
    assert sorted(labels) == list(range(24))
    assert sorted(set(pairs.fetched)) == list(range(24)) and len(pairs.fetched) <= 48


def test_a_record_that_fails_is_named_and_skipped() -> None:
    pairs = Pairs(16, broken=(5,))
    sources = {"images": commplan.column(pairs, 0), "labels": [0] * 16}
    with pytest.raises(CommplanError) as error:
        run(sources)
    assert code(error) == "CP0904" and "record 5 of source `images`" in str(error.value)
    results = run(sources, "{ on_error = skip }")
    assert 5 not in seen(results, "first")


def test_named_columns_are_chosen_by_the_source_s_name() -> None:
    table = Table({"images": images(16), "labels": list(range(16))})
    results = run({"images": table, "labels": table})
    assert sorted(seen(results)) == list(range(16)) and seen(results) == seen(results, "first")
    assert {tuple(names) for _, names in table.columns} == {("images",), ("labels",)}, "nothing else is read"
    assert max(len(indices) for indices, _ in table.columns) > 1, "blocks are fetched at once"
    read = sorted(index for indices, names in table.columns if names == ["images"] for index in indices)
    assert read == list(range(16))


def test_a_data_set_with_a_transform_is_fetched_whole_and_once() -> None:
    table = Table({"images": images(16), "labels": list(range(16)), "more": [0] * 16})
    table.format = {"type": "custom"}
    results = run({"images": table, "labels": commplan.column(table, "labels")})
    assert seen(results) == seen(results, "first")
    assert sorted(index for indices, _ in table.columns for index in indices) == list(range(16))


def test_batched_access_that_fails_names_its_record() -> None:
    class Broken(Table):
        def __getitem__(self, index: int) -> dict[str, Any]:
            if index == 3:
                raise OSError("gone")
            return super().__getitem__(index)

        def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
            if 3 in indices:
                raise OSError("one of them is gone")
            return super().__getitems__(indices)

        def select_columns(self, names: list[str]) -> Table:
            return self

    table = Broken({"images": images(16)})
    with pytest.raises(CommplanError) as error:
        run({"images": table, "labels": list(range(16))})
    assert "record 3 of source `images` raised OSError: gone" in str(error.value)
    results = run({"images": table, "labels": list(range(16))}, "{ on_error = skip }")
    assert sorted({*seen(results, "first")}) == [n for n in range(16) if n != 3]


@pytest.mark.parametrize("wrong", ["raises", "gives one too few"])
def test_batched_access_that_always_fails_is_said(wrong: str) -> None:
    class Broken(Table):
        def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
            if wrong == "raises":
                raise OSError("no such thing")
            return super().__getitems__(indices[1:])

        def select_columns(self, names: list[str]) -> Table:
            return self

    table = Broken({"images": images(16)})
    with pytest.warns(RuntimeWarning) as caught_warnings:
        results = run({"images": table, "labels": list(range(16))})
    (text,) = (str(each.message) for each in caught_warnings if each.category is RuntimeWarning)
    assert re.match("`__getitems__` of source `images` fails, .* fetched one by one: ", text)
    assert sorted(seen(results, "first")) == list(range(16))


def test_columns_that_are_not_there() -> None:
    table = Table({"image": images(8), "label": [0] * 8})
    with pytest.raises(CommplanError) as error:
        commplan.column(table, "labels")
    assert code(error) == "CP0950" and "image, label" in str(error.value)
    with pytest.raises(CommplanError) as error:
        run({"images": table, "labels": [0] * 8})
    assert code(error) == "CP0950" and "commplan.column(dataset, 'image')" in str(error.value)
    with pytest.raises(CommplanError) as error:
        run({"images": commplan.column(Pairs(8), 2), "labels": [0] * 8})
    assert code(error) == "CP0905" and "no column 2 in it: a tuple of 2: bytes, int" in str(error.value)


def test_nested_columns_and_pickles() -> None:
    rows = [
        {"image": {"bytes": record, "path": None}, "objects": {"label": [n]}}
        for n, record in enumerate(images(8))
    ]
    label = commplan.column(rows, "objects", "label", 0)
    results = run({"images": commplan.column(rows, "image"), "labels": label})
    assert seen(results) == seen(results, "first")
    again = pickle.loads(pickle.dumps(commplan.serial(label)))
    assert again[3] == 3 and len(again) == 8 and "label" in repr(again)
    with pytest.raises(CommplanError) as error:
        run({"images": commplan.column(rows, "image"), "labels": commplan.column(rows, "objects", "boxes")})
    assert "no column 'boxes' in `['objects']` of it: a record with columns 'label'" in str(error.value)


class Overlapping:
    """Notices two callers at a time."""

    def __init__(self) -> None:
        self.inside, self.most, self.calls = 0, 0, 0

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> bytes:
        self.inside += 1
        self.most = max(self.most, self.inside)
        time.sleep(0.002)
        self.calls += 1
        self.inside -= 1
        return images(32)[index]


def test_a_serial_data_set_is_called_by_one_thread_at_a_time() -> None:
    free, bound = Overlapping(), Overlapping()
    run({"images": free, "labels": [0] * 32}, "{ cores = 4 }")
    sources = {"images": commplan.serial(bound), "labels": [0] * 32}
    run(sources, "{ cores = 4 }")
    assert free.most > 1 and bound.most == 1
    assert commplan.serial(bound)._lock is commplan.serial(bound)._lock


class Tensor:
    """The methods of a torch tensor that are used."""

    def __init__(self, array: np.ndarray[Any, Any], device: str = "cpu") -> None:
        self.array, self.device, self.dtype, self.shape = array, device, f"torch.{array.dtype}", array.shape

    def detach(self) -> Tensor:
        return Tensor(self.array, self.device)

    def cpu(self) -> Tensor:
        return Tensor(self.array)

    def numpy(self) -> np.ndarray[Any, Any]:
        assert self.device == "cpu"
        return self.array

    def __array__(self) -> None:
        raise RuntimeError("call detach() first")


def element(kind: str) -> Any:
    return (
        schedule(
            "raw = load images batch 1 visit exactly_once seed 1\noutput raw",
            declarations=f"source images : {kind}",
        )
        .sources[0]
        .type
    )


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("u8[2]", Tensor(np.array([1, 2], np.uint8)), [1, 2]),
        ("f32[2]", Tensor(np.array([1, 2], np.float32), "cuda:0"), [1, 2]),
        ("i32[2]", [3, 4], [3, 4]),
        ("i32[2, 2]", [[3, 4], [5, -6]], [[3, 4], [5, -6]]),
        ("f32[2]", [3, 4.5], [3, 4.5]),
        ("bf16[2]", [3, 4.5], [3, 4.5]),
        ("bool[2]", [True, False], [True, False]),
        ("i32", {"images": 4, "other": 5}, 4),
        ("i32", {"other": 5}, 5),
        ("i32", (5,), 5),
        ("i32", ({"x": np.int32(5)},), 5),
        ("i32[2]", np.array([3, -4], ">i4"), [3, -4]),  # whatever order the bytes are in
        ("i32[2]", Tensor(np.array([3, -4], ">i4")), [3, -4]),
        ("f32", np.array(2.5, ">f4")[()], 2.5),
        ("bool[2]", np.array([True, False]), [True, False]),
    ],
)
def test_what_stands_for_an_array(kind: str, value: object, expected: object) -> None:
    program = schedule(
        "raw = load images batch 2 visit exactly_once seed 1\noutput raw",
        declarations=f"source images : {kind}",
    )
    actual = epoch(program, [value, value])[0]["raw"]
    assert actual.tolist() == [expected, expected]


@pytest.mark.parametrize(
    ("kind", "value", "actual"),
    [
        ("u8[2]", [3, 256], "a list of 2: int, int, from 3 to 256"),
        ("u8[2]", [3, 2.5], "a list of 2: int, float"),
        ("u8[2]", [3, "x"], "a list of 2: int, str"),
        ("u8[2, 2]", [[3], [4, 5]], "of uneven lengths"),
        ("bool[2]", [1, 0], "a list of 2: int, int"),
        ("u8[2]", np.array([True, False]), "bool[2]"),
        ("i32[2]", np.array([1, 2], ">i8"), "i64[2], big-endian"),
        (
            "i32[2]",
            np.array([1, 2]),
            "numbers are not converted: `.astype('int32')`, or write `i64` in the plan",
        ),
        ("i32[2]", Tensor(np.array([1, 2])), "`.astype('int32')`"),
        ("i32", np.int64(2**40), "i32 holds -2147483648 to 2147483647"),
        ("i32[2]", [1, 2**40], "i32 holds -2147483648 to 2147483647"),
        ("i32[2]", [1.5, 2], "floats are not cut to i32"),
        ("i32", 1.5, "floats are not cut to i32"),
        ("i32[6]", [1, 2, 3], "every record has the shape that the plan writes"),
        ("i32[2]", b"12345678", "`np.frombuffer(record, np.int32)`"),
        (
            "bytes",
            np.arange(3, dtype=np.uint8),
            "`record.tobytes()`; if all records have one shape, write `u8[3]`",
        ),
        ("bytes", [1, 2], "`np.array(record, dtype).tobytes()`"),
        ("bytes", {"text": "words"}, "text is given as bytes: `text.encode()`"),
        ("bytes", np.str_("words"), "found: a str\n  note: text is given as bytes"),
        ("u8[3]", Tensor(np.array([1, 2], np.uint8)), "u8[2]"),
        ("i32", "five", "a str"),
        ("i32", {"a": 1, "b": 2}, "commplan.column(dataset, 'a')"),
        ("i32", (1, 2), "commplan.column(dataset, 0)"),
        ("i32", None, "found: None"),
        ("bytes", ("photo.jpg",), "commplan.paths(names)"),
        ("bytes", {"bytes": None, "path": None}, "neither bytes nor a path"),
    ],
)
def test_what_stands_for_nothing(kind: str, value: object, actual: str) -> None:
    body = "raw = load images batch 1 visit exactly_once seed 1\n"
    body += "x = map f(raw)\noutput x" if kind == "bytes" else "output raw"
    program = schedule(body, declarations=f"source images : {kind}\nfn f(bytes) -> u8 on host")
    with (
        pytest.raises(CommplanError) as error,
        PhaseBatches(
            program, "step", {"images": np.array([value]) if isinstance(value, str) else [value]}, {"f": len}
        ) as feed,
    ):
        next(feed)
    assert code(error) == "CP0905" and actual in str(error.value)


def test_undecoded_images_are_their_files(tmp_path: Any) -> None:
    records = images(8)
    (tmp_path / "5").write_bytes(records[5])
    rows = [{"bytes": record, "path": "x"} for record in records]
    rows[5] = {"bytes": None, "path": str(tmp_path / "5")}  # type: ignore[dict-item]
    results = run({"images": rows, "labels": list(range(8))})
    assert seen(results) == seen(results, "first")


def test_pil_images_are_their_pixels() -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    plan = schedule(
        "raw = load images batch 2 visit exactly_once seed 1\noutput raw",
        declarations="source images : u8[2, 3, 3]",
    )
    results = epoch(plan, [image.fromarray(pixels)] * 2)
    assert np.array_equal(results[0]["raw"][1], pixels)
    with pytest.raises(CommplanError) as error:
        epoch(plan, [image.fromarray(pixels).convert("CMYK")] * 2)
    assert "a PIL image of mode CMYK, 2 x 3" in str(error.value)
    file = io.BytesIO()
    image.fromarray(pixels).save(file, "PNG")
    with pytest.raises(CommplanError) as error:
        run({"images": [image.open(file)] * 8, "labels": [0] * 8})
    assert code(error) == "CP0905" and "Image(decode=False)" in str(error.value)


def test_rows_forget_what_all_columns_had() -> None:
    pairs = Pairs(100)
    rows = adapters.Rows(pairs, 2)
    assert rows.several([1, 2, 3]) == [
        pairs.records[1:4][i] and (pairs.records[i + 1], i + 1) for i in range(3)
    ]
    assert rows.one(2)[1] == 2 and pairs.fetched == [1, 2, 3]
    assert rows.one(2)[1] == 2 and pairs.fetched == [1, 2, 3, 2], "both columns had it"
    for index in range(100):
        rows.one(index)
    assert len(rows._cache()) <= 64, "what is never asked for again is let go"


@pytest.mark.parametrize(
    ("kind", "source", "words"),
    [
        (
            "bytes",
            ["a", "bc"],
            "there is no file 'a'\n  note: a list of str is taken for paths of files: text is",
        ),
        ("bytes", "abc", "there is no folder 'abc'\n  note: text is given as bytes in a list"),
        ("bytes", ["a" * 300], f"there is no file '{'a' * 80}'...\n"),
        ("bytes", "a" * 300, f"there is no folder '{'a' * 80}'...\n"),
        ("bytes", __file__, "is a file: give `commplan.paths(["),
        (
            "bytes",
            b"abc",
            "is of type bytes, which does not return records by index\n  note: these are the bytes",
        ),
        ("i32", "abc", "a str names a folder, whose files are `bytes`"),
        (
            "bytes",
            {0: b"a", 1: b"b"},
            "with the keys 0, 1: give its records as a list, `list(records.values())`",
        ),
        ("bytes", {"train": [b"a"]}, "it is a mapping of 'train': give one of its values"),
    ],
)
def test_sources_that_give_no_records_say_what_to_give_instead(kind: str, source: object, words: str) -> None:
    body = "raw = load images batch 1 visit exactly_once seed 1\nx = map f(raw)\noutput x"
    program = schedule(body, declarations=f"source images : {kind}\nfn f({kind}) -> u8 on host")
    with pytest.raises(CommplanError) as error:
        bind_sources(program, {"images": source})
    assert words in str(error.value)


def test_a_later_text_that_is_no_file_says_so_too(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    body = "raw = load images batch 2 visit exactly_once seed 1\nx = map f(raw)\noutput x"
    program = schedule(body, declarations="source images : bytes\nfn f(bytes) -> u8 on host")
    files = [str(tmp_path / "a"), str(tmp_path / "b")]
    with (
        pytest.raises(CommplanError) as error,
        PhaseBatches(program, "step", {"images": files}, {"f": len}) as feed,
    ):
        next(feed)
    assert code(error) == "CP0904" and "a list of str is taken for paths of files" in str(error.value)


def test_one_path_is_no_list_of_paths() -> None:
    with pytest.raises(CommplanError) as error:
        commplan.paths("photo.jpg")
    assert code(error) == "CP0901" and "write `commplan.paths(['photo.jpg'])`" in str(error.value)
