"""The exposed time that no order of instructions can hide: by hand, and never more than a schedule
exposes."""

from __future__ import annotations

import random

import pytest

from commplan.lowering.audit import Machine, audit_text, least_exposed
from commplan.lowering.gpu.bound import hidden
from commplan.lowering.gpu.estimate import estimate

HEAD = """\
HloModule jit_step, is_scheduled=true, num_partitions=4

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}
"""
SUM = "replica_groups=[1,4]<=[4], to_apply=%sum"
MACHINE = Machine(flops=1, memory=1_000, bus=1_000, start=1)
# A copy reads and writes 4000 bytes: 8 s. An all-reduce of 4000 bytes: 1 + 6 s.


def step(*lines: str) -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"""\
{HEAD}
ENTRY %main (x: f32[1000], y: f32[1000]) -> (f32[1000], f32[1000]) {{
  %x = f32[1000]{{0}} parameter(0)
  %y = f32[1000]{{0}} parameter(1)
{body}
}}
"""


def copy(name: str, source: str) -> str:
    return f"%{name} = f32[1000]{{0}} copy(%{source})"


def reduced(name: str, source: str) -> str:
    return f"%{name} = f32[1000]{{0}} all-reduce(%{source}), {SUM}"


def result(*names: str) -> str:
    kinds = ", ".join("f32[1000]" for _ in names)
    return f"ROOT %out = ({kinds}) tuple({', '.join(f'%{name}' for name in names)})"


def test_what_makes_or_reads_a_collective_cannot_hide_it() -> None:
    text = step(copy("made", "x"), reduced("sum", "made"), copy("used", "sum"), result("used"))
    assert least_exposed(text, MACHINE) == pytest.approx(7) == estimate(audit_text(text), MACHINE).exposed


def test_what_is_independent_could() -> None:
    text = step(reduced("sum", "x"), copy("other", "y"), result("sum", "other"))
    assert estimate(audit_text(text), MACHINE).exposed == pytest.approx(7)
    assert least_exposed(text, MACHINE) == pytest.approx(0)


def test_a_second_of_computation_hides_one_of_communication() -> None:
    text = step(reduced("a", "x"), reduced("b", "a"), copy("other", "y"), result("b", "other"))
    assert least_exposed(text, MACHINE) == pytest.approx(2 * 7 - 8)


def test_levels_hide_apart() -> None:
    machine = Machine(flops=1, memory=1_000, bus=1_000, start=1, network=1_000, per_host=2)
    pairs = ("{{0,1},{2,3}}", "{{0,2},{1,3}}")  # within hosts, between them: 1 + 4 s each
    lines = [f"%{n} = f32[1000]{{0}} all-reduce(%{n[0]}), replica_groups={g}, to_apply=%sum"
             for n, g in zip(("x1", "y1"), pairs, strict=True)]  # fmt: skip
    assert least_exposed(step(*lines, result("x1", "y1")), machine) == pytest.approx(5)


def test_a_loop_hides_what_is_in_its_body_and_what_is_beside_it() -> None:
    body = f"""\
%body (s: (s32[], f32[1000], f32[1000])) -> (s32[], f32[1000], f32[1000]) {{
  %s = (s32[], f32[1000]{{0}}, f32[1000]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %p = f32[1000]{{0}} get-tuple-element(%s), index=1
  %q = f32[1000]{{0}} get-tuple-element(%s), index=2
  %r = f32[1000]{{0}} all-reduce(%p), {SUM}
  %t = f32[1000]{{0}} all-reduce(%r), {SUM}
  %c = f32[1000]{{0}} copy(%q)
  ROOT %next = (s32[], f32[1000]{{0}}, f32[1000]{{0}}) tuple(%i, %t, %c)
}}

%condition (s.1: (s32[], f32[1000], f32[1000])) -> pred[] {{
  %s.1 = (s32[], f32[1000]{{0}}, f32[1000]{{0}}) parameter(0)
  ROOT %less = pred[] constant(false)
}}
"""
    loop = ('%loop = (s32[], f32[1000]{0}, f32[1000]{0}) while(%given), condition=%condition, body=%body, '
            'backend_config={"known_trip_count":{"n":"3"}}')  # fmt: skip
    zero = "%zero = s32[] constant(0)"
    start = "%given = (s32[], f32[1000]{0}, f32[1000]{0}) tuple(%zero, %y, %y)"
    text = step(zero, start, reduced("sum", "x"), loop, result("sum")).replace("ENTRY", f"{body}\nENTRY")
    assert least_exposed(text, MACHINE) == pytest.approx(3 * (2 * 7 - 8))  # the loop hides the first


@pytest.mark.parametrize("seed", range(20))
def test_no_order_exposes_less(seed: int) -> None:
    """Random steps in random orders, with every collective asynchronous."""
    rng = random.Random(seed)
    ops: list[tuple[str, str, bool]] = []
    for number in range(12):
        source = rng.choice(["x", "y", *(name for name, _, _ in ops)])
        ops.append((f"v{number}", source, rng.random() < 0.4))
    reads = [name for name, _, _ in ops]
    bound: set[float] = set()
    for _ in range(5):
        lines: list[str] = []
        pending = [(1, name, source, moves) for name, source, moves in ops]
        available = {"x", "y"}
        while pending:
            ready = [item for item in pending if item[2] in available]
            item = rng.choice(ready)
            pending.remove(item)
            part, name, source, moves = item
            if moves and part == 1:
                lines.append(f"%s{name} = f32[1000]{{0}} all-reduce-start(%{source}), {SUM}")
                available.add(f"s{name}")
                pending.append((2, name, f"s{name}", moves))
                continue
            lines.append(
                f"%{name} = f32[1000]{{0}} all-reduce-done(%s{name})" if moves else copy(name, source)
            )
            available.add(name)
        text = step(*lines, result(*reads))
        least = least_exposed(text, MACHINE)
        bound.add(round(least, 9))
        assert least <= estimate(audit_text(text), MACHINE).exposed + 1e-9
    assert len(bound) == 1  # and the bound is of what depends on what, not of an order


def test_flow_takes_back_what_another_can_have() -> None:
    assert hidden([3, 2], {0b11: 3, 0b01: 2}) == 5  # the first gives up what both could have
    assert hidden([4], {0b0: 9}) == 0
    assert hidden([1, 1, 1], {0b111: 2, 0b100: 5}) == 3
