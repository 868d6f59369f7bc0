from typing import ClassVar

import msgspec


class BaseStage(msgspec.Struct, frozen=True):
    """What every stage says of itself beside its fields.

    READS, WRITES: the fields that name the values that it reads and makes, in the order in which `operands`
    and `results` give them.
    """

    READS: ClassVar[tuple[str, ...]] = ("operand",)
    WRITES: ClassVar[tuple[str, ...]] = ("result",)
