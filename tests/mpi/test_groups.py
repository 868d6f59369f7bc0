"""The communicators along the axes of a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from support import mpirun
from support.engine_terms import Comm

from commplan.diagnostics import CommplanError

mpirun.needs_mpi()

from commplan.lowering.mpi.job.groups import Groups  # noqa: E402

SIZES = {"node": 2, "gpu": 2}


class Meet:
    """Runs calls directly."""

    def __call__(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return call(*arguments)

    def among(self, ranks: Sequence[int]) -> Meet:
        del ranks
        return self


def groups() -> tuple[Groups, Comm]:
    comm, meet = Comm(0, 4, {}), Meet()
    result: Any = Groups(comm, SIZES, meet)  # pyright: ignore[reportArgumentType]
    return result, comm


def test_the_tag_of_a_communicator_is_independent_of_the_order() -> None:
    """Ranks may create communicators in different orders. Each communicator has its own tag."""
    calls = [(use, axes) for use in ("native", "blocking") for axes in (("node",), ("gpu",), ("gpu", "node"))]
    tags: list[dict[Any, int]] = []
    for order in (calls, calls[::-1]):
        cached, comm = groups()
        for use, axes in order:
            getattr(cached, use)(axes)
        tags.append(dict(zip(order, comm.tags, strict=True)))
    assert tags[0] == tags[1]
    assert len(set(tags[0].values())) == len(calls)


def test_no_communicator_is_created_while_tracing() -> None:
    cached, _ = groups()
    existing = cached.native(("node",))
    cached.seal()
    assert cached.native(("node",)) is existing
    with pytest.raises(CommplanError, match="no communicator of the ranks along gpu") as caught:
        cached.native(("gpu",))
    assert caught.value.diagnostics[0].code == "CP0831"
