"""The estimate simulates a schedule: overlap, waits and loop counts."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from commplan.lowering.audit import Machine, audit_text
from commplan.lowering.gpu.estimate import estimate, seconds_by_level, seconds_of

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
    estimated = estimate(step, Machine(flops=10_000, memory=10_000, bus=1_000, start=1))
    assert (estimated.computation, estimated.communication) == (pytest.approx(2.8), 7)
    assert (estimated.total, estimated.exposed, estimated.last) == (
        pytest.approx(7.8),
        pytest.approx(5),
        pytest.approx(5),
    )
    # With a slow processor nothing is exposed.
    estimated = estimate(step, Machine(flops=1_000, memory=10_000, bus=1_000, start=1))
    assert (estimated.total, estimated.exposed, estimated.last) == (pytest.approx(20.8), pytest.approx(0), 0)


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
    gather, reduce, scatter, permute = (seconds_of(collective, machine) for collective in step.collectives)
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


def test_asynchronous_copies_and_slices_move_what_synchronous_ones_do() -> None:
    text = f"""\
{HEAD}
%taking (p: f32[6,1000], i: s32[]) -> f32[1,1000] {{
  %p = f32[6,1000]{{1,0}} parameter(0)
  %i = s32[] parameter(1)
  ROOT %part = f32[1,1000]{{1,0}} dynamic-slice(%p, %i, %i), dynamic_slice_sizes={{1,1000}}
}}

%putting (b: f32[6,1000], u: f32[1,1000], i: s32[]) -> f32[6,1000] {{
  %b = f32[6,1000]{{1,0}} parameter(0)
  %u = f32[1,1000]{{1,0}} parameter(1)
  %i = s32[] parameter(2)
  ROOT %put = f32[6,1000]{{1,0}} dynamic-update-slice(%b, %u, %i, %i)
}}

%calling (x: f32[1,1000]) -> f32[1,1] {{
  %x = f32[1,1000]{{1,0}} parameter(0)
  ROOT %gemm = f32[1,1]{{1,0}} custom-call(%x, %x), custom_call_target="__cublas$gemm", \
backend_config={{"gemm_backend_config":{{"dot_dimension_numbers":{{"lhs_contracting_dimensions":["1"]}}}}}}
}}

ENTRY %main (s: f32[6,1000], i: s32[]) -> f32[6,1000] {{
  %s = f32[6,1000]{{1,0}} parameter(0)
  %i = s32[] parameter(1)
  %1 = ((f32[6,1000], s32[]), f32[1,1000]{{1,0}}, u32[]) fusion-start(%s, %i), kind=kLoop, calls=%taking
  %2 = f32[1,1000]{{1,0}} fusion-done(%1)
  %3 = (f32[1,1000]{{1,0}}, f32[1,1000]{{1,0}}, u32[]) copy-start(%2)
  %4 = f32[1,1000]{{1,0}} copy-done(%3)
  %5 = ((f32[1,1000]), f32[1,1]{{1,0}}, u32[]) async-start(%4), calls=%calling
  %6 = f32[1,1]{{1,0}} async-done(%5)
  %7 = ((f32[6,1000], f32[1,1000], s32[]), f32[6,1000], u32[]) fusion-start(%s, %4, %i), calls=%putting
  ROOT %8 = f32[6,1000]{{1,0}} fusion-done(%7)
}}
"""
    step = audit_text(text)
    moves = [(move.kind, move.name, move.nbytes, move.reads) for move in step.moves]
    assert moves == [
        ("dynamic-slice", "1", 4000, 4004),
        ("copy", "3", 4000, 4000),
        ("dynamic-update-slice", "7", 4000, 4004),
    ]
    assert [(product.name, product.position) for product in step.products] == [("5", 6)]


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


def hierarchical(order: str) -> str:
    """Two buckets of 800 floats on two hosts of two: reduced within hosts, between them, gathered within."""
    inside, across = "replica_groups={{0,1},{2,3}}", "replica_groups={{0,2},{1,3}}"
    lines = {}
    for name in "ab":
        lines |= {
            f"{name}1": f"%{name}1 = f32[400]{{0}} reduce-scatter(%{name}), {inside}, to_apply=%sum",
            f"{name}2": f"%{name}2 = f32[400]{{0}} all-reduce-start(%{name}1), {across}, to_apply=%sum",
            f"{name}3": f"%{name}3 = f32[400]{{0}} all-reduce-done(%{name}2)",
            f"{name}4": f"%{name}4 = f32[800]{{0}} all-gather(%{name}3), {inside}",
        }
    body = "\n".join(f"  {lines[key]}" for key in order.split())
    return f"""\
{HEAD}
ENTRY %main (a: f32[800], b: f32[800]) -> (f32[800], f32[800]) {{
  %a = f32[800]{{0}} parameter(0)
  %b = f32[800]{{0}} parameter(1)
{body}
  ROOT %all = (f32[800], f32[800]) tuple(%a4, %b4)
}}
"""


def test_levels_of_the_network_work_at_once_where_the_schedule_lets_them() -> None:
    machine = Machine(flops=1, memory=1, bus=1600, start=0, network=800, per_host=2)
    # A bucket: 1600 bytes scattered, 1 s; 1600 bytes all-reduced by two, 2 s; 1600 bytes gathered, 1 s.
    one_by_one = estimate(audit_text(hierarchical("a1 a2 a3 a4 b1 b2 b3 b4")), machine)
    assert one_by_one.total == pytest.approx(8)
    overlapped = estimate(audit_text(hierarchical("a1 a2 b1 a3 b2 a4 b3 b4")), machine)
    assert overlapped.total == pytest.approx(6)
    assert one_by_one.busy == overlapped.busy == {"bus": pytest.approx(4), "network": pytest.approx(4)}


def test_rings_between_hosts_share_the_links_of_their_ranks() -> None:
    machine = Machine(flops=1, memory=1, bus=2, start=0, network=1, per_host=2)
    (flat,) = audit_text(OVERLAPPED).collectives  # 4000 bytes over 2 hosts x 2: 6000 cross a rank's link
    assert seconds_by_level(flat, machine) == {"bus": 3000, "network": 3000}
    assert seconds_of(flat, machine) == 3000
    swap = replace(flat, kind="all_to_all")
    assert seconds_by_level(swap, machine) == {"bus": 500, "network": 2000}
    shift = replace(flat, kind="permute", groups=((0, 1), (1, 0)))
    assert seconds_by_level(shift, machine) == {"bus": 2000}
    assert seconds_by_level(replace(shift, groups=((1, 2),)), machine) == {"network": 4000}


def test_derivatives_of_convolutions_count_as_the_convolution() -> None:
    call = 'custom-call({0}), dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$conv{1}"'
    text = f"""\
{HEAD}
ENTRY %main (x: f32[2,8,8,3], y: f32[2,8,8,16], k: f32[16,3,3,3]) -> f32[2,8,8,16] {{
  %x = f32[2,8,8,3]{{3,2,1,0}} parameter(0)
  %y = f32[2,8,8,16]{{3,2,1,0}} parameter(1)
  %k = f32[16,3,3,3]{{3,2,1,0}} parameter(2)
  %dk = (f32[16,3,3,3]{{3,2,1,0}}, u8[0]{{0}}) {call.format("%x, %y", "BackwardFilter")}
  %dx = (f32[2,8,8,3]{{3,2,1,0}}, u8[0]{{0}}) {call.format("%y, %k", "BackwardInput")}
  %z = (f32[2,8,8,16]{{3,2,1,0}}, u8[0]{{0}}) {call.format("%x, %k", "Forward")}
  ROOT %first = f32[2,8,8,16]{{3,2,1,0}} get-tuple-element(%z), index=0
}}
"""
    assert [product.flops for product in audit_text(text).products] == [2 * 2 * 8 * 8 * 16 * 3 * 3 * 3] * 3


def test_an_update_in_place_touches_what_it_updates() -> None:
    text = f"""\
{HEAD}
%updating (b: f32[1000], u: f32[20], i: s32[]) -> f32[1000] {{
  %b = f32[1000]{{0}} parameter(0)
  %u = f32[20]{{0}} parameter(1)
  %i = s32[] parameter(2)
  %twice = f32[20]{{0}} add(%u, %u)
  ROOT %put = f32[1000]{{0}} dynamic-update-slice(%b, %twice, %i)
}}

ENTRY %main (b: f32[1000], u: f32[20], i: s32[]) -> f32[1000] {{
  %b = f32[1000]{{0}} parameter(0)
  %u = f32[20]{{0}} parameter(1)
  %i = s32[] parameter(2)
  %alone = f32[1000]{{0}} dynamic-update-slice(%b, %u, %i)
  ROOT %fusion = f32[1000]{{0}} fusion(%alone, %u, %i), kind=kLoop, calls=%updating
}}
"""
    moves = audit_text(text).moves
    assert [(move.kind, move.nbytes, move.reads) for move in moves] == [("dynamic-update-slice", 80, 84)] * 2
