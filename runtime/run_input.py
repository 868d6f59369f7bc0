"""The sources of a run and the batches that it opened on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from commplan.ir import schedule as ir
from commplan.runtime.context import Context
from commplan.runtime.input.device.batches import Batches
from commplan.runtime.input.device.clocked_phases import ClockedPhases
from commplan.runtime.input.group import Group
from commplan.runtime.input.multirate.schedule import shared_stream_axis
from commplan.runtime.input.restarts import Restarts
from commplan.runtime.observe.metrics import Ledger


@dataclass(frozen=True)
class RunInput:
    """The input of a run, which its members share.

    Attributes:
        sources: The sources by name, as the user bound them.
        ledger: The costs of all batches that this process opened.
        clocks: The streams of members that have different rates or share a value, opened by the first member
            that needs them.
        restarts: Counts iterators over the same batches, to warn about repetitions; `run.init` clears it.
    """

    sources: dict[str, Any]
    ledger: Ledger = field(default_factory=Ledger)
    clocks: ClockedPhases = field(default_factory=ClockedPhases)
    restarts: Restarts = field(default_factory=Restarts)

    def batches(
        self, context: Context, phase: ir.Phase, state: Mapping[str, int] | None, group: Group | None,
        timeout: float | None, workers: str,
    ) -> Batches:  # fmt: skip
        """Open the batches of `phase` for a run, or for the member of `context`.

        The other arguments are those of `run.batches`, which also lists the errors of `Batches`.

        Raises:
            CommplanError: CP0803 if a source that the phase reads is not bound.
        """
        reads = [op.source for op in phase.ops if isinstance(op, ir.Read)]
        missing = [source for source in reads if source not in self.sources]
        if missing:
            note = f"pass it: program.bind(mesh, sources={{{missing[0]!r}: ...}})"
            context.fail("CP0803", f"source `{missing[0]}` is not bound", note)
        clock = None
        if context.members and shared_stream_axis(context.whole or context.schedule, phase):
            clock = self.clocks.member(context, phase, self.sources, state, group, timeout, workers)
        batches = Batches(
            context, phase, self.sources,
            state=state, among=group, timeout=timeout, clocked=clock, workers=workers, restarts=self.restarts,
        )  # fmt: skip
        self.ledger.add(batches, batches.meters)
        return batches
