"""The arguments of the command and its help. Nothing here does any work."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from commplan import __version__

EMITS = ("schedule", "plan", "jaxpr", "hlo", "dot", "mermaid")
BACKENDS = ("jax", "mpi")
SHELLS = ("bash", "zsh", "fish")
_TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_SIZES = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_PLAN = "a .plan file, or - for stdin"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments. Raises SystemExit: 0 for --help and --version, 2 for a mistake in usage."""
    root = parser()
    if not argv:
        root.print_help(sys.stderr)
        raise SystemExit(2)
    arguments = root.parse_args(argv)
    _one_subject(root, arguments)
    return arguments


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(
        prog="commplan",
        description="Compile communication plans for training.",
        epilog="Exit codes: 0 all is well, 1 problems with what was given, 2 usage or internal failure.",
        allow_abbrev=False,
    )
    root.add_argument("--version", action="version", version=f"commplan {__version__}")
    verbs = root.add_subparsers(dest="verb", metavar="VERB", required=True)
    _check(verbs)
    _fmt(verbs)
    _compile(verbs)
    _explain(verbs)
    _verify(verbs)
    _simulate(verbs)
    _report(verbs)
    _calibrate(verbs)
    _run(verbs)
    _verb(verbs, "passes", "list the compiler's passes and their options", "json")
    _new(verbs)
    _completion(verbs)
    return root


def _verb(verbs: Any, name: str, summary: str, *formats: str, more: str = "") -> argparse.ArgumentParser:
    verb: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}. {more}".strip(),
        allow_abbrev=False,
    )
    verb.set_defaults(verb=f"verb_{name}")
    out = verb.add_argument_group("output")
    out.add_argument(
        "--format",
        choices=("human", *formats),
        default="human",
        help="how to write results and diagnostics (default: human)",
    )
    out.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="default: auto, which heeds NO_COLOR",
    )
    return verb


def _repeatable(verb: Any, flag: str, kind: Callable[[str], Any], metavar: str, summary: str) -> None:
    verb.add_argument(flag, action="append", default=[], type=kind, metavar=metavar, help=summary)


def _check(verbs: Any) -> None:
    verb = _verb(verbs, "check", "report what is wrong with plans", "concise", "json", "github", "sarif")
    verb.add_argument("files", nargs="+", metavar="FILE", help=_PLAN)


def _fmt(verbs: Any) -> None:
    verb = _verb(
        verbs,
        "fmt",
        "rewrite plans in their one layout",
        "json",
        more="Files are rewritten in place; - reads stdin and writes stdout.",
    )
    verb.add_argument("files", nargs="+", metavar="FILE", help=_PLAN)
    how = verb.add_mutually_exclusive_group()
    how.add_argument(
        "--check", action="store_true", help="change nothing; exit with 1 if a file would change"
    )
    how.add_argument("--diff", action="store_true", help="like --check, and print what would change")


def _binding(verb: argparse.ArgumentParser) -> None:
    """What a plan is compiled for."""
    group = verb.add_argument_group("what the plan is compiled for")
    group.add_argument(
        "--shapes",
        metavar="S.json",
        help='shapes of trees: name -> nested objects with leaves {"shape": [..], "dtype": ".."}',
    )
    group.add_argument("--topology", metavar="T.toml", help="the machine, as levels")
    _repeatable(group, "--axis", _size, "NAME=N", "the size of an axis (repeatable)")
    _repeatable(
        group, "--map", _pair, "AXIS=LEVEL", "the level of the topology that an axis lies on (repeatable)"
    )
    group.add_argument(
        "--oversubscribe", action="store_true", help="allow more ranks than the topology has places"
    )
    group.add_argument(
        "--backend",
        choices=BACKENDS,
        default="jax",
        help="whose collectives the plan uses: XLA's own (NCCL, Gloo), or MPI (default: jax)",
    )
    group.add_argument(
        "--calibration",
        metavar="C.toml",
        help="what was measured on the machine of --topology: times are taken from it",
    )
    group.add_argument("--passes", metavar="PIPELINE", help='such as "share,bucket{max=25MiB},overlap"')


def _compile(verbs: Any) -> None:
    verb = _verb(verbs, "compile", "compile a plan to a schedule", "json")
    verb.add_argument("file", metavar="FILE", help=_PLAN)
    verb.add_argument(
        "-o", "--output", metavar="OUT", help="write here; NAME.schedule.json is what programs load"
    )
    verb.add_argument("--emit", choices=EMITS, default="schedule", help="what to write (default: schedule)")
    _functions(verb, "a function of the plan, for jaxpr and hlo (repeatable)")
    _binding(verb)
    look = verb.add_argument_group("looking inside")
    look.add_argument("--dump-passes", metavar="DIR", help="write the schedule after every pass")
    look.add_argument("--time-passes", action="store_true", help="say how long every pass took")


def _explain(verbs: Any) -> None:
    verb = _verb(verbs, "explain", "say what a plan became and why, or what an error code means", "json")
    verb.add_argument("what", metavar="FILE|CODE", help=f"{_PLAN}; or a code such as CP0412")
    _binding(verb)


def _verify(verbs: Any) -> None:
    verb = _verb(
        verbs,
        "verify",
        "prove that collectives do what they promise and no rank waits for ever",
        "json",
        more="Proves a plan, a saved schedule, or one algorithm; gives counter-examples.",
    )
    verb.add_argument("file", nargs="?", metavar="FILE|SCHEDULE", help=f"{_PLAN}; or what `compile -o` wrote")
    group = verb.add_argument_group("one algorithm instead of a file")
    group.add_argument(
        "--algorithm", metavar="NAME", help='such as ring, or "hierarchical(gpu = ring, node = chain)"'
    )
    group.add_argument("--collective", metavar="KIND", help="such as all_reduce or broadcast")
    group.add_argument(
        "--ranks", type=_ranks, metavar="N|LEVEL=N,..", help="how many ranks, or how many at each level"
    )
    group.add_argument(
        "--protocol", action="store_true", help="the protocol of servers, in every order of messages"
    )
    group.add_argument(
        "--whole", action="store_true", help="with --protocol: up to four workers and two servers (minutes)"
    )
    group.add_argument("--root", type=_place, default=None, metavar="R", help="the rank that has or gets all")
    group.add_argument(
        "--slices", type=_count, default=1, metavar="N", help="parts of every chunk, pipelined (default: 1)"
    )
    _binding(verb)


def _one_subject(root: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """`verify` takes a file, or all of what names one algorithm."""
    if arguments.verb != "verb_verify":
        return
    named = (arguments.algorithm, arguments.collective, arguments.ranks)
    if arguments.whole and not arguments.protocol:
        root.error("verify: --whole belongs to --protocol")
    if arguments.protocol:
        if arguments.file is not None or (*named, arguments.root) != (None,) * 4:
            root.error("verify: --protocol stands alone: without it, a plan's own servers are explored")
        return
    if arguments.file is None and None in named:
        root.error("verify: give a plan or a schedule, or --algorithm, --collective and --ranks")
    if arguments.file is not None and (*named, arguments.root) != (None,) * 4:
        root.error("verify: give a file or --algorithm, not both")


def _simulate(verbs: Any) -> None:
    verb = _verb(
        verbs,
        "simulate",
        "say how long a plan takes on a topology, and why",
        "json",
        more="The topology is that of --topology; FILE may also be a saved schedule.",
    )
    _simulated(verb)
    verb.add_argument(
        "--step-seconds",
        type=_duration,
        metavar="TIME",
        help="what a training step takes without communication, such as 120ms: for elastic averaging's share",
    )
    verb.add_argument("--trace", metavar="OUT.json", help="write a trace that Perfetto opens")
    _binding(verb)


def _simulated(verb: argparse.ArgumentParser) -> None:
    """What is simulated, and what is known of its costs."""
    verb.add_argument("file", metavar="FILE", help="a .plan file or a saved schedule, or - for stdin")
    verb.add_argument(
        "--ranks", type=_count, metavar="N", help="as many ranks: the first axis of the plan is resized"
    )
    _repeatable(
        verb,
        "--cost",
        _seconds,
        "NAME=TIME",
        "what one call of a function or one read of a source takes, such as decode=3ms (repeatable)",
    )


def _report(verbs: Any) -> None:
    verb = _verb(
        verbs,
        "report",
        "show a plan on one HTML page: its graph, timeline, choices, proofs and links",
        "json",
        more="The page stands alone and needs no network. Times and links need --topology.",
    )
    _simulated(verb)
    verb.add_argument("-o", "--output", metavar="OUT.html", required=True, help="write the page here")
    verb.add_argument(
        "--trace",
        metavar="RUN.json",
        help="what a run recorded, in Chrome's trace format: shown below the predicted timeline",
    )
    _binding(verb)


def _calibrate(verbs: Any) -> None:
    verb = _verb(
        verbs,
        "calibrate",
        "measure what messages and collectives, or the input of a plan, cost on this machine",
        "json",
        more="Start it like the training: under mpirun, or in every process of a JAX job. With a plan and its"
        " sources the input is measured instead, in one process. What OUT holds of the other kind stays.",
    )
    verb.add_argument("file", nargs="?", metavar="FILE", help="the plan whose input is measured")
    verb.add_argument("-o", "--output", metavar="OUT", required=True, help="write NAME.calibration.toml here")
    verb.add_argument(
        "--topology", metavar="T.toml", help="the machine, as levels (default: hosts and ranks)"
    )
    verb.add_argument("--backend", choices=BACKENDS, help="default: mpi under mpirun, else jax")
    verb.add_argument("--devices", type=_count, metavar="N", help="CPU devices of one JAX process")
    verb.add_argument(
        "--largest",
        type=_nbytes,
        default=64 * 2**20,
        metavar="SIZE",
        help="the largest buffer (default: 64MiB)",
    )
    verb.add_argument(
        "--seconds",
        type=_count,
        metavar="N",
        help="about how long to measure (default: 120, and 20 for the input)",
    )
    given = verb.add_argument_group("the input of a plan")
    _repeatable(
        given,
        "--source",
        _pair,
        "NAME=PATH",
        "a source: a folder (its files are the records) or a .npy file (repeatable)",
    )
    _functions(given, "a host function of the plan (repeatable)")
    _repeatable(
        given, "--axis", _size, "NAME=N", "the size of an axis that the batch is split along (repeatable)"
    )
    step = given.add_mutually_exclusive_group()
    step.add_argument(
        "--consumer",
        metavar="MODULE:FUNCTION",
        help="a jitted step: it is called with one batch of a member, {name: array}, and timed",
    )
    step.add_argument(
        "--step-seconds",
        type=_duration,
        metavar="TIME",
        help="what a step takes without its input, such as 12ms, where it is known",
    )


def _run(verbs: Any) -> None:
    verb = _verb(
        verbs,
        "run",
        "rehearse a plan on real input, on CPUs",
        "json",
        more="Inputs and states are filled with random numbers of their shapes. Under mpirun every rank has a"
        " process of its own, and the first one reports for all.",
    )
    verb.add_argument("file", metavar="FILE", help=_PLAN)
    _repeatable(
        verb,
        "--source",
        _pair,
        "NAME=PATH",
        "a source: a folder (its files are the records) or a .npy file (its rows are; repeatable)",
    )
    _functions(verb, "a function of the plan (repeatable)")
    verb.add_argument("--steps", type=_count, default=10, metavar="N", help="steps to run (default: 10)")
    verb.add_argument("--seed", type=int, default=0, metavar="N", help="of the random inputs (default: 0)")
    verb.add_argument(
        "--metrics",
        metavar="FILE",
        help="keep what the input costs here, in the text format of Prometheus: `{rank}` is the rank",
    )
    _binding(verb)


def _functions(verb: Any, summary: str) -> None:
    _repeatable(verb, "--fn", _pair, "NAME=MODULE:FUNCTION", summary)


def _new(verbs: Any) -> None:
    verb = _verb(
        verbs,
        "new",
        "begin a plan and a training program from a template",
        "json",
        more="Without a template, lists them. Nothing is ever overwritten.",
    )
    verb.add_argument("template", nargs="?", metavar="TEMPLATE", help="the name of a template")
    verb.add_argument("--into", default=".", metavar="DIR", help="where to write (default: here)")


def _completion(verbs: Any) -> None:
    verb = _verb(
        verbs,
        "completion",
        "print completions for a shell",
        more='For bash: eval "$(commplan completion bash)".',
    )
    verb.add_argument("shell", choices=SHELLS)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, found {text!r}")
    return name, value


def _is_number(text: str) -> bool:
    """Whether it is written in the digits 0 to 9, and not too many of them."""
    return text.isascii() and text.isdecimal() and len(text) < 20


def _whole(text: str, least: int, expected: str, shown: str) -> int:
    if not _is_number(text) or not least <= int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"expected {expected}, found {shown!r}")
    return int(text)


def _size(text: str) -> tuple[str, int]:
    name, value = _pair(text)
    return name, _whole(value, 1, "NAME=N with a positive whole number", text)


def _ranks(text: str) -> int | tuple[tuple[str, int], ...]:
    """`13`, or `gpu=8,node=4`."""
    return tuple(_size(part) for part in text.split(",")) if "=" in text else _count(text)


def _place(text: str) -> int:
    return _whole(text, 0, "a rank: a whole number from 0 on", text)


def _count(text: str) -> int:
    return _whole(text, 1, "a positive whole number", text)


def _time(text: str, bare: str = "") -> float | None:
    """Seconds, `bare` being the unit where none is written; None where it is no time."""
    number = text.rstrip("nums")
    unit = text[len(number) :] or bare
    known = unit in _TIMES and _is_number(number.replace(".", "", 1))
    return float(number) * _TIMES[unit] if known else None


def _seconds(text: str) -> tuple[str, float]:
    name, value = _pair(text)
    seconds = _time(value)
    if seconds is None:
        raise argparse.ArgumentTypeError(f"expected NAME=TIME such as decode=3ms, found {text!r}")
    return name, seconds


def _duration(text: str) -> float:
    seconds = _time(text, "s")
    if not seconds:
        raise argparse.ArgumentTypeError(f"expected a time such as 12ms, found {text!r}")
    return seconds


def _nbytes(text: str) -> int:
    number = text.rstrip("KMGiB")
    unit = text[len(number) :]
    if unit not in _SIZES or not _is_number(number) or not int(number):
        raise argparse.ArgumentTypeError(f"expected a size such as 64MiB, found {text!r}")
    return int(number) * _SIZES[unit]
