"""All lints of a text, without what its comments ignore."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from commplan.diagnostics import Diagnostic
from commplan.dsl import Analysis, place
from commplan.lint import cost, input, usage
from commplan.lint.ignores import ABOUT_COMMENTS, ignores, without_ignored
from commplan.lint.subject import NOTHING, Given, Subject, with_declared

Lint = Callable[[Subject], Iterable[Diagnostic]]


def _always(subject: Subject, lines: range) -> bool:
    return True


# Each warning with what finds it, and whether enough is known to say that these lines do not have it.
LINTS: dict[str, tuple[Lint, Callable[[Subject, range], bool]]] = {
    "CP1201": (usage.unused_values, _always),
    "CP1202": (usage.idle_outputs, lambda subject, lines: bool(subject.given.programs)),
    "CP1203": (cost.large_buckets, cost.are_buckets_known),
    "CP1204": (cost.costly_pins, cost.are_costs_known),
    "CP1205": (input.shared_draws, _always),
    "CP1206": (input.dropped_records, lambda subject, lines: bool(subject.given.records)),
    "CP1209": (usage.unused_declarations, _always),
    "CP1210": (input.unlike_loads, _always),
}


def lint(analysis: Analysis, given: Given = NOTHING) -> tuple[Diagnostic, ...]:
    """The warnings of a plan, by place; none of one with errors.

    analysis: of `commplan.dsl.analyse`; given: what is known beside it. Raises CommplanError where
    the plan does not compile for what is given, or its topology cannot be read or is too small.

    >>> from commplan import dsl
    >>> text = "plan p\\naxis data = 2\\ninput x : f32 per data\\n"
    >>> text += "each step { y = reduce x over data by sum }\\n"
    >>> [str(warning) for warning in lint(dsl.analyse(text, "p.plan"))][0].splitlines()[0]
    'p.plan:4:13: warning[CP1201]: the value `y` is never used'
    """
    if analysis.plan is None:
        return ()
    if analysis.plan.topology is not None and given.topology is None:
        given = with_declared(analysis.plan, given)
    subject = Subject(analysis.plan, analysis.tree, given)
    if given.is_bound and subject.schedule is None:
        subject.compiled()  # what does not fit is an error, and no warning
    known, wrong = ignores(analysis.tree.text, analysis.tree)
    warnings = list(_warnings(subject))
    judged = [each for each in known if LINTS[each.code][1](subject, each.lines)]
    left = without_ignored(warnings, known, judged, analysis.plan.file)
    return tuple(sorted((*left, *wrong), key=place))


def _warnings(subject: Subject) -> Iterator[Diagnostic]:
    for code, (find, _) in LINTS.items():
        assert code not in ABOUT_COMMENTS
        yield from find(subject)
