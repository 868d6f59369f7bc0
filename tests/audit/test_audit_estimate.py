"""The estimate plays a schedule: what overlaps, what waits, how often loops go round."""

from __future__ import annotations

from pathlib import Path

import pytest

from commplan.lowering.audit import Machine, audit_text, estimate
from commplan.lowering.audit.estimate import seconds_of

HEAD = """\
HloModule jit_step, is_scheduled=true, num_partitions=4

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}
"""
GROUPS = "channel_id=1, replica_groups=[1,4]<=[4], to_apply=%sum"
# 1000 floats over 4 ranks: 6000 bytes over the bus. The product: 2 * 10 * 10 * 100 operations.
OVERLAPPED = f"""\
{HEAD}
ENTRY %main (x: f32[1000], w: f32[10,100]) -> f32[1000] {{
  %x = f32[1000]{{0}} parameter(0)
  %w = f32[10,100]{{1,0}} parameter(1)
  %start = f32[1000]{{0}} all-reduce-start(%x), {GROUPS}
  %product = f32[10,10]{{1,0}} dot(%w, %w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}
  %done = f32[1000]{{0}} all-reduce-done(%start)
  ROOT %copy = f32[1000]{{0}} copy(%done)
}}
"""


def test_communication_hides_under_computation() -> None:
    step = audit_text(OVERLAPPED)
    assert [product.flops for product in step.products] == [20_000]
    assert step.covered == 1
    # The product takes 2 s and the all-reduce 1 + 6 s; the copy reads and writes 4000 bytes each: 0.8 s.
    found = estimate(step, Machine(flops=10_000, memory=10_000, bus=1_000, start=1))
    assert (found.computation, found.communication) == (pytest.approx(2.8), 7)
    assert (found.total, found.exposed, found.last) == (
        pytest.approx(7.8),
        pytest.approx(5),
        pytest.approx(5),
    )
    # With a slow processor nothing is exposed.
    found = estimate(step, Machine(flops=1_000, memory=10_000, bus=1_000, start=1))
    assert (found.total, found.exposed, found.last) == (pytest.approx(20.8), pytest.approx(0), 0)


def test_a_loop_goes_round_as_often_as_it_says() -> None:
    body = """\
%body (s: (s32[], f32[1000])) -> (s32[], f32[1000]) {{
  %s = (s32[], f32[1000]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[1000]{{0}} get-tuple-element(%s), index=1
  %reduced = f32[1000]{{0}} all-reduce(%x), {groups}
  ROOT %t = (s32[], f32[1000]{{0}}) tuple(%i, %reduced)
}}

%condition (s.1: (s32[], f32[1000])) -> pred[] {{
  %s.1 = (s32[], f32[1000]{{0}}) parameter(0)
  ROOT %less = pred[] constant(false)
}}

ENTRY %main (p: (s32[], f32[1000])) -> (s32[], f32[1000]) {{
  %p = (s32[], f32[1000]{{0}}) parameter(0)
  ROOT %while = (s32[], f32[1000]{{0}}) while(%p), condition=%condition, body=%body{trips}
}}
""".replace("{groups}", GROUPS)
    machine = Machine(flops=1, memory=1, bus=1_000, start=1)
    for trips, seconds in ((', backend_config={"known_trip_count":{"n":"6"}}', 42), ("", 7)):
        text = HEAD + "\n" + body.replace("{trips}", trips).replace("{{", "{").replace("}}", "}")
        assert estimate(audit_text(text), machine).total == seconds


def test_each_kind_of_collective_moves_what_it_must() -> None:
    step = audit_text((Path(__file__).parent / "step.hlo").read_text())
    machine = Machine(flops=1, memory=1, bus=1, start=0)
    gather, reduce, scatter, permute = (seconds_of(found, machine) for found in step.collectives)
    assert gather == 16 * 7
    assert reduce == pytest.approx(144 * 2 * 3 / 4)
    assert scatter == pytest.approx(64 * 3 / 4)
    assert permute == 32


def test_slices_read_what_they_take() -> None:
    text = f"""\
{HEAD}
%taking (p: f32[1000]) -> f32[20] {{
  %p = f32[1000]{{0}} parameter(0)
  %flat = f32[1000]{{0}} bitcast(%p)
  %part = f32[20]{{0}} slice(%flat), slice={{[0:20]}}
  ROOT %twice = f32[20]{{0}} add(%part, %part)
}}

ENTRY %main (x: f32[1000]) -> f32[20] {{
  %x = f32[1000]{{0}} parameter(0)
  %some = f32[10]{{0}} slice(%x), slice={{[0:10]}}
  %whole = f32[1000]{{0}} negate(%x)
  ROOT %fusion = f32[20]{{0}} fusion(%x), kind=kLoop, calls=%taking
}}
"""
    assert [(move.kind, move.reads) for move in audit_text(text).moves] == [
        ("slice", 40),
        ("negate", 4000),
        ("add", 80),
    ]


def test_convolutions_and_library_calls_count() -> None:
    text = f"""\
{HEAD}
ENTRY %main (x: f32[2,8,8,3], k: f32[3,3,3,16], a: f32[4,5], b: f32[5,6]) -> f32[4,6] {{
  %x = f32[2,8,8,3]{{3,2,1,0}} parameter(0)
  %k = f32[3,3,3,16]{{3,2,1,0}} parameter(1)
  %a = f32[4,5]{{1,0}} parameter(2)
  %b = f32[5,6]{{1,0}} parameter(3)
  %conv = f32[2,8,8,16]{{3,2,1,0}} convolution(%x, %k), window={{size=3x3}}, dim_labels=b01f_01io->b01f
  ROOT %gemm = f32[4,6]{{1,0}} custom-call(%a, %b), custom_call_target="__cublas$gemm", \
backend_config={{"gemm_backend_config":{{"dot_dimension_numbers":{{"lhs_contracting_dimensions":["1"]}}}}}}
}}
"""
    flops = [product.flops for product in audit_text(text).products]
    assert flops == [2 * (2 * 8 * 8 * 16) * (3 * 3 * 3), 2 * 4 * 5 * 6]
