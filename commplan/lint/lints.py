"""The table of all lints, and `lint`, which runs them on a plan and drops ignored warnings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from commplan.diagnostics import Diagnostic
from commplan.dsl import Analysis, place
from commplan.lint import cost, input, usage
from commplan.lint.ignores import ABOUT_COMMENTS, ignores, without_ignored
from commplan.lint.subject import NOTHING, LintInputs, Subject, with_declared

Lint = Callable[[Subject], Iterable[Diagnostic]]  # finds the warnings of one code


def _always(subject: Subject, lines: range) -> bool:
    return True


# For each warning, the function that finds it, and whether its absence on given lines can be determined.
LINTS: dict[str, tuple[Lint, Callable[[Subject, range], bool]]] = {
    "CP1201": (usage.unused_values, _always),
    "CP1202": (usage.idle_outputs, lambda subject, lines: bool(subject.inputs.programs)),
    "CP1203": (cost.large_buckets, cost.are_buckets_known),
    "CP1204": (cost.costly_pins, cost.are_costs_known),
    "CP1205": (input.shared_draws, _always),
    "CP1206": (input.dropped_records, lambda subject, lines: bool(subject.inputs.records)),
    "CP1209": (usage.unused_declarations, _always),
    "CP1210": (input.unlike_loads, _always),
}


def lint(analysis: Analysis, inputs: LintInputs = NOTHING) -> tuple[Diagnostic, ...]:
    r"""Return the warnings of a plan, sorted by location; none if the plan has errors.

    Args:
        analysis: result of `commplan.dsl.analyze`.
        inputs: further information.

    Raises:
        CommplanError: the plan does not compile for `inputs`, or its topology is unreadable or too small.

    >>> from commplan import dsl
    >>> text = "plan p\naxis data = 2\ninput x : f32 per data\n"
    >>> text += "each step { y = reduce x over data by sum }\n"
    >>> [str(warning) for warning in lint(dsl.analyze(text, "p.plan"))][0].splitlines()[0]
    'p.plan:4:13: warning[CP1201]: the value `y` is never used'
    """
    if analysis.plan is None:
        return ()
    if analysis.plan.topology is not None and inputs.topology is None:
        inputs = with_declared(analysis.plan, inputs)
    subject = Subject(analysis.plan, analysis.tree, inputs)
    if inputs.is_bound and subject.schedule is None:
        subject.compiled()  # raises an error if the inputs do not fit
    ignored, wrong = ignores(analysis.tree.text, analysis.tree)
    warnings = list(_warnings(subject))
    judged = [ignore for ignore in ignored if LINTS[ignore.code][1](subject, ignore.lines)]
    unsuppressed = without_ignored(warnings, ignored, judged, analysis.plan.file)
    return tuple(sorted((*unsuppressed, *wrong), key=place))


def _warnings(subject: Subject) -> Iterator[Diagnostic]:
    """The warnings of all lints, including ignored ones."""
    for code, (find, _) in LINTS.items():
        assert code not in ABOUT_COMMENTS
        yield from find(subject)
