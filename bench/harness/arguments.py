"""Arguments of benches: the parser of a command, and types of arguments."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def program_parser(program: str, summary: str | None) -> argparse.ArgumentParser:
    """The parser of `python -m bench.PROGRAM`. summary: the docstring of the program."""
    description = (summary or "").split("\n")[0]
    return argparse.ArgumentParser(prog=f"python -m bench.{program}", description=description)


def size(text: str) -> int:
    """4B, 16KiB, 4MiB -> bytes."""
    digits = text.rstrip("BKMGi ")
    unit = text[len(digits) :].strip() or "B"
    if unit not in UNITS or not digits.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}: write sizes as 4B, 16KiB or 4MiB")
    return int(digits) * UNITS[unit]


def names(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """A type of arguments: some of the names `known`, separated by commas."""

    def parse(text: str) -> tuple[str, ...]:
        chosen = tuple(text.split(","))
        unknown = [name for name in chosen if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not among {', '.join(known)}")
        return chosen

    return parse
