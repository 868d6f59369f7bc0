"""Vim's syntax of plans."""

from __future__ import annotations

from collections.abc import Iterable

from commplan.dsl.check.builtins import KEYS as BUILTIN_KEYS
from commplan.dsl.check.clauses.ops import OPS
from commplan.dsl.check.clauses.options import FLOATS, OPTIONS
from commplan.dsl.check.clauses.via import ALGORITHMS
from commplan.dsl.check.stages.loads import TAILS, VISITS
from commplan.dsl.check.stages.servers import MODES
from commplan.dsl.check.types import FLAGS, PLACES, TYPES
from commplan.dsl.lexer import CLAUSES, DECLARES, HEADS, UNITS, VERBS
from commplan.highlight.categories import ARGUMENTS, OPTION_WORDS, PARAMETERS

_LINKS = {
    "planComment": "Comment",
    "planDeclaration": "StorageClass",
    "planPhase": "Keyword",
    "planStage": "Statement",
    "planClause": "Keyword",
    "planType": "Type",
    "planConstant": "Constant",
    "planPlace": "Constant",
    "planFunction": "Function",
    "planAlgorithm": "Special",
    "planOperator": "Special",
    "planOption": "Identifier",
    "planNumber": "Number",
    "planUnit": "Type",
    "planText": "String",
    "planMark": "Operator",
}


def syntax() -> str:
    """The file `syntax/plan.vim`."""
    name = r"\h\w*"
    constants = (*VISITS, *TAILS)
    lines = [
        '" Vim syntax file of commplan plans, written by `make grammars` from the lists of the language.',
        'if exists("b:current_syntax")',
        "  finish",
        "endif",
        "",
        "syntax case match",
        "syntax iskeyword @,48-57,_",
        r'syntax match planNumber "\v<\d[0-9_]*(\.[0-9_]*)?([eE][+-]?\d+)?" nextgroup=planUnit skipwhite',
        rf'syntax match planUnit "\v({_any(UNITS)})>" contained',
        r'syntax match planMark "->\|[=?]"',
        f"syntax keyword planDeclaration {_lower(DECLARES - {'FN'})}",
        "syntax keyword planDeclaration fn nextgroup=planFunction skipwhite",
        f"syntax keyword planPhase {_lower(HEADS)}",
        r'syntax match planPhase "\v(<at\s+)@<=start>|(<each\s+)@<=step>|(<every\s+\d+\s+)@<=steps>"',
        r'syntax match planPhase "\v(<steps\s+)@<=in>|(<in\s+\d+\s+)@<=fragments>"',
        r'syntax match planPhase "\v(<(steps|fragments)\s+)@<=hidden>|(<hidden\s+)@<=under>"',
        r'syntax match planPhase "\v(<under\s+\d+\s+)@<=steps?>"',
        f"syntax keyword planStage {_lower(VERBS - {'MAP'})}",
        "syntax keyword planStage map nextgroup=planFunction skipwhite",
        f"syntax keyword planClause {_lower(CLAUSES - {'VIA', 'BY', 'VISIT', 'TAIL', 'ON'})} output",
        r'syntax match planClause "\v<batch>\ze\s*[0-9[]"',
        "syntax keyword planClause via nextgroup=planAlgorithm skipwhite",
        "syntax keyword planClause by nextgroup=planOperator skipwhite",
        "syntax keyword planClause visit tail nextgroup=planConstant skipwhite",
        "syntax keyword planClause on nextgroup=planPlace skipwhite",
        rf'syntax match planClause "\v((:\s*)@<={name}(\[[^]]*\])?\s+)@<=same>"',
        rf'syntax match planFunction "\v<{name}>" contained',
        rf'syntax match planFunction "\v(<exchange>.*<with\s+)@<={name}>"',
        rf'syntax match planFunction "\v(<fn\s.*\=\s*)@<=({_any(BUILTIN_KEYS)})>"',
        rf'syntax match planType "\v((:|,|\(|-\>)\s*)@<=({_any(TYPES)})>"',
        rf'syntax match planConstant "\v<({_any(constants)})>" contained',
        rf'syntax match planPlace "\v<({_any(PLACES)})>(\s+({_any(FLAGS)})>)*" contained',
        rf'syntax match planAlgorithm "\v<({_any(ALGORITHMS)})>" contained',
        rf'syntax match planAlgorithm "\v(\=\s*)@<=({_any(ALGORITHMS)})>"',
        rf'syntax match planOperator "\v<({_any((*OPS, *MODES))})>" contained',
        rf'syntax match planOption "\v<({_any((*OPTIONS, *ARGUMENTS))})>\ze\s*\="',
        rf'syntax match planOption "\v(<fn\s.*)@<=<({_any(PARAMETERS)})>\ze\s*\="',
        rf'syntax match planConstant "\v(\=\s*)@<=({_any((*OPTION_WORDS, *FLOATS))})>"',
        rf'syntax match planType "\v(<dtype\s*\=\s*)@<=({_any(TYPES)})>"',
        r"""syntax match planText /"[^"]*"/""",
        'syntax match planComment "#.*$" contains=@Spell',
        "",
        *(f"highlight default link {group} {target}" for group, target in _LINKS.items()),
        "",
        'let b:current_syntax = "plan"',
    ]
    return "\n".join(lines) + "\n"


def _any(words: Iterable[str]) -> str:
    return "|".join(sorted(words, key=lambda word: (-len(word), word)))


def _lower(words: Iterable[str]) -> str:
    return " ".join(sorted(word.lower() for word in words))
