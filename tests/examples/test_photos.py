"""The records of the examples: the same for a seed, decodable, held-out cells apart from the others."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import photos


def test_records_depend_on_the_seed_alone():
    assert list(photos.Crops(16, seed=3)) == list(photos.Crops(16, seed=3))
    assert list(photos.Crops(16, seed=3)) != list(photos.Crops(16, seed=4))


def test_records_hold_every_photograph_equally_often():
    labels = [int(photos.decode(record)[1]) for record in photos.Crops(4 * photos.CLASSES)]
    assert sorted(labels) == sorted(list(range(photos.CLASSES)) * 4)


def test_a_record_decodes_to_what_the_plan_declares():
    pixels, label = photos.decode(photos.Crops(1)[0])
    assert (pixels.shape, pixels.dtype, label.dtype) == ((224, 224, 3), np.uint8, np.int32)


def test_augmenting_keeps_every_pixel():
    pixels, _ = photos.decode(photos.Crops(1)[0])
    variants = {photos.augment(pixels, np.random.default_rng(seed)).tobytes() for seed in range(40)}
    assert len(variants) == 8
    augmented = photos.augment(pixels, np.random.default_rng(0))
    assert np.array_equal(np.sort(augmented, axis=None), np.sort(pixels, axis=None))


@pytest.mark.parametrize("label", range(photos.CLASSES))
def test_no_pixel_is_in_both_sets(label: int):
    photograph = photos._photograph(*photos.PHOTOGRAPHS[label])
    # A picture whose pixels are their coordinates: a crop shows its position.
    height, width = photograph.shape[:2]
    rng = np.random.default_rng(label)
    used = {False: np.zeros((height, width), bool), True: np.zeros((height, width), bool)}
    for held_out, mask in used.items():
        for _ in range(200):
            crop = photos._crop(photograph, rng, held_out)
            start = (crop.__array_interface__["data"][0] - photograph.__array_interface__["data"][0]) // 3
            y, x = divmod(start, width)
            mask[y : y + crop.shape[0], x : x + crop.shape[1]] = True
    assert used[True].any() and used[False].any()
    assert not (used[True] & used[False]).any()
