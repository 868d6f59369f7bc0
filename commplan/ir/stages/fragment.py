"""The stages `pick` and `merge`, which the checker adds to phases that work on fragments of trees."""

import msgspec

from commplan.diagnostics import Span
from commplan.ir.refs import Ref, name_of
from commplan.ir.roles import Meaning, Presentation
from commplan.ir.stages.base import BaseStage
from commplan.ir.symbolic.deferred import Interpretation, steps


class _Division(msgspec.Struct, frozen=True):
    """The fields of stages and ops that cut values into fragments and put them together.

    Attributes:
        fragments: The number of fragments; with 1, values are whole. See `ir.fragments` for the layout.
        rows: The axes whose ranks own a row of each leaf; empty if leaves have a single row.
        late: Whether the input is read at the end of a call, after the steps that hide the exchange.
        span: The place in the plan of the name that is read or bound.
    """

    fragments: Meaning[int]
    rows: Meaning[tuple[str, ...]]
    late: Meaning[bool]
    span: Presentation[Span]

    def text(self, ref: Ref) -> str:
        """The part of a value, and when it is read, in words."""
        part = f"1 of {self.fragments} fragments of " if self.fragments > 1 else ""
        return f"{part}{name_of(ref)}{' at the end' if self.late else ''}"

    @property
    def label(self) -> str:
        """The division in the names of symbolic calls."""
        rows = f" of rows over {', '.join(self.rows)}" if self.rows else ""
        return f"1 of {self.fragments} fragments{rows}{' at the end' if self.late else ''}"


class PickFields(_Division, frozen=True):
    """The fields and semantics of `pick` in a plan and in a schedule.

    Attributes:
        result: The current fragment of `operand`.
        operand: The tree, an input or state.
    """

    READS = ("operand",)
    WRITES = ("result",)

    result: Meaning[Ref]
    operand: Meaning[Ref]

    def meaning(self, env: Interpretation) -> None:
        piece = steps.picked(env, env.get(self.operand), env.values[self.result], self.label)
        env.put(self.result, piece)


class MergeFields(_Division, frozen=True):
    """The fields and semantics of `merge` in a plan and in a schedule.

    Attributes:
        result: `whole`, with its current fragment replaced by `piece`.
        whole: The tree, an input or state.
        piece: The new content of the fragment.
    """

    READS = ("whole", "piece")
    WRITES = ("result",)

    result: Meaning[Ref]
    whole: Meaning[Ref]
    piece: Meaning[Ref]

    def meaning(self, env: Interpretation) -> None:
        whole, piece = env.get(self.whole), env.get(self.piece)
        env.put(self.result, steps.merged(env, whole, piece, env.values[self.result], self.label))


class PickStage(PickFields, BaseStage, frozen=True, tag="pick"):
    """The current fragment of an input or state, or the whole value at the end of a call."""

    AXES = ("rows",)

    def same_leaves(self) -> tuple[tuple[Ref, ...], ...]:
        return ()

    def source_parts(self) -> tuple[str, ...]:
        return (self.text(self.operand),)

    def summary(self) -> tuple[str, ...]:
        return (self.text(self.operand),)


class MergeStage(MergeFields, BaseStage, frozen=True, tag="merge"):
    """An input or state whose current fragment is replaced."""

    AXES = ("rows",)

    def same_leaves(self) -> tuple[tuple[Ref, ...], ...]:
        return ((self.whole, self.result),)

    def source_parts(self) -> tuple[str, ...]:
        return (f"{self.text(self.whole)} replaced",)

    def summary(self) -> tuple[str, ...]:
        return (f"replace {self.text(self.whole)}",)
