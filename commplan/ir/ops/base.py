from collections.abc import Container, Mapping
from typing import ClassVar

import msgspec

from commplan.ir.roles import Ref
from commplan.ir.values import Value


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

    @property
    def title(self) -> str:
        """What it is called in an explanation."""
        return str(self.__struct_config__.tag)

    def detail(self, values: Mapping[Ref, Value]) -> str:
        """What an explanation says of it beside its title."""
        return ""

    def runs_ahead(self, known: Container[Ref]) -> bool:
        """Whether it belongs to the input pipeline, where `known` are the source-only values so far."""
        return False

    def asks_servers(self, values: Mapping[Ref, Value]) -> bool:
        """Whether it is carried out together with servers."""
        return False

    @property
    def is_split(self) -> bool:
        """Whether it goes on beside the ops behind it, until its result is read."""
        return False

    def staged(self, nbytes: Mapping[Ref, int]) -> int:
        """Bytes that it takes beside operands and results while it runs."""
        return 0

    def buffers(self, nbytes: Mapping[Ref, int]) -> int:
        """Bytes that it works on, where it is a collective."""
        return 0
