"""The base class of ops, and the query of an op to a cost model."""

from collections.abc import Callable, Container, Mapping
from typing import ClassVar, NamedTuple

import msgspec

from commplan.ir.hints import Algorithm
from commplan.ir.refs import Ref, getter
from commplan.ir.transfer import ValueTypes, Violations
from commplan.ir.values import Value

# A function from axes to the number of ranks along them.
Ranks = Callable[[tuple[str, ...]], int]


class Work(NamedTuple):
    """The query of an op to a cost model.

    Attributes:
        kind: The kind of a collective; `call` for a call of a function or source; or `copy`.
        label: The work in words.
        nbytes: The bytes of one rank's operand of a collective, or the bytes of a copy; 0 for a call.
        axes: The axes of a collective; else empty.
        algorithm: The algorithm of a collective.
        chunk: The bytes of a message of a collective; None for the default of the algorithm.
        root: The root of a collective, or the distance of a shift; 0 without one.
        form: How the backend runs a chunk program (`collective.Form`); None for its default.
        name: The function or source of a call; else empty.
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
    - `APPLIED_HINTS`: the hints with the role `Meaning` that the op applies. The verifier rejects an op with
      other ones.

    Fields that every op has, and that the classes do not describe again:

    - `result` or `results`: the values that it makes, and `operand` or `operands`: those that it reads.
    - `span`: the place in the plan of the stage that it carries out.
    - `after`: values that must exist before the op is issued, although it does not read them.
    - `lane`: the resource that it uses, for explanations and predicted times: `device`, `host_read`,
      `host_compute`, or `network`, with the levels that it crosses (`network:node`).

    Subclasses also define `transfer(types)`, the results that follow from the operands, and `meaning(env)`,
    their symbolic elements.
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
        """The name of the op in explanations: its tag, unless a subclass has another one."""
        return str(self.__struct_config__.tag)

    def detail(self, values: Mapping[Ref, Value]) -> str:
        """Details of the op in explanations, after its title; empty if there are none.

        `values` are the values of the phase by name, here and in `uses_servers`.
        """
        return ""

    def runs_ahead(self, available: Container[Ref]) -> bool:
        """Whether the op belongs to the input pipeline. `available` are the source-only values before it."""
        return False

    def uses_servers(self, values: Mapping[Ref, Value]) -> bool:
        """Whether the op exchanges messages with servers."""
        return False

    @property
    def is_split(self) -> bool:
        """Whether the op runs concurrently with later ops until its result is read."""
        return False

    def staged(self, nbytes: Mapping[Ref, int]) -> int:
        """The bytes of temporary memory that the op needs while it runs.

        `nbytes` are the bytes of one rank's copy of each value, here and in the next two methods.
        """
        return 0

    def buffers(self, nbytes: Mapping[Ref, int]) -> int:
        """The bytes of the operand, the result and the temporary memory of a collective; 0 for other ops."""
        return 0

    def work(self, nbytes: Mapping[Ref, int], ranks: Ranks) -> Work:
        """The query to a cost model: a copy of the results, unless a subclass has another one.

        `ranks` returns the number of ranks along axes.
        """
        results = getter(type(self), self.WRITES)(self)
        return Work("copy", self.title, sum(nbytes.get(ref, 0) for ref in results))

    def check(self, types: ValueTypes) -> Violations:
        """Yield the rules that the op violates. If there are none, `transfer` gives its results."""
        del types
        yield from ()
