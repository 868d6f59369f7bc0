"""The statements of docs/reductions.md, each checked on two ranks: of a mesh or under MPI."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from commplan.diagnostics import CommplanError
from commplan.ir.codec import Codec
from commplan.ir.types import DType

from .oracle.codec import from_bytes, to_bytes
from .reductions import FLOATS, TYPES, Case, run

Array = np.ndarray[Any, Any]
VIA = ("", "via native", "via ring", "via recursive_doubling")
WAYS = (
    "",
    "accumulate = f16",
    "accumulate = f32",
    "wire = f16",
    "wire = bf16",
    "wire = f32, accumulate = f32",
)
NAN, INF = np.nan, np.inf


def reduced(
    where: Any, op: str, dtype: str, *ranks: Sequence[float], how: str = "", options: str = "",
    weights: Sequence[float] | None = None, weight: str = "i32",
) -> Array:  # fmt: skip
    """`op` of one array for each rank, the first of them with the first of `weights`.

    Short arrays are padded to one length: statements about one reduction then share its compiled step.
    """
    pairs = tuple(tuple(each.split(" = ")) for each in options.split(", ") if each)
    array = None if weights is None else np.array(weights, TYPES[weight])
    rows = np.array(ranks, TYPES[dtype])
    count = rows.shape[1]
    leaves = {"x": np.pad(rows, ((0, 0), (0, max(0, 4 - count))))}
    return run(Case("", (1, 2), op, leaves, how, pairs, array), where)["x"][:count]  # type: ignore[arg-type]


def weighted(where: Any, dtype: str, first: Sequence[float], second: Sequence[float], **how: Any) -> Array:
    return reduced(where, "mean(weight = n)", dtype, first, second, **how)


def a_sum_of_integers_wraps_around_in_its_own_type(where: Any) -> None:
    for how in VIA:
        assert reduced(where, "sum", "i32", [2**31 - 1], [1], how=how).tolist() == [-(2**31)]
        assert reduced(where, "sum", "u8", [200], [100], how=how).tolist() == [44]


def a_sum_of_f16_beyond_65504_is_infinite(where: Any) -> None:
    for options in ("", "wire = f32, accumulate = f32"):
        assert reduced(where, "sum", "f16", [40000], [40000], options=options).tolist() == [INF]


def a_sum_with_nan_or_with_both_infinities_is_nan(where: Any) -> None:
    for how in VIA:
        assert np.isnan(reduced(where, "sum", "f32", [NAN, INF], [1, -INF], how=how)).all()


def a_mean_of_f16_is_finite_where_the_true_mean_is(where: Any) -> None:
    for how, options in [*((via, "") for via in VIA), *(("", way) for way in WAYS)]:
        mean = reduced(where, "mean", "f16", [60000], [60000], how=how, options=options)
        np.testing.assert_allclose(mean.astype("f8"), [60000], rtol=2**-8)


def integers_of_a_mean_are_their_maximum_or_those_of_the_first_rank(where: Any) -> None:
    for integers, steps in (("max", [7, 2]), ("first", [3, 2])):
        leaves = {"step": np.array([[3, 2], [7, -1]], "i4"), "w": np.array([[1.0], [2.0]], "f2")}
        for op, weight in (("mean", None), ("mean(weight = n)", np.array([1, 3], "i4"))):
            results = run(Case("", (1, 2), op, leaves, "", (("integers", integers),), weight), where)
            assert results["step"].tolist() == steps
            assert results["w"].tolist() == [1.5 if weight is None else 1.75]


def integer_weights_do_not_wrap_around(where: Any) -> None:
    for weights, weight in (([2**31 - 1, 2**31 - 1], "i32"), ([200, 200], "u8")):
        for dtype in FLOATS:
            assert weighted(where, dtype, [1, 0], [3, 4], weights=weights, weight=weight).tolist() == [2, 2]


def weights_of_16_bits_are_added_in_f32(where: Any) -> None:
    for weight in ("f16", "bf16"):
        mean = weighted(where, "f32", [1, 0], [3, 4], weights=[60000, 60000], weight=weight)
        assert mean.tolist() == [2, 2]


def a_weighted_mean_of_f16_is_finite_whatever_the_weights(where: Any) -> None:
    for how, options in [*((via, "") for via in VIA), *(("", way) for way in WAYS)]:
        for weight in ("i32", "f32"):
            keywords: dict[str, Any] = {"how": how, "options": options, "weight": weight}
            mean = weighted(where, "f16", [60000], [60000], weights=[2**30, 2**31 - 1], **keywords)
            np.testing.assert_allclose(mean.astype("f8"), [60000], rtol=2**-7)


def a_weighted_mean_of_16_bits_is_rounded_once(where: Any) -> None:
    random = np.random.default_rng(0)
    for dtype in ("bf16", "f16"):
        for how in VIA:
            terms = random.normal(size=(2, 200)).astype(TYPES[dtype])
            exact = (terms.astype("f8") * [[3], [5]]).sum(0) / 8
            mean = weighted(where, dtype, *terms.astype("f8"), weights=[3, 5], how=how)
            np.testing.assert_array_equal(mean, exact.astype(TYPES[dtype]))


def a_term_of_weight_zero_is_left_out_even_if_it_is_nan(where: Any) -> None:
    for dtype in FLOATS:
        for how in VIA:
            mean = weighted(where, dtype, [NAN, INF, -INF], [1, 2, 3], weights=[0, 5], how=how)
            assert mean.tolist() == [1, 2, 3]


def a_mean_without_any_weight_is_zero(where: Any) -> None:
    for dtype in FLOATS:
        assert weighted(where, dtype, [NAN, 1], [2, INF], weights=[0, 0]).tolist() == [0, 0]


def a_weight_that_is_nan_makes_the_mean_nan(where: Any) -> None:
    assert np.isnan(weighted(where, "f32", [1], [2], weights=[NAN, 1], weight="f32")).all()


def a_maximum_or_minimum_with_nan_is_nan(where: Any) -> None:
    for dtype in FLOATS:
        for op in ("max", "min"):
            for how in VIA:
                result = reduced(where, op, dtype, [NAN, 1, NAN, NAN], [1, NAN, NAN, INF], how=how)
                assert np.isnan(result.astype("f4")).all(), (dtype, op, how)


def of_two_zeros_the_negative_one_is_less(where: Any) -> None:
    for dtype in FLOATS:
        for op, negative in (("max", [False, False, True]), ("min", [True, True, True])):
            for how in VIA:
                result = reduced(where, op, dtype, [0.0, -0.0, -0.0], [-0.0, 0.0, -0.0], how=how)
                assert np.signbit(result.astype("f4")).tolist() == negative, (dtype, op, how)


def a_maximum_or_minimum_keeps_denormals_and_infinities(where: Any) -> None:
    for dtype, float_type in FLOATS.items():
        least = float(ml_dtypes.finfo(float_type).smallest_subnormal)
        for how in VIA:
            rows = ([3 * least, INF, -least], [least, 0, 0])
            most = reduced(where, "max", dtype, *rows, how=how).astype("f8")
            assert most.tolist() == [3 * least, INF, 0], (dtype, how)
            fewest = reduced(where, "min", dtype, *rows, how=how).astype("f8")
            assert fewest.tolist() == [least, 0, -least], (dtype, how)


def a_maximum_of_truth_values_is_or_and_a_minimum_is_and(where: Any) -> None:
    assert reduced(where, "max", "bool", [0, 0, 1], [0, 1, 1]).tolist() == [False, True, True]
    assert reduced(where, "min", "bool", [0, 0, 1], [0, 1, 1]).tolist() == [False, False, True]


def a_zero_sum_is_zero_of_either_sign_and_denormals_may_count_as_zero(where: Any) -> None:
    for how in VIA:
        assert reduced(where, "sum", "f32", [-0.0, 1, 1e-40], [-0.0, -1, 0], how=how)[:2].tolist() == [0, 0]
        assert reduced(where, "sum", "f32", [1e-40], [0], how=how)[0] in (0, np.float32(1e-40))
        assert reduced(where, "sum", "f16", [3e-7], [3e-7], how=how).tolist() == [np.float16(6e-7)]


def a_type_of_64_bits_has_to_be_enabled(where: Any) -> None:
    for op, weights in (("sum", None), ("mean(weight = n)", [1, 3])):
        for options in ("wire = f64", "accumulate = f64"):
            with pytest.raises(CommplanError, match=r"CP0805.*converts? to f64"):
                reduced(where, op, "f32", [2**24], [1], options=options, weights=weights)


def a_sum_in_blocks_is_rounded_before_and_after_the_addition(where: Any) -> None:
    for codec in (Codec("int8", 8), Codec("int4", 16), Codec("f8e4m3", 8)):
        for op, dtype in (("sum", "f32"), ("mean", "f16"), ("mean", "bf16")):
            rows = np.random.default_rng(0).standard_normal((2, 37)).astype(TYPES[dtype])
            case = Case("", (1, 2), op, {"x": rows}, "", (("wire", str(codec)),))
            result, target = run(case, where)["x"], _sum_in_blocks(rows, codec, DType(dtype), op == "mean")
            assert result.tobytes() == target.tobytes(), f"{codec} {op} {dtype}"


def _sum_in_blocks(rows: Array, codec: Codec, dtype: DType, is_mean: bool) -> Array:
    """The sum or mean of two rows: padded to two shards of whole blocks, quantized, added and quantized."""
    size = -(-rows.shape[1] // (2 * codec.block)) * codec.block
    shards = np.pad(rows, ((0, 0), (0, 2 * size - rows.shape[1]))).reshape(2, 2, size)
    received = [[from_bytes(to_bytes(x, codec), codec, size, DType.F32) for x in rank] for rank in shards]
    totals = [(x + y) / np.float32(2 if is_mean else 1) for x, y in zip(*received, strict=True)]
    whole = [from_bytes(to_bytes(total, codec), codec, size, dtype) for total in totals]
    return np.concatenate(whole)[: rows.shape[1]]


def a_block_with_nan_or_infinity_is_nan_and_others_are_not(where: Any) -> None:
    for special in (NAN, INF, -INF):
        rows = np.full((2, 32), 127, np.float32)  # sent with the scale 1
        rows[1, 11] = special
        result = run(Case("", (1, 2), "sum", {"x": rows}, "", (("wire", "int8(block = 8)"),)), where)["x"]
        assert np.isnan(result[8:16]).all() and (np.delete(result, range(8, 16)) == 254).all()


def finite_values_in_blocks_stay_finite_and_tiny_ones_are_zero(where: Any) -> None:
    for dtype, largest in (("f16", 65504.0), ("f32", 3.4e38)):
        rows = np.full((2, 16), 0, TYPES[dtype])
        rows[0, :8], rows[1, 8:] = largest, -largest
        result = run(Case("", (1, 2), "sum", {"x": rows}, "", (("wire", "int4(block = 8)"),)), where)["x"]
        assert np.isfinite(result.astype(np.float64)).all()
        assert (np.abs(result.astype(np.float64)) > 0.9 * largest).all()
    rows = np.full((2, 16), 1e-31, np.float32)
    assert (
        run(Case("", (1, 2), "sum", {"x": rows}, "", (("wire", "int8(block = 8)"),)), where)["x"] == 0
    ).all()


STATEMENTS: tuple[Callable[[Any], None], ...] = (
    a_sum_of_integers_wraps_around_in_its_own_type,
    a_sum_of_f16_beyond_65504_is_infinite,
    a_sum_with_nan_or_with_both_infinities_is_nan,
    a_mean_of_f16_is_finite_where_the_true_mean_is,
    integers_of_a_mean_are_their_maximum_or_those_of_the_first_rank,
    integer_weights_do_not_wrap_around,
    weights_of_16_bits_are_added_in_f32,
    a_weighted_mean_of_f16_is_finite_whatever_the_weights,
    a_weighted_mean_of_16_bits_is_rounded_once,
    a_term_of_weight_zero_is_left_out_even_if_it_is_nan,
    a_mean_without_any_weight_is_zero,
    a_weight_that_is_nan_makes_the_mean_nan,
    a_maximum_or_minimum_with_nan_is_nan,
    of_two_zeros_the_negative_one_is_less,
    a_maximum_or_minimum_keeps_denormals_and_infinities,
    a_maximum_of_truth_values_is_or_and_a_minimum_is_and,
    a_zero_sum_is_zero_of_either_sign_and_denormals_may_count_as_zero,
    a_type_of_64_bits_has_to_be_enabled,
    a_sum_in_blocks_is_rounded_before_and_after_the_addition,
    a_block_with_nan_or_infinity_is_nan_and_others_are_not,
    finite_values_in_blocks_stay_finite_and_tiny_ones_are_zero,
)


def check_all(where: Any) -> None:
    for statement in STATEMENTS:
        statement(where)
