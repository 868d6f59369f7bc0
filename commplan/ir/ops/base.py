from collections.abc import Callable, Container, Mapping
from typing import ClassVar, NamedTuple

import msgspec

from commplan.ir.hints import Algorithm
from commplan.ir.refs import Ref, getter
from commplan.ir.transfer import ValueTypes, Violations
from commplan.ir.values import Value

Ranks = Callable[[tuple[str, ...]], int]  # along these axes


class Work(NamedTuple):
    """What an op asks a cost model for: a collective of `nbytes` on each rank over `axes`, the call of the
    function or source `name`, or a copy of so many bytes. what: in words."""

    kind: str
    what: str
    nbytes: float
    axes: tuple[str, ...] = ()
    algorithm: Algorithm = Algorithm("native")
    chunk: int | None = None
    root: int = 0
    form: str | None = None
    name: str = ""


class BaseOp(msgspec.Struct, frozen=True, gc=False):
    """What every op says of itself beside its fields.

    READS, WRITES: the fields that name the values that it reads and makes, in the order in which `operands`
    and `results` give them. KEPT: those of READS that servers keep and workers do not send. ANSWERS: how many
    of the results come back from servers; the rest stays there. CONVERTS: it changes how elements lie, or
    their type, and nothing else. OBEYS: those of its `hints` that change what it makes; others that could are
    refused.
    """

    READS: ClassVar[tuple[str, ...]] = ("operand",)
    WRITES: ClassVar[tuple[str, ...]] = ("result",)
    KEPT: ClassVar[tuple[str, ...]] = ()
    ANSWERS: ClassVar[int] = 1
    CONVERTS: ClassVar[bool] = False
    OBEYS: ClassVar[tuple[str, ...]] = ()

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

    def work(self, nbytes: Mapping[Ref, int], ranks: Ranks) -> Work:
        """What a cost model is asked for: of the compiler's own ops a copy of what they make."""
        results = getter(type(self), self.WRITES)(self)
        return Work("copy", self.title, sum(nbytes.get(ref, 0) for ref in results))

    def check(self, types: ValueTypes) -> Violations:
        """The rules that this op breaks, on its fields and its operands; with none broken, `transfer` says
        what its results are."""
        del types
        yield from ()
