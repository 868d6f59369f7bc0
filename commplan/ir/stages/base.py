from typing import ClassVar

import msgspec

from commplan.ir.roles import Ref, getter


class BaseStage(msgspec.Struct, frozen=True):
    """What every stage says of itself beside its fields.

    READS, WRITES: the fields that name the values that it reads and makes, in the order in which `operands`
    and `results` give them.
    """

    READS: ClassVar[tuple[str, ...]] = ("operand",)
    WRITES: ClassVar[tuple[str, ...]] = ("result",)

    def alike(self) -> tuple[tuple[Ref, ...], ...]:
        """Values that have the same leaves before any cut, in groups: what goes in and comes out of a stage
        that moves or reduces."""
        operands, results = getter(type(self), self.READS[:1]), getter(type(self), self.WRITES[:1])
        return ((*operands(self), *results(self)),)
