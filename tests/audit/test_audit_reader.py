"""The reader of HLO text: shapes, groups in both forms, asynchronous pairs, loops, products and moves."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commplan.lowering.audit import CompiledStep, HloError, audit_text
from commplan.lowering.hlo.reader import HloInstruction, Tensor, read_groups, read_module

STEP = (Path(__file__).parent / "step.hlo").read_text()


@pytest.fixture(scope="module")
def step() -> CompiledStep:
    return audit_text(STEP)


def test_collectives_come_in_the_order_of_issue(step: CompiledStep) -> None:
    assert [collective.kind for collective in step.collectives] == [
        "all_gather",
        "all_reduce",
        "reduce_scatter",
        "permute",
    ]
    assert [collective.channel for collective in step.collectives] == [1, 2, 4, 5]
    assert [collective.op for collective in step.collectives] == [None, "sum", "sum", None]


def test_groups_are_expanded_from_lists_and_iotas(step: CompiledStep) -> None:
    gather, reduce, scatter, permute = step.collectives
    assert gather.groups == (tuple(range(8)),)
    assert reduce.groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert scatter.groups == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert permute.groups == ((0, 1), (1, 0))


def test_sizes_are_those_of_one_rank(step: CompiledStep) -> None:
    gather, reduce, scatter, _ = step.collectives
    assert gather.inputs == (Tensor("f32", (4,)),)
    assert gather.outputs == (Tensor("bf16", (32,)),)
    assert (reduce.count, reduce.nbytes, reduce.dtypes) == (36, 144, ("f32",))
    assert (scatter.nbytes, scatter.outputs) == (64, (Tensor("f32", (8,)),))


def test_starts_and_dones_hold_the_products_between_them(step: CompiledStep) -> None:
    hidden = {
        collective.name: [product.name for product in step.hidden(collective)]
        for collective in step.collectives
    }
    assert hidden == {
        "all-gather-start": ["dot_fusion"],
        "all-reduce-start.2": ["gemm.7"],
        "reduce-scatter-start": ["dot.2"],
        "pairs": [],
    }
    assert [collective.synchronous for collective in step.collectives] == [False, False, False, True]
    assert [step.before(collective) for collective in step.collectives] == [0, 0, 1, 2]


@pytest.mark.parametrize(
    ("dtype", "nbytes"),
    [
        ("f4e2m1fn", 5), ("f8e8m0fnu", 9), ("f8e4m3b11fnuz", 9), ("s2", 3), ("u2", 3), ("s4", 5), ("u1", 2),
        ("pred", 9), ("bf16", 18), ("token", 0), ("opaque", 0),
    ],
)  # fmt: skip
def test_bytes_of_nine_elements(dtype: str, nbytes: int) -> None:
    head = f"HloModule m\n\nENTRY %main (p: {dtype}[9]) -> {dtype}[9] {{\n"
    module = read_module(head + f"  ROOT %p = {dtype}[9] parameter(0)\n}}\n")
    assert module.computations["main"].root.nbytes == nbytes


def test_loops_hold_their_bodies(step: CompiledStep) -> None:
    assert step.collectives[1].loops == ("while.1",)
    assert step.timeline() == "AG> P <AG ( AR> P <AR ) RS> P <RS P"


def test_moves_know_what_they_write(step: CompiledStep) -> None:
    assert [(move.kind, move.name, move.nbytes) for move in step.copies_of(128)] == [
        ("concatenate", "concatenate_fusion", 144),
        ("copy", "copy.1", 128),
    ]
    assert dict(step.ops)["fusion"] == 2
    assert dict(step.fused_ops)["concatenate"] == 1
    assert "fusion" not in dict(step.fused_ops)


def test_where_jax_says_it_comes_from(step: CompiledStep) -> None:
    assert step.collectives[0].op_name == "jit(step)/line7/gather"


def test_attributes_may_hold_commas_brackets_and_quotes() -> None:
    module = read_module(STEP)
    gemm = next(i for i in module.computations["body"].instructions if i.name == "gemm.7")
    assert gemm.attribute("custom_call_target") == '"__cublas$gemm"'
    assert gemm.attribute("backend_config") == '{"alpha_real":1,"text":"a, b=(c"}'
    assert gemm.attribute("target") is None
    assert gemm.results == (Tensor("f32", (8, 8)), Tensor("s8", (1024,)))
    assert module.computations["sum"].root.op_name.startswith("a ")


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("a/b(c)/psum", ["a/b(c)/psum"]),
        ("a/(b/psum:jvp(c:d)/psum)", ["a/b/psum", "a/jvp(c:d)/psum"]),
        ("(a:b/(c:d))", ["a", "b/c", "b/d"]),
        ("a/(b:c)/d", ["a/(b:c)/d"]),
        ("", [""]),
    ],
)
def test_merged_operations_have_a_name_each(name: str, names: list[str]) -> None:
    attributes = f'metadata={{op_name="{name}" scheduling_name="x.start" stack_frame_id=4}}'
    instruction = HloInstruction("x", "all-reduce", (), (), attributes, 0)
    assert (list(instruction.op_names), instruction.scheduled_name) == (names, "x.start")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no line begins with HloModule"),
        ("HloModule cut, is_scheduled=true\n\nENTRY %main (p: f32[]) -> f32[] {\n", "cut off"),
        (STEP.replace("[1,8]<=[8]", "@mesh{a=8}"), "unknown form: @mesh"),
    ],
)
def test_what_is_no_hlo_is_refused(text: str, message: str) -> None:
    with pytest.raises(HloError, match=message):
        audit_text(text)


def test_an_empty_list_of_groups_is_everyone() -> None:
    assert read_groups("{}", 4) == ((0, 1, 2, 3),)
    assert read_groups("mesh['a'=2,'b'=3] {'b'}", 6) == ((0, 1, 2), (3, 4, 5))
    assert read_groups("mesh['a'=2,'b'=3] {'b','a'}", 6) == ((0, 3, 1, 4, 2, 5),)
    assert read_groups("mesh['a'=2,'b'=2,'c'=2] {'c','a'}", 8) == ((0, 4, 1, 5), (2, 6, 3, 7))
    with pytest.raises(HloError, match="unknown form"):
        read_groups("mesh['a'=8] {'a':(2)4}", 8)


@given(st.permutations(range(3)), st.lists(st.integers(1, 4), min_size=3, max_size=3), st.booleans())
def test_iota_groups_are_a_reshaped_transpose(order: list[int], dims: list[int], flat: bool) -> None:
    size = math.prod(dims)
    rows, width = (1, size) if flat else (dims[0], size // dims[0])
    text = f"[{rows},{width}]<=[{','.join(map(str, dims))}]T({','.join(map(str, order))})"
    groups = np.arange(size).reshape(dims).transpose(order).reshape(rows, width)
    assert read_groups(text, size) == tuple(map(tuple, groups.tolist()))
