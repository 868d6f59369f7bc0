"""`commplan completion`: completions for a shell, made from the command's own arguments."""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

from commplan.cli.arguments import parser
from commplan.cli.console import Console


class _Flag(NamedTuple):
    names: tuple[str, ...]
    choices: tuple[str, ...]
    takes_value: bool
    help: str


class _Verb(NamedTuple):
    name: str
    help: str
    flags: tuple[_Flag, ...]
    words: tuple[str, ...]  # of its positional argument, where they are fixed
    files: bool


def run(args: argparse.Namespace, console: Console) -> int:
    """Print the script for `args.shell`."""
    verbs = _verbs()
    match args.shell:
        case "bash":
            console.put(_bash(verbs))
        case "zsh":
            console.put(f"#compdef commplan\nautoload -U +X bashcompinit && bashcompinit\n{_bash(verbs)}")
        case _:
            console.put(_fish(verbs))
    return 0


def _verbs() -> list[_Verb]:
    actions: list[Any] = parser()._actions  # pyright: ignore[reportPrivateUsage]  (argparse has no public way)
    choose = next(action for action in actions if isinstance(action.choices, dict))
    helps = {action.dest: action.help or "" for action in choose._choices_actions}
    return [_verb(name, helps[name], verb) for name, verb in choose.choices.items()]


def _verb(name: str, summary: str, verb: argparse.ArgumentParser) -> _Verb:
    actions = verb._actions  # pyright: ignore[reportPrivateUsage]
    flags = tuple(
        _Flag(tuple(a.option_strings), tuple(map(str, a.choices or ())), a.nargs != 0, a.help or "")
        for a in actions
        if a.option_strings
    )
    positional = [a for a in actions if not a.option_strings]
    words = tuple(str(word) for a in positional for word in a.choices or ())
    if name == "new":
        from commplan.cli.verb_new import templates

        words = tuple(templates())
    return _Verb(name, summary, flags, words, bool(positional) and not words)


def _bash(verbs: list[_Verb]) -> str:
    cases: list[str] = []
    for verb in verbs:
        values = [_bash_value(flag) for flag in verb.flags if flag.choices or flag.takes_value]
        words = " ".join([*(name for flag in verb.flags for name in flag.names), *verb.words])
        chosen = '        case "$prev" in\n' + "\n".join(values) + "\n        esac\n" if values else ""
        cases.append(f"    {verb.name})\n{chosen}        offered='{words}';;")
    names = " ".join(verb.name for verb in verbs)
    body = "\n".join(cases)
    return f"""_commplan() {{
    local cur prev offered
    cur="${{COMP_WORDS[COMP_CWORD]}}"
    prev="${{COMP_WORDS[COMP_CWORD-1]}}"
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W '{names} --help --version' -- "$cur"))
        return
    fi
    case "${{COMP_WORDS[1]}}" in
{body}
    *) offered='';;
    esac
    case "$cur" in
    -*) COMPREPLY=($(compgen -W "$offered" -- "$cur"));;
    *) COMPREPLY=($(compgen -W "$offered" -- "$cur") $(compgen -f -- "$cur"));;
    esac
}}
complete -o filenames -F _commplan commplan
"""


def _bash_value(flag: _Flag) -> str:
    """What completes the value of a flag: its choices, else files."""
    how = f"-W '{' '.join(flag.choices)}'" if flag.choices else "-f"
    return f'            {"|".join(flag.names)}) COMPREPLY=($(compgen {how} -- "$cur")); return;;'


def _fish(verbs: list[_Verb]) -> str:
    lines = ["complete -c commplan -e"]
    for verb in verbs:
        lines.append(
            f"complete -c commplan -n __fish_use_subcommand -f -a {verb.name} -d {_quoted(verb.help)}"
        )
        seen = f"-n '__fish_seen_subcommand_from {verb.name}'"
        if verb.words:
            lines.append(f"complete -c commplan {seen} -f -a {_quoted(' '.join(verb.words))}")
        for flag in verb.flags:
            names = " ".join(
                f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in flag.names
            )
            value = " -r" if flag.takes_value else ""
            value = f" -x -a {_quoted(' '.join(flag.choices))}" if flag.choices else value
            lines.append(f"complete -c commplan {seen} {names}{value} -d {_quoted(flag.help)}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
