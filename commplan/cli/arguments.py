"""The arguments of the command and its help."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from commplan import __version__
from commplan.cli import argument_types
from commplan.cli.usage import check_usage
from commplan.diagnostics import near_note

EMITS = ("schedule", "plan", "jaxpr", "hlo", "dot", "mermaid")  # outputs of `compile`, the first by default
BACKENDS = ("jax", "mpi")
SHELLS = ("bash", "zsh", "fish")  # shells that `completion` supports
_PLAN = "a .plan file, or - for stdin"  # help of an argument


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse arguments.

    Raises:
        SystemExit: 0 for --help and --version, 2 for invalid usage.
    """
    root = parser(*argv[:1])
    if not argv:
        root.print_help(sys.stderr)
        raise SystemExit(2)
    args = root.parse_args(argv)
    check_usage(root, args)
    return args


class _Formatter(argparse.HelpFormatter):
    """A formatter that does not measure the terminal, which takes 3 ms: argparse uses it to check flags."""

    def __init__(self, prog: str, width: int = 80) -> None:
        super().__init__(prog, width=width)


class _SuggestingParser(argparse.ArgumentParser):
    """A parser whose errors for unknown words and flags suggest similar ones."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=_Formatter, **options)

    def format_usage(self) -> str:
        self.formatter_class = argparse.HelpFormatter
        return super().format_usage()

    def format_help(self) -> str:
        self.formatter_class = argparse.HelpFormatter
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        choice = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if choice:
            choices = re.findall(r"[\w.-]+", choice[2])
            message = "; ".join((message, *near_note(choice[1], choices)))
        super().error(message)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore
        parsed, unknown = super().parse_known_args(args, namespace)
        flag = next((argument.partition("=")[0] for argument in unknown if argument.startswith("-")), "")
        if flag and (near := near_note(flag, self._option_string_actions)):
            self.error(f"unrecognized arguments: {' '.join(unknown)}; {near[0]}")
        return parsed, unknown


class _Version(argparse.Action):
    """Prints the version, and the platform of a prebuilt engine."""

    def __call__(self, *_: Any) -> None:
        from commplan.lowering.mpi.prebuilt import target  # imported here to keep other verbs fast

        built = target()
        print(f"commplan {__version__}" + (f"\nMPI engine for {built}" if built else ""))
        raise SystemExit(0)


def parser(verb: str = "") -> argparse.ArgumentParser:
    """The parser of the command, with `verb` alone if it exists: a parser of all verbs takes 10 ms."""
    root = _SuggestingParser(
        prog="commplan",
        description="Compile communication plans for training.",
        epilog="Exit codes: 0 success, 1 errors in the input, 2 wrong usage or internal error.",
        allow_abbrev=False,
    )
    root.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    verbs = root.add_subparsers(dest="verb", metavar="VERB", required=True, prog="commplan")
    for name in (verb,) if verb in _VERBS else _VERBS:
        summary, more, formats, add = _VERBS[name]
        subparser = verbs.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}. {more}".strip(),
            allow_abbrev=False,
        )
        out = subparser.add_argument_group("output")
        _choice(
            out, "--format", ("human", *formats), "the format of results and diagnostics (default: human)"
        )
        _choice(out, "--color", ("auto", "always", "never"), "use of colors; auto respects NO_COLOR")
        add(subparser)
    return root


def _flag(group: Any, name: str, metavar: str, summary: str, kind: Any = None, default: Any = None) -> None:
    """Add a flag with a value, converted by `kind`."""
    group.add_argument(name, metavar=metavar, help=summary, type=kind, default=default)


def _repeatable(group: Any, name: str, metavar: str, summary: str, kind: Callable[[str], Any]) -> None:
    group.add_argument(name, action="append", default=[], type=kind, metavar=metavar, help=summary)


def _switch(group: Any, name: str, summary: str) -> None:
    group.add_argument(name, action="store_true", help=summary)


def _choice(group: Any, name: str, choices: Sequence[str], summary: str) -> None:
    """Add a flag for one of several words, with the first as default."""
    group.add_argument(name, choices=choices, default=choices[0], help=summary)


# The functions below add the arguments of a verb of that name, or of several verbs, to its parser.
def _files(verb: Any) -> None:
    verb.add_argument("files", nargs="+", metavar="FILE", help=_PLAN)


def _check(verb: Any) -> None:
    _files(verb)
    _switch(verb, "--fix", "apply safe fixes; - reads stdin and writes stdout")
    _switch(verb, "--diff", "print the changes of --fix without writing them")
    _switch(verb, "--watch", "check again whenever a file changes, until Ctrl-C")
    _switch(verb, "--strict", "exit with 1 for warnings too")
    _lengths(verb, "the loss of `tail drop`")
    program = "a program that runs the plans, searched for unused outputs (repeatable)"
    _repeatable(verb, "--program", "TRAIN.py", program, str)
    _binding(verb)


def _fmt(verb: Any) -> None:
    _files(verb)
    group = verb.add_mutually_exclusive_group()
    _switch(group, "--check", "write nothing; exit with 1 if a file would change")
    _switch(group, "--diff", "like --check, and print the changes")


def _binding(verb: Any, topologies: str = "") -> None:
    """Add the flags that describe the machine. If several are allowed, `topologies` is their help text."""
    group = verb.add_argument_group("target of the compilation")
    shapes = (
        'shapes of trees: a JSON file, name -> nested objects with leaves {"shape": [..], "dtype": ".."};'
    )
    shapes += " or MODULE:FUNCTION (FILE.py:FUNCTION), which returns the dictionary that `compile` takes"
    _flag(group, "--shapes", "SHAPES", shapes)
    if topologies:
        _repeatable(group, "--topology", "T.toml", f"the machine, as levels (repeatable: {topologies})", str)
    else:
        _flag(group, "--topology", "T.toml", "the machine, as levels")
    _repeatable(group, "--axis", "NAME=N", "the size of an axis (repeatable)", argument_types.size)
    level = "the level of the topology for an axis (repeatable)"
    _repeatable(group, "--map", "AXIS=LEVEL", level, argument_types.pair)
    _switch(group, "--oversubscribe", "allow more ranks than the topology has places")
    summary = "the collectives to use: jax (NCCL, Gloo) or mpi (default: jax)"
    _choice(group, "--backend", BACKENDS, summary)
    measured = "measured times of the machine of --topology"
    _flag(group, "--calibration", "C.toml", measured)
    _flag(group, "--passes", "PIPELINE", 'such as "share,bucket{max=25MiB},overlap"')


def _compile(verb: Any) -> None:
    verb.add_argument("file", metavar="FILE", help=_PLAN)
    output = "the output file; programs load NAME.schedule.json"
    verb.add_argument("-o", "--output", metavar="OUT", help=output)
    _choice(verb, "--emit", EMITS, "the output (default: schedule)")
    _functions(verb, "a function of the plan, for jaxpr and hlo (repeatable)")
    _binding(verb)
    inspection = verb.add_argument_group("inspection")
    _flag(inspection, "--dump-passes", "DIR", "write the schedule after every pass")
    _switch(inspection, "--time-passes", "print the time of every pass")


def _lengths(verb: Any, purpose: str) -> None:
    records = f"the number of records of a source, for {purpose} (repeatable)"
    _repeatable(verb, "--records", "NAME=N", records, argument_types.size)


def _explain(verb: Any) -> None:
    subject = "a .plan file or a saved schedule, or -; a code such as CP0412; or CP04, a list"
    verb.add_argument("what", metavar="FILE|CODE", help=subject).completer = _codes
    _binding(verb)
    target = "gpu, or a kind such as h100:4x8: also print the XLA options for it"
    _flag(verb, "--target", "T", target)
    _step(verb)
    _lengths(verb, "the padding of batches")


def _verify(verb: Any) -> None:
    verb.add_argument("file", nargs="?", metavar="FILE|SCHEDULE", help=f"{_PLAN}; or output of `compile -o`")
    group = verb.add_argument_group("one algorithm instead of a file")
    _flag(group, "--algorithm", "NAME", 'such as ring, or "hierarchical(gpu = ring, node = chain)"')
    _flag(group, "--collective", "KIND", "such as all_reduce or broadcast")
    _flag(group, "--ranks", "N|LEVEL=N,..", "number of ranks, in all or at each level", argument_types.ranks)
    _flag(group, "--root", "R", "the root rank", argument_types.rank)
    _flag(group, "--slices", "N", "parts of every chunk, pipelined (default: 1)", argument_types.count, 1)
    _binding(verb)


def _add_simulation_flags(verb: Any, topologies: str = "") -> None:
    """Add the flags for the schedule and its costs, with `topologies` for `_binding`."""
    verb.add_argument("file", metavar="FILE", help="a .plan file or a saved schedule, or - for stdin")
    ranks = "resize the first axis of the plan to N ranks, and the outermost level if they do not fit"
    _flag(verb, "--ranks", "N", ranks, argument_types.count)
    cost = "the time of one call of a function or one read of a source, such as decode=3ms (repeatable)"
    _repeatable(verb, "--cost", "NAME=TIME", cost, argument_types.named_seconds)
    scale = "multiply the bandwidth of a level, such as node=1/4 or node=2.5 (repeatable)"
    _repeatable(verb, "--scale", "LEVEL=FACTOR", scale, argument_types.scale)
    _step(verb)
    _flag(verb, "--target", "NAME:HOSTSxDEVICES", "GPUs for the estimate of --step, such as h100:4x8")
    _binding(verb, topologies)


def _step(verb: Any) -> None:
    """Add the flags for the computation that a plan overlaps with."""
    group = verb.add_mutually_exclusive_group()
    step = "a function of a mesh that returns a training step and its arguments; estimated for --target"
    _flag(group, "--step", "MODULE:FUNCTION", step)
    _profile(group)


def _profile(group: Any) -> None:
    profile = "the profile of `commplan calibrate --step`, for compiling and predicting"
    _flag(group, "--step-profile", "S.toml", profile)


def _report(verb: Any) -> None:
    _add_simulation_flags(verb)
    recorded = "flight records of a run, files *.rec or folders: shown below the prediction"
    run = verb.add_mutually_exclusive_group()
    run.add_argument("--records", nargs="+", metavar="REC", help=recorded)
    traced = "instead, a recorded run in Chrome's trace format"
    run.add_argument("--trace", dest="recorded", metavar="RUN.json", help=traced)
    verb.add_argument("-o", "--output", metavar="OUT.html", required=True, help="write the page here")


def _simulate(verb: Any) -> None:
    _add_simulation_flags(verb, "to compare machines")
    step = "the time of a training step without communication, such as 120ms: for elastic averaging's share"
    _flag(verb, "--step-seconds", "TIME", step, argument_types.duration)
    _flag(verb, "--trace", "OUT.json", "write a trace that Perfetto opens")


def _audit(verb: Any) -> None:
    verb.add_argument("file", metavar="FILE", help="a .plan file or a saved schedule, or - for stdin")
    step = "a function of a mesh that returns a training step and its arguments (default: each phase alone)"
    _flag(verb, "--step", "MODULE:FUNCTION", step)
    _profile(verb)
    target = "target GPUs, such as h100:4x8, which need not be installed (default: this machine's CPUs)"
    _flag(verb, "--target", "NAME:HOSTSxDEVICES", target)
    _switch(
        verb,
        "--pgle",
        "compile again with a profile of the estimated times, and report the collectives that XLA then moves",
    )
    _repeatable(verb, "--phase", "NAME", "a phase to look for (repeatable; default: those that run)", str)
    _switch(verb, "--allow-extra", "accept collectives of the step that are not in the plan")
    _functions(verb, "a function of the plan, without --step (repeatable)")
    _binding(verb)


def _diff(verb: Any) -> None:
    verb.add_argument("a", metavar="A", help="a .plan file or a saved schedule, or - for stdin")
    second = "the file to compare with A (default: A, on the second --topology)"
    verb.add_argument("b", nargs="?", metavar="B", help=second)
    limit = "exit with 1 if slower, bytes, memory or rounds of B exceeds that of A by N percent (repeatable)"
    _repeatable(verb, "--fail-on", "MEASURE:N%", limit, argument_types.limit)
    _profile(verb)
    _binding(verb, "the second is that of B")


def _calibrate(verb: Any) -> None:
    verb.add_argument("file", nargs="?", metavar="FILE", help="the plan whose input or step is measured")
    output = "write here: NAME.calibration.toml, or with --step NAME.step.toml"
    verb.add_argument("-o", "--output", metavar="OUT", required=True, help=output)
    step = "measure a step instead: a function of a mesh that returns a training step and its arguments"
    _flag(verb, "--step", "MODULE:FUNCTION", step)
    _flag(verb, "--topology", "T.toml", "the machine, as levels (default: hosts and ranks)")
    racks = "under mpirun: find racks from the bandwidth between hosts, and write a topology to OUT instead"
    _switch(verb, "--discover", racks)
    verb.add_argument("--backend", choices=BACKENDS, help="default: mpi under mpirun, else jax")
    _flag(verb, "--devices", "N", "CPU devices of one JAX process", argument_types.count)
    _flag(verb, "--largest", "SIZE", "the largest buffer (default: 64MiB)", argument_types.nbytes, 64 * 2**20)
    _flag(
        verb,
        "--seconds",
        "N",
        "approximate time of measurement (default: 120, 20 for the input, 10 for a step)",
        argument_types.count,
    )
    input_group = verb.add_argument_group("the input of a plan")
    source = "a source: a folder (its files are the records) or a .npy file (repeatable)"
    _repeatable(input_group, "--source", "NAME=PATH", source, argument_types.pair)
    _functions(input_group, "a host function of the plan (repeatable)")
    axis = "the size of an axis that the batch is split along (repeatable)"
    _repeatable(input_group, "--axis", "NAME=N", axis, argument_types.size)
    step = input_group.add_mutually_exclusive_group()
    consumer = "a jitted step: it is called with one batch of a member, {name: array}, and timed"
    _flag(step, "--consumer", "MODULE:FUNCTION", consumer)
    seconds = "the time of a step without its input, such as 12ms, if known"
    _flag(step, "--step-seconds", "TIME", seconds, argument_types.duration)


def _run(verb: Any) -> None:
    verb.add_argument("file", metavar="FILE", help=_PLAN)
    source = "a source: a folder (its files are the records) or a .npy file (its rows; repeatable)"
    _repeatable(verb, "--source", "NAME=PATH", source, argument_types.pair)
    _functions(verb, "a function of the plan (repeatable)")
    _flag(verb, "--steps", "N", "steps to run (default: 10)", argument_types.count, 10)
    _flag(verb, "--seed", "N", "the seed of the random inputs (default: 0)", int, 0)
    device = "the devices of the ranks (default: GPUs, if JAX finds one for each rank; else CPU devices)"
    verb.add_argument("--device", choices=("cpu", "gpu"), help=device)
    metrics = "write input costs to this file, in the text format of Prometheus: `{rank}` is the rank"
    _flag(verb, "--metrics", "FILE", metrics)
    _binding(verb)


def _functions(group: Any, summary: str) -> None:
    _repeatable(group, "--fn", "NAME=MODULE:FUNCTION", summary, argument_types.pair)


def _new(verb: Any) -> None:
    template = verb.add_argument("template", nargs="?", metavar="TEMPLATE", help="the name of a template")
    template.completer = _templates
    _flag(verb, "--into", "DIR", "the output directory (default: the current one)", default=".")


def _templates(**_: object) -> list[str]:
    """Complete the name of a template."""
    from commplan.cli.template_files import templates

    return list(templates())


def _codes(prefix: str, **_: object) -> list[str]:
    """Complete an error code, or a file name if no code matches."""
    from argcomplete.completers import FilesCompleter

    from commplan.errors import titles

    codes = [code for code in titles() if prefix and code.startswith(prefix.upper())]
    return codes or list(FilesCompleter()(prefix))  # pyright: ignore[reportUnknownMemberType]


def _stubs(verb: Any) -> None:
    verb.add_argument("files", nargs="+", metavar="FILE", help=_PLAN)
    verb.add_argument("-o", "--output", metavar="OUT.pyi", help="write here (default: standard output)")


def _completion(verb: Any) -> None:
    verb.add_argument("shell", choices=SHELLS)


def _records(verb: Any) -> None:
    files = "files *.rec or folders of them (default: the live runs of this host, or the last one)"
    verb.add_argument("records", nargs="*", metavar="REC", help=files)


def _trace(verb: Any) -> None:
    _records(verb)
    verb.add_argument("-o", "--output", metavar="OUT.json", help="write the trace here")
    _flag(verb, "--plan", "FILE", "the run's plan or saved schedule: with --topology, its predicted times")
    _binding(verb)


def _feeds(verb: Any) -> None:
    _switch(verb, "--watch", "update the list until Ctrl-C")


_JSON = ("json",)  # further output formats of most verbs
# For each verb: summary, further help, further output formats, and a function that adds arguments.
_VERBS: dict[str, tuple[str, str, tuple[str, ...], Callable[[Any], None]]] = {
    "check": (
        "check plans for errors and likely mistakes",
        (
            "Warnings are printed for plans without errors. Some checks need more: --shapes and"
            " --topology for the cost of buckets and pins, and for errors of compilation."
        ),
        ("concise", "json", "github", "sarif"),
        _check,
    ),
    "fmt": ("format plans", "Files are rewritten in place; - reads stdin and writes stdout.", _JSON, _fmt),
    "compile": ("compile a plan to a schedule", "", _JSON, _compile),
    "explain": ("explain a compiled plan, or an error code", "", _JSON, _explain),
    "verify": (
        "prove that collectives are correct and free of deadlock",
        "Proves a plan, a saved schedule, or one algorithm; gives counter-examples.",
        _JSON,
        _verify,
    ),
    "simulate": (
        "predict the time of a plan on a topology",
        (
            "FILE may also be a saved schedule. With several --topology, or with --scale, a table compares"
            " the machines; a plan is compiled for each of them."
        ),
        _JSON,
        _simulate,
    ),
    "report": (
        "write one HTML page about a plan: its graph, timeline, choices, proofs and links",
        "The page is self-contained. Times and links need --topology.",
        _JSON,
        _report,
    ),
    "diff": (
        "compare two plans or saved schedules",
        (
            "The flags hold for both; without --topology there are no times. One plan on two machines:"
            " `commplan diff PLAN --topology A.toml --topology B.toml`."
        ),
        _JSON,
        _diff,
    ),
    "audit": (
        "compare a compiled training step with its plan",
        "Nothing runs. Reports what XLA merged, split, moved or added, and estimates the exposed time.",
        _JSON,
        _audit,
    ),
    "calibrate": (
        "measure messages and collectives, or the input or a step of a plan, on this machine",
        (
            "Start it like the training: under mpirun, or in every process of a JAX job. With a plan and its"
            " sources the input is measured instead, in one process. Other measurements in OUT are kept."
            " With --step one device computes the gradients; OUT is then a step profile."
        ),
        _JSON,
        _calibrate,
    ),
    "run": (
        "rehearse a plan on real input, on this machine's devices",
        (
            "Inputs and states are random numbers. Under mpirun every rank is a separate"
            " process, and the first one reports for all."
        ),
        _JSON,
        _run,
    ),
    "blame": (
        "find the rank that blocked the others, from flight records",
        "Works while the run hangs and after it has failed.",
        _JSON,
        _records,
    ),
    "trace": (
        "convert flight records to a trace for Perfetto",
        "`commplan trace summarize REC...` prints the time of each plan line, and the last rank.",
        _JSON,
        _trace,
    ),
    "passes": ("list the compiler's passes and their options", "", _JSON, lambda verb: None),
    "new": (
        "create a plan and a training program from a template",
        "Without a template, lists them. Nothing is ever overwritten.",
        _JSON,
        _new,
    ),
    "lsp": (
        "serve an editor: the language server, on standard input and output",
        "Editors start it. Needs the extra `lsp`.",
        (),
        lambda verb: None,
    ),
    "stubs": (
        "write type stubs of plans, for editors and type checkers",
        "For `plan linear` a program has `plan: commplan.Plan[plans.Linear] = commplan.load(..)`.",
        (),
        _stubs,
    ),
    "completion": (
        "print completions for a shell",
        'For bash: eval "$(commplan completion bash)".',
        (),
        _completion,
    ),
    "feeds": (
        "list the feeds of this host, their members and their waits",
        "A feed is a group of programs that share their input: they call commplan.join with one name.",
        _JSON,
        _feeds,
    ),
}
