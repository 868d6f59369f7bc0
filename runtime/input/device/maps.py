"""Device functions on single records, which belong to the input of a phase: under jit, one batch per call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from commplan.ir import schedule as ir
from commplan.ir.analysis.def_use import DefUse
from commplan.ir.plan import Ref
from commplan.ir.types import SAME
from commplan.lowering.jax.execution import CallContext
from commplan.lowering.jax.functions import RngContext, loaded_by, short_seed
from commplan.lowering.jax.layout import spec
from commplan.lowering.jax.pytree import LEAF, Tree
from commplan.runtime.context import Carried, Context
from commplan.runtime.input.host_batch import HostBatch


class DeviceMaps:
    """Computes values of a phase from host-made values, with device functions on single records.

    Args:
        context: the context of the run, or of one member.
        phase: the phase.
        outputs: the values to compute. Those in `computed` are ignored.
        computed: the host-made values.

    Attributes:
        inputs: the host-made values that it takes.
        loads: the results of the loads whose record indices key its random functions, without duplicates.
    """

    def __init__(
        self, context: Context, phase: ir.Phase, outputs: Sequence[Ref], computed: Sequence[Ref]
    ) -> None:
        self._context, self._phase = context, phase
        self._values = {value.id: value for value in phase.values}
        self._outputs = tuple(ref for ref in outputs if ref not in computed)
        self._ops = DefUse(phase.ops).ancestors(self._outputs, computed)
        used = {ref for op in self._ops for ref in ir.operands(op)}
        self.inputs = tuple(ref for ref in computed if ref in used)
        random = [op for op in self._ops if isinstance(op, ir.Map) and op.random]
        drawn = dict.fromkeys(loaded_by(phase, ref) for op in random for ref in ir.operands(op))
        self.loads = tuple(load for load in drawn if load)
        self._run: Any = jax.jit(self._on_device)

    def __call__(
        self, batch: HostBatch, values: Mapping[Ref, Array], records: Mapping[Ref, Array]
    ) -> dict[Ref, Array]:
        """The outputs of one batch.

        Args:
            batch: the batch, for its epoch, step and seeds.
            values: global arrays by the ids of their values, at least those of `self.inputs`.
            records: u32, the record indices of `self.loads`, laid out like their values.

        Returns:
            Global arrays by the ids of their values.
        """
        # [epoch, step, a seed for each load]; empty without random functions.
        numbers = np.empty(0, np.uint32)
        if self.loads:
            seeds = [short_seed(batch.seeds[load]) for load in self.loads]
            numbers = np.array([batch.epoch & 0xFFFFFFFF, batch.step, *seeds], np.uint32)
        machine = self._context.machine
        with machine.context():
            on_devices = machine.input.array(numbers, SAME, {})
            return self._run({ref: values[ref] for ref in self.inputs}, dict(records), on_devices)

    def _on_device(
        self, values: dict[Ref, Array], records: dict[Ref, Array], numbers: Array
    ) -> dict[Ref, Array]:
        """Run the device maps of a batch inside a `shard_map`. For the arguments, see `__call__`."""
        context = self._context
        lowered = context.lower(self._phase)
        carried = Carried.for_values(context, {ref: self._values[ref] for ref in self._outputs})
        placements = {ref: self._values[ref].placement for ref in (*values, *records)}

        def stripped(ref: Ref, x: Array) -> Tree:
            return context.strip(Tree((x,), LEAF), placements[ref])

        def body(values: dict[Ref, Array], records: dict[Ref, Array], numbers: Array) -> Any:
            env = {ref: stripped(ref, x) for ref, x in values.items()}
            local_records = {ref: stripped(ref, x).leaves[0] for ref, x in records.items()}
            for op in self._ops:
                rng = None
                if isinstance(op, ir.Map) and op.random:
                    seed = numbers[2 + self.loads.index(loaded_by(self._phase, op.operands[0]))]
                    key = RngContext.from_seed(seed, numbers[0], numbers[1]).key
                    rng = RngContext(key, local_records, context.members)
                lowered.apply([op], env, CallContext(rng=rng))
            return carried.leave({ref: env[ref] for ref in self._outputs})

        specs = tuple({ref: spec(placements[ref]) for ref in refs} for refs in (values, records))
        result = context.machine.spread(body, (*specs, PartitionSpec()), carried.specs)(
            values, records, numbers
        )
        return carried.build(result)
