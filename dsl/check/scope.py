"""The names that are visible in one phase, and the values bound in it.

The checks of stages read their operands from the scope, and bind their results in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from msgspec.structs import replace

from commplan.diagnostics import Fix, Note, Span, listed
from commplan.dsl import ast
from commplan.dsl.check.context import INPUT, SOURCE, STATE, CheckContext, all_known
from commplan.dsl.check.fragments import Fragments, division_of
from commplan.ir.plan import AxisKind, Binding, Ref, Stage, Value
from commplan.ir.types import BytesType, Placement, RecordsType, Type

BAD = None  # the value of a name that a statement with errors bound


class PhaseScope:
    """The scope of one phase.

    Args:
        ctx: The state of the check.
        decl: The phase.
        title: The header of the phase in words, for messages.

    Attributes:
        stages: The stages so far.
        fragments: The fragments of the phase; None if it works on whole values at once.
        outputs: The outputs so far, without those with errors.
        updated: The states that the phase binds, by name, including those that are bound to BAD.
        env: By name, the value that a statement of this phase has bound to it, or BAD. Contains also the
            fragments of inputs and states that were read, and BAD for names that were reported as unknown.
        clocks: By ensemble whose members load at their own rates in this phase: the location of the rates.
        bad_same: By the location of a statement with errors: the axes over which its result is the same
            despite the errors, with the location of the result.
    """

    def __init__(self, ctx: CheckContext, decl: ast.PhaseDecl, title: str) -> None:
        self.ctx = ctx
        self.title = title
        self.is_start = decl.kind == "start"
        self.stages: list[Stage] = []
        division = division_of(ctx, decl)
        self.fragments = None if division is None else Fragments(ctx, division, self.stages)
        self.outputs: list[Binding] = []
        self.output_spans: dict[str, Span] = {}  # by name: the first `output` of it
        self.output_names: set[str] = set()  # of all `output` lines so far
        self.updated: set[str] = set()
        # For each value, the axes over which a stage made it the same, and the location of that stage.
        self.made_same: dict[Ref, dict[str, Span]] = {}
        self.bad_at: dict[str, Span] = {}  # for each name, the last statement with errors that bound it
        self.bad_same: dict[Span, dict[str, Span]] = {}
        self.clocks: dict[str, Span] = {}
        self.env: dict[str, Value | None] = {}
        self.lost = False  # whether some target could not be parsed
        self._later = _targets(decl)
        for statement in decl.body:
            if isinstance(statement, ast.StageStmt) and isinstance(statement.expr, ast.LoadExpr):
                over = statement.expr.batch.over
                axis = ctx.axes.get(over.text) if over else None
                if over is not None and axis is not None and axis.kind is AxisKind.ENSEMBLE:
                    self.clocks.setdefault(over.text, statement.expr.batch.span)

    def operand(self, name: ast.Name) -> Value | None:
        """The current value of `name`, or BAD if it has an error. The error is reported once."""
        text, ctx = name.text, self.ctx
        if text in self.env:
            return self.env[text]
        if text in ctx.unknown or text in ctx.doubtful_states or self.lost:
            return BAD
        entry = ctx.inputs.get(text) or (None if self.is_start else ctx.states.get(text))
        if entry is not None:
            if self.fragments is not None:
                self.env[text] = entry = self.fragments.pick(name, entry)
            return entry
        self._report_unbound(name)
        self.env[text] = BAD
        return BAD

    def operands(self, names: Sequence[ast.Name]) -> tuple[Value, ...] | None:
        """The current values of all `names`, or None if one of them has an error."""
        return all_known([self.operand(name) for name in names])

    def _report_unbound(self, name: ast.Name) -> None:
        """Report a name that is not bound and is no input or readable state, unless it was reported."""
        ctx, text = self.ctx, name.text
        kind = ctx.kind_of(text)
        if text in ctx.states:
            self._report_unset(name)
        elif kind is not None:
            message = f"`{text}` is {kind}, expected a value"
            hint = f"`load {text} ...` makes values of it" if kind == SOURCE else None
            ctx.error("CP0103", message, name.span, ctx.declaration(text), hint)
        elif not ctx.note_unknown(text):
            self._report_unknown(name)

    def _report_unset(self, name: ast.Name) -> None:
        """Report a state that is read in `at start` before it is bound."""
        ctx, text = self.ctx, name.text
        ctx.unset_states.add(text)
        near = ctx.near(text, (name for name in self.env if name not in ctx.declared))
        near_binding = ctx.bound.get(near or "")
        message = f"the state `{text}` is read before it is set"
        unset = Note(f"`{text}` has no value when `at start` begins", ctx.states[text].span)
        remedy = "a state gets its first value in `at start`: bind its name there first"
        misspelled = (
            Note(f"`{near}` is bound here: did you mean `{text}`?", near_binding[1]) if near_binding else None
        )
        ctx.error("CP0504", message, name.span, unset, remedy, misspelled)

    def _report_unknown(self, name: ast.Name) -> None:
        """Report a name that is neither declared nor bound so far."""
        ctx, text = self.ctx, name.text
        near, fix = ctx.near(text, chain(self.env, ctx.inputs, ctx.states)), None
        notes: list[Note] = []
        if later := self._later.get(text):
            notes.append(Note(f"`{text}` is bound only here, further down", later))
        elif text in ctx.bound:
            title, span = ctx.bound[text]
            message = f"`{text}` is bound in `{title}`: only states carry over to other phases"
            notes.append(Note(message, span))
        has_value = near in self.env or near in ctx.inputs or self.title != "at start"
        if near is not None and not notes and has_value and not self.output_names >= {text, near}:
            fix = Fix(f"write `{near}`", name.span, near)
        if near in ctx.states:
            ctx.misspelt_states.add(near)
            notes.append(Note(f"the state `{near}` is declared here", ctx.states[near].span))
        ctx.error("CP0102", f"there is no value `{text}` here", name.span, *notes, fix=fix)

    def check_targets(self, targets: Sequence[ast.Name]) -> None:
        """Report targets that are bound twice, or that are declared as something other than a value."""
        names_before: set[str] = set()
        for name in targets:
            kind = self.ctx.kind_of(name.text)
            if name.text in names_before:
                self.ctx.error("CP0111", f"`{name.text}` is bound twice in one statement", name.span)
            elif kind is not None and kind not in (INPUT, STATE):
                message = f"`{name.text}` is {kind}: a value needs another name"
                self.ctx.error("CP0103", message, name.span, self.ctx.declaration(name.text))
            names_before.add(name.text)

    def bind(self, name: ast.Name, type_: Type, placement: Placement) -> Ref:
        """Bind `name` to a new value, and return the value's id.

        A state keeps its declared type and placement. If the new value does not have them, this is reported
        and the name is bound to BAD.
        """
        state = self.ctx.states.get(name.text)
        fits = state is not None and self._fits(name, state, type_, placement)
        if state is not None and fits:
            type_, placement = state.type, state.placement
        value = self.ctx.new_value(name, type_, placement)
        self.env[name.text] = value if state is None or fits else BAD
        self.bad_at.pop(name.text, None)
        self._note_bound(name.text, name.span)
        return value.id

    def bind_results(
        self, names: Sequence[ast.Name], types: Sequence[Type], placement: Placement
    ) -> tuple[Ref, ...]:
        """Bind the results of a call, and return their ids.

        After a result that does not fit its state, further ones are not reported.
        """
        refs: list[Ref] = []
        for name, type_ in zip(names, types, strict=True):
            refs.append(self.bind(name, type_, placement))
            if name.text in self.ctx.doubtful_states:
                self.ctx.doubtful_states.update(each.text for each in names if each.text in self.ctx.states)
        return tuple(refs)

    def bind_bad(self, names: Iterable[str], span: Span) -> None:
        """Bind the targets of a statement with errors to BAD, so that their uses are not checked.

        `span` is the location of the statement.
        """
        for name in names:
            self.env[name] = BAD
            self.bad_at[name] = span
            self._note_bound(name, span)

    def bind_unparsed(self, statement: ast.BadStmt) -> None:
        """Bind the names that a statement with syntax errors may bind, and count its states as updated.

        If its targets cannot be parsed either, it may bind any name.
        """
        targets, complete = self.ctx.recovery.targets(statement)
        words = self.ctx.recovery.words(statement)
        for state in self.ctx.states:
            if state in words or not complete:
                self._note_bound(state, statement.span)
        if not complete:
            self.lost = True
            self.env.clear()
        self.bind_bad(targets, statement.span)

    def mark_same(self, result: Ref, operand: Ref, axes: Iterable[str], span: Span) -> None:
        """Record that the stage at `span` made `result` the same over `axes`.

        The axes over which its operand was made the same are added.
        """
        self.made_same[result] = self.made_same.get(operand, {}) | dict.fromkeys(axes, span)

    def same_over(self, name: ast.Name, operand: Value | None) -> dict[str, Span]:
        """The axes over which `name` was made the same in this phase, with the locations of the stages.

        `operand` is its value, or None if a statement with errors bound it.
        """
        if operand is not None:
            return self.made_same.get(operand.id, {})
        bad = self.bad_at.get(name.text)
        return {} if bad is None else self.bad_same.get(bad, {})

    def _note_bound(self, name: str, span: Span) -> None:
        """Record that `name` is bound at `span`, and if it is a state, that it is set or updated."""
        self.ctx.bound.setdefault(name, (self.title, span))
        if self.ctx.kind_of(name) != STATE:
            return
        (self.ctx.set_states if self.is_start else self.ctx.updated_states).add(name)
        self.updated.add(name)

    def _fits(self, name: ast.Name, state: Value, type_: Type, placement: Placement) -> bool:
        """Whether a value of this type and placement may be bound to a state; reports if it may not."""
        if name.text in self.ctx.doubtful_states:
            return False  # reported: the declaration or the first new value is wrong
        # A value that is the same on all ranks may be stored on a server. The opposite takes a stage.
        stored = replace(placement, server=state.placement.server)
        if type_ != state.type:
            code, aspect = "CP0505", "type"
            mismatch = f"is {state.type}, found a new value of type {type_}"
        elif placement == state.placement or (placement.server is None and stored == state.placement):
            return True
        else:
            code, aspect = "CP0506", "placement"
            mismatch = f"is placed `{state.placement}`, found a new value placed `{placement}`"
        self.ctx.doubtful_states.add(name.text)
        note = Note(f"`{name.text}` is declared here: its {aspect} never changes", state.span)
        self.ctx.error(code, f"the state `{name.text}` {mismatch}", name.span, note)
        return False

    def output(self, statement: ast.OutputStmt) -> None:
        """Check the names of one `output` line and add them to the outputs."""
        self.output_names.update(name.text for name in statement.names)
        for name in statement.names:
            if name.text in self.output_spans:
                message = f"`{name.text}` is an output already"
                self.ctx.error("CP0509", message, name.span, Note("first here", self.output_spans[name.text]))
                continue
            self.output_spans[name.text] = name.span
            if self.fragments is not None:
                self.fragments.read((name,), self.env, late=True)
            value = self.operand(name)
            if value is not None and self._may_leave(name, value):
                if self.fragments is not None:
                    value = self.fragments.merge(name.text, value, name.span)
                self.outputs += [Binding(name.text, value.id)] if value else []

    def updates(self) -> tuple[Binding, ...]:
        """The states that the phase binds, in the order of their declarations, with their final values.

        States that are bound to BAD are omitted.
        """
        names = sorted(
            self.updated.intersection(self.ctx.states), key=lambda name: self.ctx.states[name].span
        )
        values = {name: value for name in names if (value := self.env.get(name))}
        if self.fragments is not None:
            values = {name: self.fragments.merge(name, value, value.span) for name, value in values.items()}
        return tuple(Binding(name, value.id) for name, value in values.items() if value)

    def _may_leave(self, name: ast.Name, value: Value) -> bool:
        """Whether a value may be an output; reports if it may not."""
        if value.placement.partial:
            message = f"the output `{name.text}` is still partial over {listed(value.placement.partial)}"
            note = "reduce it first: outside its phase an unreduced term means nothing"
            self.ctx.error("CP0507", message, name.span, value, note)
            return False
        if isinstance(value.type, RecordsType) and isinstance(value.type.element, BytesType):
            note = "records of variable length have no shape: decode them with a fn on the host first"
            self.ctx.error("CP0508", f"the output `{name.text}` is `bytes`", name.span, value, note)
            return False
        return True


def _targets(decl: ast.PhaseDecl) -> dict[str, Span]:
    """The names that a phase binds, with the location of the first binding."""
    spans: dict[str, Span] = {}
    for statement in decl.body:
        if isinstance(statement, ast.StageStmt | ast.BadStmt):
            for name in statement.targets:
                spans.setdefault(name.text, name.span)
    return spans
