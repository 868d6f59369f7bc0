from typing import ClassVar

import msgspec

from commplan.ir.transfer import ValueTypes, Violations


class BaseOp(msgspec.Struct, frozen=True, gc=False):
    """What every op says of itself beside its fields.

    READS, WRITES: the fields that name the values that it reads and makes, in the order in which `operands`
    and `results` give them. KEPT: those of READS that servers keep and workers do not send. ANSWERS: how many
    of the results come back from servers; the rest stays there.
    """

    READS: ClassVar[tuple[str, ...]] = ("operand",)
    WRITES: ClassVar[tuple[str, ...]] = ("result",)
    KEPT: ClassVar[tuple[str, ...]] = ()
    ANSWERS: ClassVar[int] = 1

    def check(self, types: ValueTypes) -> Violations:
        """The rules that this op breaks, on its fields and its operands; with none broken, `transfer` says
        what its results are."""
        del types
        yield from ()
