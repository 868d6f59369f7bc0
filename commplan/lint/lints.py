"""All lints of a text, without what its comments ignore."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from commplan.diagnostics import Diagnostic
from commplan.dsl import Analysis, place
from commplan.lint import cost, input, usage
from commplan.lint.ignores import ABOUT_COMMENTS, ignores, without_ignored
from commplan.lint.subject import NOTHING, Given, Subject

Lint = Callable[[Subject], Iterable[Diagnostic]]

# Each warning with what finds it, and whether enough is known to say that there is none.
LINTS: dict[str, tuple[Lint, Callable[[Given], bool]]] = {
    "CP1201": (usage.unused_values, lambda given: True),
    "CP1202": (usage.idle_outputs, lambda given: bool(given.programs)),
    "CP1203": (cost.large_buckets, lambda given: given.shapes is not None),
    "CP1204": (cost.costly_pins, lambda given: given.topology is not None),
    "CP1205": (input.shared_draws, lambda given: True),
    "CP1206": (input.dropped_records, lambda given: bool(given.records)),
    "CP1209": (usage.unused_declarations, lambda given: True),
}


def lint(analysis: Analysis, given: Given = NOTHING) -> tuple[Diagnostic, ...]:
    """The warnings of a plan, by place; none of one with errors.

    analysis: of `commplan.dsl.analyse`; given: what is known beside it. Raises CommplanError where
    the plan does not compile for what is given.

    >>> from commplan import dsl
    >>> text = "plan p\\naxis data = 2\\ninput x : f32 per data\\n"
    >>> text += "each step { y = reduce x over data by sum }\\n"
    >>> [str(warning) for warning in lint(dsl.analyse(text, "p.plan"))][0].splitlines()[0]
    'p.plan:4:13: warning[CP1201]: the value `y` is never used'
    """
    if analysis.plan is None:
        return ()
    subject = Subject(analysis.plan, analysis.tree, given)
    if given.is_bound and given.topology is None:
        subject.compiled()  # what does not fit is an error, and no warning
    known, wrong = ignores(analysis.tree.text, analysis.tree)
    warnings = list(_warnings(subject))
    codes = {code for code, (_, is_known) in LINTS.items() if is_known(given)}
    left = without_ignored(warnings, known, codes, analysis.plan.file)
    return tuple(sorted((*left, *wrong), key=place))


def _warnings(subject: Subject) -> Iterator[Diagnostic]:
    for code, (find, _) in LINTS.items():
        assert code not in ABOUT_COMMENTS
        yield from find(subject)
