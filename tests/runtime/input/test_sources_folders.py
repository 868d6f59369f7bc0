"""Folders with sub-folders: files in one order everywhere, and a class per sub-folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batch_feed import code
from input_plans import schedule

import commplan
from commplan.diagnostics import CommplanError
from commplan.runtime.input.sources.files import bind_sources


def make(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())


def test_sub_folders_are_read_in_the_order_of_their_paths(tmp_path: Path) -> None:
    make(tmp_path, "b/2.jpg", "a/x/1.jpg", "a/2.jpg", "B/1.jpg", "a.b/1.jpg", ".git/x", "a/.hidden")
    source = commplan.folder(tmp_path, recursive=True)
    names = [source[number].decode() for number in range(len(source))]
    assert names == ["B/1.jpg", "a/2.jpg", "a/x/1.jpg", "a.b/1.jpg", "b/2.jpg"]
    assert source.classes == ("B", "a", "a.b", "b")
    assert source.labels.tolist() == [0, 1, 1, 2, 3]
    assert source.labels.dtype == "int32"


def test_links_that_lead_back_are_not_followed_for_ever(tmp_path: Path) -> None:
    make(tmp_path, "data/a/1.jpg", "other/2.jpg")
    (tmp_path / "data" / "a" / "back").symlink_to(tmp_path / "data")
    (tmp_path / "data" / "b").symlink_to(tmp_path / "other")
    source = commplan.folder(tmp_path / "data", recursive=True)
    assert [source[number] for number in range(len(source))] == [b"data/a/1.jpg", b"other/2.jpg"]
    assert source.classes == ("a", "b")


def test_files_beside_the_classes_have_none(tmp_path: Path) -> None:
    make(tmp_path, "a/1.jpg", "loose.jpg")
    source = commplan.folder(tmp_path, recursive=True)
    assert len(source) == 2
    with pytest.raises(CommplanError) as error:
        _ = source.labels
    assert code(error) == "CP0901" and "'loose.jpg' is in no sub-folder" in str(error.value)


def test_a_folder_of_folders_says_how_to_read_them(tmp_path: Path) -> None:
    make(tmp_path, "a/1.jpg")
    with pytest.raises(CommplanError) as error:
        commplan.folder(tmp_path)
    assert code(error) == "CP0901" and "recursive=True" in str(error.value)
    (tmp_path / "a" / "1.jpg").unlink()
    with pytest.raises(CommplanError) as error:
        commplan.folder(tmp_path, recursive=True)
    assert code(error) == "CP0901" and "recursive=True" not in str(error.value)


def test_an_empty_class_keeps_its_number(tmp_path: Path) -> None:
    make(tmp_path, "bird/.gitkeep", "cat/1.jpg", "dog/1.jpg", ".cache/1.jpg")
    source = commplan.folder(tmp_path, recursive=True)
    assert source.classes == ("bird", "cat", "dog") and source.labels.tolist() == [1, 2]


def test_a_list_of_classes_fixes_their_numbers(tmp_path: Path) -> None:
    make(tmp_path, "cat/1.jpg", "dog/1.jpg")
    source = commplan.folder(tmp_path, recursive=True, classes=("dog", "bird", "cat"))
    assert source.classes == ("dog", "bird", "cat") and source.labels.tolist() == [2, 0]


@pytest.mark.parametrize(
    ("classes", "recursive", "words"),
    [
        (["cat", "dogs"], True, "none of the classes: `dog`\n  note: did you mean `dogs`?"),
        (["cat", "dog", "cat"], True, "`cat` more than once"),
        ("cat", True, "a list of names was expected"),
        ([], True, "a list of names was expected"),
        (["cat", "dog"], False, "pass recursive=True"),
    ],
)
def test_classes_that_a_folder_cannot_have(tmp_path: Path, classes: Any, recursive: bool, words: str) -> None:
    make(tmp_path, "cat/1.jpg", "dog/1.jpg")
    with pytest.raises(CommplanError) as error:
        commplan.folder(tmp_path, recursive, classes)
    assert code(error) == "CP0956" and words in str(error.value)


def test_folders_of_one_program_have_the_same_classes(tmp_path: Path) -> None:
    make(tmp_path, "train/bird/1.jpg", "train/cat/1.jpg", "val/cat/1.jpg")
    train, val = (commplan.folder(tmp_path / part, recursive=True) for part in ("train", "val"))
    program = schedule(
        "x = load labels batch 1 visit at_least_once seed 1\n"
        "y = load held batch 1 visit at_least_once seed 1\n"
        "output x, y",
        declarations="source labels : i32\nsource held : i32",
    )
    with pytest.raises(CommplanError) as error:
        bind_sources(program, {"labels": train.labels, "held": val.labels[:1]})
    assert code(error) == "CP0956"
    assert [note.text for note in error.value.diagnostics[0].notes][:2] == [
        "`bird` is a class of `labels` alone", "`cat` is class 1 of `labels` and class 0 of `held`",
    ]  # fmt: skip
    alike = commplan.folder(tmp_path / "val", recursive=True, classes=train.classes)
    assert bind_sources(program, {"labels": train.labels, "held": alike.labels})["held"][0] == 1
    assert bind_sources(program, {"labels": train.labels, "held": np.asarray(val.labels)})["held"][0] == 0
