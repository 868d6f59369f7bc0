"""The base class of ops, and the query of an op to a cost model."""

from collections.abc import Callable, Container, Mapping
from typing import ClassVar, NamedTuple

import msgspec

from commplan.ir.hints import Algorithm
from commplan.ir.refs import Ref, getter
from commplan.ir.transfer import ValueTypes, Violations
from commplan.ir.values import Value

Ranks = Callable[[tuple[str, ...]], int]  # from axes to the number of ranks along them


class Work(NamedTuple):
    """The query of an op to a cost model.

    It is a collective of `nbytes` per rank over `axes`, a call of the function or source `name`, or a copy of
    `nbytes`. `label` describes it in words.
    """

    kind: str
    label: str
    nbytes: float
    axes: tuple[str, ...] = ()
    algorithm: Algorithm = Algorithm("native")
    chunk: int | None = None
    root: int = 0
    form: str | None = None
    name: str = ""


class BaseOp(msgspec.Struct, frozen=True, gc=False):
    """Base class of ops.

    Class attributes:

    - `READS`, `WRITES`: the fields that name operands and results, in the order of `operands` and `results`.
    - `SHAPED_BY`: the fields that name values whose pytree structure the op copies, but not their elements.
    - `SERVER_OPERANDS`: the fields in `READS` that servers store and workers do not send.
    - `RETURNED`: the number of leading results that servers return; further results stay on servers.
    - `CONVERTS`: whether the op changes only layout or element types.
    - `APPLIED_HINTS`: the hints that change the result. Other hints that could are rejected.
    """

    READS: ClassVar[tuple[str, ...]] = ("operand",)
    WRITES: ClassVar[tuple[str, ...]] = ("result",)
    SHAPED_BY: ClassVar[tuple[str, ...]] = ()
    SERVER_OPERANDS: ClassVar[tuple[str, ...]] = ()
    RETURNED: ClassVar[int] = 1
    CONVERTS: ClassVar[bool] = False
    APPLIED_HINTS: ClassVar[tuple[str, ...]] = ()

    @property
    def title(self) -> str:
        """The name of the op in explanations."""
        return str(self.__struct_config__.tag)

    def detail(self, values: Mapping[Ref, Value]) -> str:
        """Details of the op in explanations, after its title."""
        return ""

    def runs_ahead(self, available: Container[Ref]) -> bool:
        """Whether the op belongs to the input pipeline. `available` are the source-only values before it."""
        return False

    def uses_servers(self, values: Mapping[Ref, Value]) -> bool:
        """Whether the op runs on servers too."""
        return False

    @property
    def is_split(self) -> bool:
        """Whether the op runs concurrently with later ops until its result is read."""
        return False

    def staged(self, nbytes: Mapping[Ref, int]) -> int:
        """The bytes of temporary memory that the op needs while it runs."""
        return 0

    def buffers(self, nbytes: Mapping[Ref, int]) -> int:
        """The bytes of all buffers of a collective; 0 for other ops."""
        return 0

    def work(self, nbytes: Mapping[Ref, int], ranks: Ranks) -> Work:
        """The query to a cost model. Ops that the compiler adds are priced as a copy of their results."""
        results = getter(type(self), self.WRITES)(self)
        return Work("copy", self.title, sum(nbytes.get(ref, 0) for ref in results))

    def check(self, types: ValueTypes) -> Violations:
        """Yield the rules that the op violates. If there are none, `transfer` gives its results."""
        del types
        yield from ()
