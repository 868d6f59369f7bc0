"""Folders with sub-folders: files in one order everywhere, and a class per sub-folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from batch_feed import code

import commplan
from commplan.diagnostics import CommplanError


def make(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())


def test_sub_folders_are_read_in_the_order_of_their_paths(tmp_path: Path) -> None:
    make(tmp_path, "b/2.jpg", "a/x/1.jpg", "a/2.jpg", "B/1.jpg", "a.b/1.jpg", ".git/x", "a/.hidden")
    found = commplan.folder(tmp_path, recursive=True)
    names = [found[number].decode() for number in range(len(found))]
    assert names == ["B/1.jpg", "a/2.jpg", "a/x/1.jpg", "a.b/1.jpg", "b/2.jpg"]
    assert found.classes == ("B", "a", "a.b", "b")
    assert found.labels.tolist() == [0, 1, 1, 2, 3]
    assert found.labels.dtype == "int32"


def test_links_that_lead_back_are_not_followed_for_ever(tmp_path: Path) -> None:
    make(tmp_path, "data/a/1.jpg", "other/2.jpg")
    (tmp_path / "data" / "a" / "back").symlink_to(tmp_path / "data")
    (tmp_path / "data" / "b").symlink_to(tmp_path / "other")
    found = commplan.folder(tmp_path / "data", recursive=True)
    assert [found[number] for number in range(len(found))] == [b"data/a/1.jpg", b"other/2.jpg"]
    assert found.classes == ("a", "b")


def test_files_beside_the_classes_have_none(tmp_path: Path) -> None:
    make(tmp_path, "a/1.jpg", "loose.jpg")
    found = commplan.folder(tmp_path, recursive=True)
    assert len(found) == 2
    with pytest.raises(CommplanError) as error:
        _ = found.labels
    assert code(error) == "CP0901" and "'loose.jpg' lies in no sub-folder" in str(error.value)


def test_a_folder_of_folders_says_how_to_read_them(tmp_path: Path) -> None:
    make(tmp_path, "a/1.jpg")
    with pytest.raises(CommplanError) as error:
        commplan.folder(tmp_path)
    assert code(error) == "CP0901" and "recursive=True" in str(error.value)
    (tmp_path / "a" / "1.jpg").unlink()
    with pytest.raises(CommplanError) as error:
        commplan.folder(tmp_path, recursive=True)
    assert code(error) == "CP0901" and "recursive=True" not in str(error.value)
