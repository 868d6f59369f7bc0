"""The MPI engine's tables have the meaning of their plan: tables and instruction lists, not run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from msgspec.structs import replace
from support.campaign import parameters
from support.example_cases import smaller
from support.plan_terms import InTerms
from support.random_case import make_case
from support.terms_cases import EXAMPLES, PIPELINES, case_of
from support.under_mpi_terms import check_mpi

from commplan.lowering.jax import phase
from commplan.lowering.jax.backend import BufferLayout
from commplan.lowering.mpi import backend, collectives
from commplan.lowering.mpi.job.groups import Groups


@pytest.mark.parametrize(("name", "sizes"), EXAMPLES)
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_examples(name: str, sizes: Mapping[str, int], pipeline: str | None):
    case = dataclasses.replace(smaller(name, sizes), pipeline=pipeline)
    assert check_mpi(InTerms(case, "mpi" if pipeline is None else None)) > 0


@pytest.mark.parametrize("block", parameters(range(2), range(2, 4)))
def test_random_plans(block: int):
    for seed in range(3000 + block * 8, 3000 + (block + 1) * 8):
        case = make_case(seed)
        if "integers" in case.text:  # terms have no types
            continue
        try:
            check_mpi(InTerms(case, "mpi" if seed % 2 else None), ("usual", "split", "call")[seed % 3])
        except Exception as error:
            raise AssertionError(f"seed {seed}, passes {case.pipeline}\n{case.text}") from error


# Faults of the lowering, made by hand


def root_off_by_one(patch: pytest.MonkeyPatch) -> None:
    right = backend.MpiBackend._spec
    patch.setattr(
        backend.MpiBackend,
        "_spec",
        lambda self, op: dataclasses.replace(right(self, op), root=(op.root or 0) - 1),
    )


def one_axis_of_two(patch: pytest.MonkeyPatch) -> None:
    right = backend.MpiBackend._spec
    patch.setattr(backend.MpiBackend, "_spec", lambda self, op: right(self, replace(op, axes=op.axes[:1])))


def ranks_in_another_order(patch: pytest.MonkeyPatch) -> None:
    right = Groups.along
    patch.setattr(Groups, "along", lambda self, axes: right(self, axes)[::-1])


def ranks_of_the_group(patch: pytest.MonkeyPatch) -> None:
    """A list's peers are numbered within the group, not in the world."""
    right = Groups.along
    patch.setattr(Groups, "along", lambda self, axes: tuple(range(len(right(self, axes)))))


def _rows(patch: pytest.MonkeyPatch, change: Callable[[Any], Any]) -> None:
    right = collectives.instructions
    patch.setattr(collectives, "instructions", lambda *arguments: change(right(*arguments)))


def no_waits(patch: pytest.MonkeyPatch) -> None:
    _rows(patch, lambda listed: dataclasses.replace(listed, waits=((),) * len(listed.waits)))


def offsets_shifted(patch: pytest.MonkeyPatch) -> None:
    def shifted(listed: Any) -> Any:
        rows = [row._replace(src_offset=max(row.src_offset - 4, 0)) for row in listed.code]
        return dataclasses.replace(listed, code=tuple(rows))

    _rows(patch, shifted)


def ready_too_early(patch: pytest.MonkeyPatch) -> None:
    """Mark parts of a result as final when they are first written."""
    _rows(
        patch,
        lambda listed: dataclasses.replace(
            listed,
            last=tuple(i for i, row in enumerate(listed.code) if row.dst == 1 and row.kind == 2)[:1],
            late=(),
        ),
    )


def copied_for_summed(patch: pytest.MonkeyPatch) -> None:
    def copied(listed: Any) -> Any:
        rows = [row._replace(kind=1) if row.kind == 2 else row for row in listed.code]
        return dataclasses.replace(listed, code=tuple(rows))

    _rows(patch, copied)


def another_type(patch: pytest.MonkeyPatch) -> None:
    names = list(collectives.DTYPES)
    names[-2:] = names[:-3:-1]
    patch.setattr(collectives, "DTYPES", tuple(names))


def another_op(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(collectives, "_OPS", ("sum", "min", "max"))


def leaves_exchanged(patch: pytest.MonkeyPatch) -> None:
    """The runs of a buffer are put together in another order than they are taken apart."""
    right = collectives._layout

    def wrong(lay: BufferLayout, itemsize: int) -> Any:
        runs, at = list[Any](), 0
        for run in reversed(lay.runs) if len(lay.runs) > 1 else lay.runs:
            runs.append(run._replace(offset=at))
            at += run.size
        wrong.calls += 1
        return right(dataclasses.replace(lay, runs=tuple(runs)) if wrong.calls % 2 else lay, itemsize)

    wrong.calls = 0
    patch.setattr(collectives, "_layout", wrong)


def read_before_it_is_there(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(collectives.Channel, "end", lambda self, pending, token: (pending.results, token))


def wrong_divisor(patch: pytest.MonkeyPatch) -> None:
    right = phase.ops.scale
    patch.setattr(phase.ops, "scale", lambda x, how, by, over: right(x, how, by - 1, over))


REDUCE = "total = reduce grads over a, b by mean"
RING = f"{REDUCE} via ring"
FAULTS: list[tuple[Callable[[pytest.MonkeyPatch], None], str, str]] = [
    (root_off_by_one, "total = broadcast params over a, b from 4", "call"),
    (one_axis_of_two, REDUCE, "call"),
    (ranks_in_another_order, "part = slice whole over b\n    total = gather part over b", "call"),
    (ranks_of_the_group, "part = slice whole over b\n    total = gather part over b via ring", "call"),
    (no_waits, RING, "call"),
    (offsets_shifted, RING, "call"),
    (ready_too_early, RING, "call"),
    (copied_for_summed, RING, "call"),
    (another_type, RING, "call"),
    (another_op, "total = reduce params over a, b by max", "call"),
    (leaves_exchanged, REDUCE, "call"),
    (read_before_it_is_there, RING, "split"),
    (wrong_divisor, REDUCE, "call"),
]


@pytest.mark.parametrize(("fault", "stage", "form"), FAULTS, ids=lambda x: getattr(x, "__name__", ""))
def test_faults_are_found(
    fault: Callable[[pytest.MonkeyPatch], None], stage: str, form: str, monkeypatch: pytest.MonkeyPatch
):
    plan = InTerms(case_of(stage))
    check_mpi(plan, form)
    fault(monkeypatch)
    with pytest.raises(AssertionError, match=r"the plan means|wait for ever|never finished"):
        check_mpi(plan, form)
