"""The base classes of stages, which the checker, the lowering, `explain` and diagrams use.

Subclasses declare their syntax and fields, and define `meaning(env)`, the symbolic elements of the results.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, NamedTuple

import msgspec

from commplan.ir.hints import Reduction
from commplan.ir.refs import Ref, getter, name_of
from commplan.ir.roles import Meaning
from commplan.ir.stages.rules import Ranks, Violation
from commplan.ir.types import Over, Status
from commplan.ir.values import Leaf


def over(axes: tuple[str, ...], word: str = "over") -> str:
    """The source text of the clause `over AXES`, or `across AXES`."""
    return f"{word} {', '.join(axes)}"


class NumericArgument(NamedTuple):
    """The numeric argument of a stage after a keyword, such as `from 0`.

    Attributes:
        word: The keyword.
        role: The argument in words.
        least: The smallest valid literal.
        missing: The error if the argument is missing, and the fix.
        rule: A check of the number, for the axes of the stage and the numbers of ranks; None if every literal
            from `least` on is valid.
    """

    word: Literal["from", "by"]
    role: str
    least: int
    missing: tuple[str, str]
    rule: Callable[[int, tuple[str, ...], Ranks], Violation | None] | None = None


class BaseStage(msgspec.Struct, frozen=True):
    """Base class of stages.

    Class attributes:

    - `FORM`: the syntax. Stages that the checker adds have none.
    - `READS`, `WRITES`: the fields that name operands and results, in the order of `operands` and `results`.
    - `SCALARS`: the fields in `READS` that name scalars.
    - `AXES`: the fields that name axes.

    Fields that most stages have, and that the classes do not describe again:

    - `result` or `results`: the values that the stage makes; `operand` or `operands`: those that it reads.
    - `axes`: the axes after `over`.
    - `span`: the place of the stage in the plan.
    - `via`: the algorithm; None if the plan names none.
    - `hints`: the options in braces.
    """

    FORM: ClassVar[str]
    READS: ClassVar[tuple[str, ...]] = ("operand",)
    WRITES: ClassVar[tuple[str, ...]] = ("result",)
    SCALARS: ClassVar[tuple[str, ...]] = ()
    AXES: ClassVar[tuple[str, ...]] = ("axes",)

    def same_leaves(self) -> tuple[tuple[Ref, ...], ...]:
        """Groups of values with the same leaves before any split: operand and result of a move or sum.

        A stage whose results may have other leaves than its operands returns no group.
        """
        operands, results = getter(type(self), self.READS[:1]), getter(type(self), self.WRITES[:1])
        return ((*operands(self), *results(self)),)

    def function_call(self) -> tuple[str, tuple[Ref, ...], tuple[Ref, ...]] | None:
        """The function that the stage calls, its operands and its results; None if it calls none."""

    def sends(self) -> tuple[Ref, str | None] | None:
        """The value that the stage sends and its reduction operator, if any; None if it sends nothing."""
        return None

    @property
    def verb(self) -> str:
        """The tag of the class, which is the verb for stages of the language."""
        return str(self.__struct_config__.tag)

    def violation(self, ranks: Ranks) -> Violation | None:
        """The first violated rule of the stage, for the given numbers of ranks; None if there is none."""


class StageOverAxes(BaseStage, frozen=True):
    """`y = VERB x over AXES ..`: one operand over some axes.

    Class attributes:

    - `TAKES`: the valid placements of the operand along the axes.
    - `MAKES`: the placement of the result: the same on all ranks, split, or as the operand (`kept`).
    - `WHOLE`: whether the operand needs a leading dimension and may not be split.
    - `NUMBER`: the field of the numeric argument, and its syntax; None if there is none.
    - `COLLECTIVE`: the kind of collective that the stage becomes; None if it sends nothing or the compiler
      chooses.
    """

    TAKES: ClassVar[tuple[Status, ...]]
    MAKES: ClassVar[Literal["same", "split", "kept"]] = "same"
    WHOLE: ClassVar[bool] = False
    NUMBER: ClassVar[tuple[str, NumericArgument] | None] = None
    COLLECTIVE: ClassVar[str | None] = None

    result: Meaning[Ref]
    operand: Meaning[Ref]
    axes: Meaning[Over]

    def sends(self) -> tuple[Ref, str | None] | None:
        op: Reduction | None = getattr(self, "op", None)
        return (self.operand, op and op.name) if self.COLLECTIVE is not None else None

    def argument_text(self) -> str:
        """The source text after the axes, such as `by sum`; empty if there is none."""
        return ""

    def axes_text(self) -> str:
        """The source text of the axes, such as `over data`."""
        return over(self.axes)

    def source_parts(self) -> tuple[str, ...]:
        """The parts of the source text, without results and hints."""
        return (f"{self.verb} {name_of(self.operand)}", self.axes_text(), self.argument_text())

    def summary(self) -> tuple[str, ...]:
        """The operation and its axes, for diagrams, whose arrows show operands and results."""
        return (f"{self.verb} {self.argument_text()}".rstrip(), self.axes_text())

    def rank(self, ranks: Ranks) -> int | None:
        """The root of the collective, row-major over the axes, or the distance of a shift; else None."""
        return None

    def leaf_violation(self, leaves: Sequence[tuple[str, Leaf]], ranks: Ranks) -> Violation | None:
        """The first rule that the operand's leaves violate; None if there is none.

        Args:
            leaves: Pairs of the label of a leaf, for messages, and the leaf on one rank.
            ranks: The number of ranks along axes.
        """
        return None
