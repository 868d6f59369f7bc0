from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, NamedTuple

import msgspec

from commplan.ir.hints import Reduction
from commplan.ir.refs import Ref, getter, name_of
from commplan.ir.roles import Meaning
from commplan.ir.stages.rules import Ranks, Violation
from commplan.ir.types import Over
from commplan.ir.values import Leaf


def over(axes: tuple[str, ...], word: str = "over") -> str:
    return f"{word} {', '.join(axes)}"


class Number(NamedTuple):
    """The number that a stage is written with, behind a word: `from 0`. least: the smallest that may be
    written. missing: what is wrong without it, and how it is put right. rule: what the number must keep to,
    of the axes and their ranks."""

    word: Literal["from", "by"]
    what: str
    least: int
    missing: tuple[str, str]
    rule: Callable[[int, tuple[str, ...], Ranks], Violation | None] | None = None


class BaseStage(msgspec.Struct, frozen=True):
    """What every stage says of itself beside its fields.

    FORM: how it is written.

    READS, WRITES: the fields that name the values that it reads and makes, in the order in which `operands`
    and `results` give them. SCALARS: those of READS that name scalars. AXES: the fields that name axes.
    """

    FORM: ClassVar[str]
    READS: ClassVar[tuple[str, ...]] = ("operand",)
    WRITES: ClassVar[tuple[str, ...]] = ("result",)
    SCALARS: ClassVar[tuple[str, ...]] = ()
    AXES: ClassVar[tuple[str, ...]] = ("axes",)

    def alike(self) -> tuple[tuple[Ref, ...], ...]:
        """Values that have the same leaves before any cut, in groups: what goes in and comes out of a stage
        that moves or reduces."""
        operands, results = getter(type(self), self.READS[:1]), getter(type(self), self.WRITES[:1])
        return ((*operands(self), *results(self)),)

    def called(self) -> tuple[str, tuple[Ref, ...], tuple[Ref, ...]] | None:
        """The function that it calls, what with, and what that makes."""

    def sends(self) -> tuple[Ref, str | None] | None:
        """The value that it sends, and `sum`, `mean`, `max` or `min` if it is reduced; None if nothing is
        sent."""
        return None

    @property
    def verb(self) -> str:
        return str(self.__struct_config__.tag)

    def violation(self, ranks: Ranks) -> Violation | None:
        """The first rule of the stage that does not hold, axes having as many ranks as `ranks` says."""


class StageOverAxes(BaseStage, frozen=True):
    """`y = VERB x over AXES ..`: one operand over some axes.

    TAKES: how the operand may lie along them. MAKES: how the result does, the same on all ranks, cut, or as
    the operand. WHOLE: the operand has a leading dimension and may not be cut. NUMBER: the field that is a
    number, and how that is written. COLLECTIVE: the kind of collective that it becomes; none where nothing is
    sent, or the compiler decides how.
    """

    TAKES: ClassVar[tuple[Literal["same", "per", "partial", "split"], ...]]
    MAKES: ClassVar[Literal["same", "split", "kept"]] = "same"
    WHOLE: ClassVar[bool] = False
    NUMBER: ClassVar[tuple[str, Number] | None] = None
    COLLECTIVE: ClassVar[str | None] = None

    result: Meaning[Ref]
    operand: Meaning[Ref]
    axes: Meaning[Over]

    def sends(self) -> tuple[Ref, str | None] | None:
        op: Reduction | None = getattr(self, "op", None)
        return (self.operand, op and op.name) if self.COLLECTIVE is not None else None

    def how(self) -> str:
        """What is written of it behind its axes, such as `by sum`."""
        return ""

    def where(self) -> str:
        return over(self.axes)

    def written(self) -> tuple[str, ...]:
        """Close to how it is written, without its results and hints."""
        return (f"{self.verb} {name_of(self.operand)}", self.where(), self.how())

    def said(self) -> tuple[str, ...]:
        """What it does, then where: for drawings, which show in arrows what goes in and comes out."""
        return (f"{self.verb} {self.how()}".rstrip(), self.where())

    def rank(self, ranks: Ranks) -> int | None:
        """The rank, counted row-major over the axes, that its collective singles out, if it does."""
        return None

    def misfit(self, leaves: Sequence[tuple[str, Leaf]], ranks: Ranks) -> Violation | None:
        """The first rule that the operand's leaves, each with what it is called, break."""
        return None
