"""Check that all ranks are about to run the same step, before it runs for the first time.

Every rank lists the arguments and collectives of its step twice: before it is compiled, since compilers of
several hosts wait for each other, and afterwards. The ranks exchange digests of these lists, and the lists
only if digests differ. All ranks reject a step that would deadlock or reduce unrelated values.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import re
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

import jax
import msgspec

from commplan.diagnostics import CommplanError, fail
from commplan.ir.types import DType
from commplan.lowering.gpu.profile import LatencyProfile
from commplan.lowering.jax import _jit
from commplan.recorder.notice import NOTICE_S, Notice
from commplan.recorder.rank_state import Comparison
from commplan.recorder.stacks import user_line
from commplan.runtime.machines.difference import first_difference
from commplan.runtime.machines.machine import Issue, Machine, reason
from commplan.runtime.observe.abort_hook import mark_common, report_once
from commplan.runtime.observe.same_values import Copies, check_copies, named_leaves
from commplan.tracebacks import is_users

TIMEOUT_S = 1800.0  # Seconds until all ranks have compiled the step, by default.
_FAILED_S = 10.0  # Seconds until the other ranks have received the error of a failed rank.
_LINE = re.compile(r"line (\d+) of the plan")  # The place of a collective of the plan.
_SOURCE = re.compile(r"\S+\.py:\d+")  # The place of a collective of the program.
_SHOWN = 4  # The most ranks, or groups of ranks, in a message.
_LONG = 160  # The most characters of an argument in a message.
_Answer = TypeVar("_Answer", bound=msgspec.Struct)
# A check that all ranks make before the first step. It exchanges its findings through the preflight.
Check = Callable[["Preflight"], object]


class Step(msgspec.Struct, frozen=True, array_like=True):
    """The next step of a rank: its name, its arguments, and its collectives in order.

    Attributes:
        name: The name of the function.
        arguments: The path, dtype and shape of each leaf of the arguments, as text.
        issues: The collectives, in the order of issue.
        program: The digest of the lowered program if it must be the same everywhere, else "".
        compiled: Whether the collectives are those of the compiled step, or else of the trace.
    """

    name: str
    arguments: tuple[str, ...]
    issues: tuple[Issue, ...]
    program: str = ""
    compiled: bool = False

    @property
    def digest(self) -> str:
        """A digest that is equal on ranks that issue the same collectives over the same axes."""
        issued = tuple((issue.text, issue.place) for issue in self.issues)
        return _digest(msgspec.json.encode((self.arguments, issued, self.program, self.compiled)))


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """The first message of a rank.

    Attributes:
        digest: The digest of the rank's step; "" if it has none, or only tests collectives.
        wrong: The error of the rank, or "".
        checks: Whether the rank tests the collectives of the plan before the step.
    """

    digest: str = ""
    wrong: str = ""
    checks: bool = False

    @property
    def text(self) -> str:
        """The operation that the rank begins, for messages; equal for ranks that begin the same one."""
        if not self.digest:
            return "calls run.check_collectives()"
        return f"begins a step{', and tests the collectives of the plan first' if self.checks else ''}"


class Preflight:
    """The comparison of all ranks of `machine` before a new step runs; see `jit`.

    Attributes:
        check: See `ComparedStep`.
        profile: See `ComparedStep`.
        same: The step whose arguments are compared once; None to compare none.
        noun: The noun for a participant, "rank" or "process".
        communicates: Whether the step has collectives, so that all ranks must call it.
        index: The index of the step's name in `Calls`; unused if steps are not watched.
    """

    def __init__(
        self, machine: Machine, file: str, timeout_s: float, check: Callable[[], Check | None] = lambda: None,
        profile: LatencyProfile | None = None, same: Callable[..., Any] | None = None,
    ) -> None:  # fmt: skip
        self.machine, self.file, self.timeout_s, self.check = machine, file, timeout_s, check
        self.profile, self.same = profile, same
        self.noun = "process" if machine.layout == "global" else "rank"
        self.communicates = False
        self.index = 0
        self._agreed: dict[str, Step] = {}  # The steps that the ranks agreed on, by digest.
        self._has_compared_values = False
        self._executables: set[Any] = set()  # The executables of these steps.
        self._step = Step("run.check_collectives()", (), ())  # The step that is compared.
        self._place = user_line()  # The line that calls it, or "".

    def __call__(self, jitted: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Compare the step for these arguments with all other ranks, compile it, and compare it again.

        Raises:
            CommplanError: CP0854 if the steps of ranks differ, or a rank has no step; CP0855 if a rank does
                not arrive; CP0856 if a collective has a wrong result; CP0861 if an argument differs.
            Exception: the error of tracing or compiling the step on this rank.
        """
        everyone = self.machine.participants()
        with report_once(self.noun, self.machine.process()[0], everyone[0]), self.machine.joint.ahead(self):
            with self._sends_failure():
                traced = jitted.trace(*args, **kwargs)
                lowered = jitted.lower(*args, **kwargs)
                arguments = self._arguments(lowered)
                issues = self.machine.issues(traced)
                step = Step(jitted.__name__, arguments, issues, self._program(lowered))
                self._count(step)
            if step.digest not in self._agreed:
                self._agree(step, lowered)
            if not self._has_compared_values:
                self._compare_values(args, kwargs)
            with self._sends_failure():
                compiled = lowered.compile()
                executable = compiled.runtime_executable()
                if executable in self._executables:
                    return
                issues = self.machine.issues(traced, compiled)
                step = msgspec.structs.replace(step, issues=issues, compiled=True)
                _locate(self.machine, self.index, step.issues, self.file)
                self._count(step)
            if step.digest not in self._agreed:
                check = self.check()
                self._agree(step, lowered, checks=check is not None)
                if check is not None:
                    check(self)
            self._executables.add(executable)

    def _compare_values(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise CP0861 if an argument differs between ranks that must hold the same value."""
        leaves = iter(()) if self.same is None else named_leaves(self.same, args, kwargs)
        copies = [
            Copies(leaf.name, holders, arrays)
            for leaf in leaves
            if leaf.placement is not None or self.communicates
            for holders, arrays in self.machine.copies(leaf.leaf, leaf.placement)
        ]
        check_copies(copies, self.exchange, self.noun, self.file)
        self._has_compared_values = True

    @contextlib.contextmanager
    def _sends_failure(self) -> Generator[None]:
        """Send the error to the other ranks if the block fails; see `mark_common` for one that all have."""
        try:
            yield
        except Exception as error:
            mine, answers = Hello(wrong=reason(error)), dict[int, Hello | None]()
            with contextlib.suppress(CommplanError):
                answers = self._answers(mine, _FAILED_S)
            if [*answers.values()] == [mine] * len(self.machine.participants()):
                mark_common(error)
            raise

    def _count(self, step: Step) -> None:
        """Set the compared step, and count its call once it has collectives."""
        self._step, self._place = step, user_line()
        if step.issues and not self.communicates:
            self.communicates = True
            self.machine.joint.begin(step.name)

    def _arguments(self, lowered: Any) -> tuple[str, ...]:
        arguments = _arguments(lowered)
        if cast("Any", jax.config).jax_disable_jit and self.noun == "process":  # It would run op by op.
            arguments = ("jax_disable_jit is set", *arguments)
        return arguments if self.profile is None else (self.profile.source, *arguments)

    def _agree(self, step: Step, lowered: Any, *, checks: bool = False) -> None:
        """Exchange digests, and if they differ the steps. Raises CP0854 or CP0855."""
        hellos = self.begin(Hello(step.digest, checks=checks))
        if len({hello.digest for hello in hellos.values()}) > 1:
            self._compare(self.exchange(step), lowered)
        self._agreed[step.digest] = step

    def _program(self, lowered: Any) -> str:
        """The digest of the program, which is the same for all devices of a mesh.

        It is "" if the program calls Python or the ranks have programs of their own.
        """
        text = lowered.as_text() if self.noun == "process" else ""
        return _digest(text.encode()) if text and "callback" not in text else ""

    @property
    def comparison(self) -> Comparison:
        """The compared step, for a message if another process runs a step that was agreed on."""
        mine, me = self._step, f"{self.noun} {self.machine.process()[0]}"
        agreed = [step.arguments for step in tuple(self._agreed.values())]
        if not agreed:
            return Comparison(me, mine.name, place=self._place)
        if mine.arguments in agreed:
            other = "another static argument, sharding or structure"
            message = f"{me} calls `{mine.name}` with {other} than {{}}"
            fix = f"every {self.noun} gives the same static arguments, shardings and trees"
        else:
            pairs = [_first_pair(mine.arguments, arguments) for arguments in agreed[:-_SHOWN:-1]]
            theirs = dict.fromkeys(text for _, text in pairs)
            message = f"{me} calls `{mine.name}` with {pairs[0][0]}, {{}} with {' or '.join(theirs)}"
            fix = f"every {self.noun} must give the same shapes and types"
        return Comparison(me, mine.name, message, fix, self._place)

    def begin(self, mine: Hello) -> dict[int, Hello]:
        """The first message of each participant. Raises CP0854 if only some test collectives."""
        hellos = self.exchange(mine)
        kinds = _by_value({n: hello.text for n, hello in hellos.items()})
        if len(kinds) > 1:
            first, second = (group[0] for group in list(kinds.values())[:2])
            fail(
                "CP0854",
                f"{self.noun} {second} begins another operation than {self.noun} {first}",
                *(f"{_named(self.noun, group)} {text}" for text, group in kinds.items()),
                f"every {self.noun} passes run.jit the same check_s, and calls run.check_collectives() alike",
                file=self.file,
            )
        return hellos

    def exchange(self, mine: _Answer, timeout_s: float | None = None) -> dict[int, _Answer]:
        """The answer of each participant. Raises CP0854 if one has no step, CP0855 if one does not arrive."""
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        gathered = self._answers(mine, timeout_s, None if self.machine.joint.is_watched else self._notice())
        answers = {number: answer for number, answer in gathered.items() if answer is not None}
        hellos = {n: answer for n, answer in answers.items() if isinstance(answer, Hello)}
        failed = [f"{self.noun} {n} has no step: {hello.wrong}" for n, hello in hellos.items() if hello.wrong]
        if failed:
            fail("CP0854", *failed[:_SHOWN], file=self.file)
        missing = [number for number in self.machine.participants() if number not in gathered]
        if missing:
            fail(
                "CP0855",
                f"{_named(self.noun, missing)} did not arrive",
                f"this is {self.noun} {self.machine.process()[0]}, which waited at least {timeout_s:.0f} s",
                f"every {self.noun} calls the same steps, and run.check_collectives(), in the same order,"
                " under run.jit: a step under a bare jax.jit does not take part",
                "run.jit(step, timeout=SECONDS) waits longer",
                file=self.file,
            )
        return answers

    def _notice(self) -> Notice:
        """The message about late ranks. If a sidecar watches the calls, it prints one instead."""
        name, place = self._step.name, self._place or "an unknown line"
        calls = f"{self.noun} {self.machine.process()[0]} calls `{name}` at {place}"
        waits = f"{calls}, and waits for the others to compare it"
        return Notice([waits, "run.jit(step, timeout=SECONDS) bounds the wait"], NOTICE_S, self.noun)

    def _answers(
        self, mine: _Answer, timeout_s: float, notice: Notice | None = None
    ) -> dict[int, _Answer | None]:
        with self.machine.joint.waiting():
            texts = self.machine.gather(msgspec.json.encode(mine).decode(), timeout_s, notice)
        return {
            number: None if text is None else msgspec.json.decode(text, type=type(mine))
            for number, text in sorted(texts.items())
        }

    def _compare(self, steps: Mapping[int, Step], lowered: Any) -> None:
        """Raise CP0854 for a deadlock, and for equal collectives of different arguments or programs."""
        at = issued_together(steps)
        if any(at[number] < len(step.issues) for number, step in steps.items()):
            self._refuse_order(steps, at)
        for issues, group in _by_value({n: step.issues for n, step in steps.items()}).items():
            if not issues and self.noun == "rank":
                continue  # Ranks without collectives are independent.
            self._refuse_arguments({n: steps[n].arguments for n in group})
            programs = {n: steps[n].program for n in group if steps[n].program}
            if len({*programs.values()}) > 1:
                self._refuse_programs(programs, lowered)

    def _refuse_order(self, steps: Mapping[int, Step], at: Mapping[int, int]) -> NoReturn:
        """Raise CP0854 for ranks that deadlock: name a collective, and a rank that issues another instead."""
        # First look for a rank of a waiting collective that issues another one over the same ranks. Else sets
        # of ranks wait for each other in a circle.
        heads = [step.issues[at[n]] for n, step in steps.items() if at[n] < len(step.issues)]
        rivals = [{n: _next(steps[n], at[n], issue) for n in _members(issue, steps)} for issue in heads]
        rivals += [{n: at[n] for n in _members(issue, steps)} for issue in heads]
        groups = (
            _by_value({n: steps[n].issues[place : place + 1] for n, place in places.items()})
            for places in rivals
        )
        places, kinds = next((p, group) for p, group in zip(rivals, groups, strict=True) if len(group) > 1)
        first, second = (group[0] for group in list(kinds.values())[:2])
        fail(
            "CP0854",
            f"{self.noun} {second} issues another collective than {self.noun} {first} as number"
            f" {places[second] + 1} of its step `{steps[second].name}`",
            *(
                f"{_named(self.noun, group)}: {_described(steps[group[0]], places[group[0]])}"
                for group in list(kinds.values())[:_SHOWN]
            ),
            f"every {self.noun} must issue the same collectives in the same order",
            file=self.file,
        )

    def _refuse_arguments(self, arguments: Mapping[int, tuple[str, ...]]) -> None:
        kinds = _by_value(arguments)
        if len(kinds) == 1:
            return
        (mine, (first, *_)), (theirs, (second, *_)) = list(kinds.items())[:2]
        pair = _first_pair(mine, theirs)
        fail(
            "CP0854",
            f"{self.noun} {second} calls `{self._step.name}` with other arguments than {self.noun} {first}",
            *(f"{self.noun} {number}: {text}" for number, text in zip((first, second), pair, strict=True)),
            *self._calls_at(),
            f"every {self.noun} that issues the same collectives must give the same shapes and types",
            file=self.file,
        )

    def _refuse_programs(self, programs: Mapping[int, str], lowered: Any) -> NoReturn:
        first, second = (group[0] for group in list(_by_value(programs).values())[:2])
        operations = _jit.operations(lowered) if self.machine.process()[0] in programs else []
        shown = [f"{text}{f', at {line}' if (line := _place(places)) else ''}" for text, places in operations]
        lines = first_difference([text for text, _ in operations], self.exchange, shown)
        fail(
            "CP0854",
            f"{self.noun} {second} computes something else than {self.noun} {first} in `{self._step.name}`",
            *(f"{self.noun} {number}: {lines[number]}" for number in (first, second) if number in lines),
            *self._calls_at(),
            "a constant, a static argument or the code differs: devices of one mesh run one program",
            file=self.file,
        )

    def _calls_at(self) -> tuple[str, ...]:
        return (f"called at {self._place}",) if self._place else ()


class ComparedStep(NamedTuple):
    """A step that all processes compare before they run it.

    Attributes:
        function: The step.
        options: The options of `_jit.jit`.
        check: Returns the check that all processes make before the step runs; None if it has been made.
        profile: The profile for compiling the step a second time.
        check_same: Whether to compare the arguments that several processes hold.
    """

    function: Callable[..., Any]
    options: Mapping[str, Any]
    check: Callable[[], Check | None] = lambda: None
    profile: LatencyProfile | None = None
    check_same: bool = True


def jit(machine: Machine, step: ComparedStep, file: str, timeout_s: float) -> Any:
    """The jitted step with a preflight, or without one if this process is the only participant.

    Args:
        machine: The machine of the step.
        step: The function and its options.
        file: The plan's file, or "".
        timeout_s: Seconds to wait for another rank at each exchange.
    """
    function, options = step.function, step.options
    if machine.layout == "global":
        options = {**options, "context": machine.context}
    if step.profile is not None:
        options = {**options, "recompile": step.profile.recompile}
    if len(machine.participants()) == 1:
        return _recorded(machine, function, file, options)
    same = function if step.check_same else None
    ahead = Preflight(machine, file, timeout_s, step.check, step.profile, same)
    jitted = machine.joint.counted(_jit.jit_ahead(function, ahead, **options), ahead)
    if machine.calls is not None:
        jitted, ahead.index = machine.calls.counted(jitted, jitted.__name__)
    return jitted


def _recorded(machine: Machine, function: Callable[..., Any], file: str, options: Mapping[str, Any]) -> Any:
    """The jitted step of the only participant. It counts its calls if steps are recorded."""
    if machine.calls is None:
        return _jit.jit(function, **options)
    places: list[int] = []

    def ahead(jitted: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        traced, lowered = jitted.trace(*args, **kwargs), jitted.lower(*args, **kwargs)
        _locate(machine, places[0], machine.issues(traced, lowered.compile()), file)

    jitted = _jit.jit_ahead(function, ahead, **options)
    counted, index = machine.calls.counted(jitted, jitted.__name__)
    places.append(index)
    return counted


def _locate(machine: Machine, index: int, issues: tuple[Issue, ...], file: str) -> None:
    """Write into the record which lines, of the plan or of the program, request the collectives of a step."""
    if machine.calls is not None:
        lines = [int(line[1]) for issue in issues if (line := _LINE.match(issue.place))]
        sources = dict.fromkeys(issue.place for issue in issues if _SOURCE.fullmatch(issue.place))
        machine.calls.locate(index, lines, file, list(sources))


def issued_together(steps: Mapping[int, Step]) -> dict[int, int]:
    """The number of collectives that each rank completes if each collective waits for all of its ranks.

    It is less than the number of the rank's collectives if ranks deadlock.
    """
    at = dict.fromkeys(steps, 0)
    waiting = deque(steps)
    while waiting:
        number = waiting.popleft()
        for issue in steps[number].issues[at[number] : at[number] + 1]:
            members = _members(issue, steps)
            if all(steps[m].issues[at[m] : at[m] + 1] == (issue,) for m in members):
                at |= {member: at[member] + 1 for member in members}
                waiting.extend(members)
    return at


def _members(issue: Issue, steps: Mapping[int, Step]) -> list[int]:
    """The ranks that take part in `issue`, of those in `steps`."""
    return [number for number in issue.ranks or steps if number in steps]


def _next(step: Step, start: int, issue: Issue) -> int:
    """The index of the next collective of `step` over the ranks of `issue`, or `start` if there is none."""
    places = range(start, len(step.issues))
    return next((place for place in places if step.issues[place].ranks == issue.ranks), start)


def _described(step: Step, place: int) -> str:
    if place == len(step.issues):
        return f"nothing more after {place}"
    issue = step.issues[place]
    text = f"{issue.text}, {issue.place}" if issue.place else issue.text
    return f"{text} (number {place + 1} of {len(step.issues)})"


def _arguments(lowered: Any) -> tuple[str, ...]:
    return tuple(
        f"argument {jax.tree_util.keystr(path[1:])}: {DType.from_name(str(leaf.dtype)) or leaf.dtype}"
        f"{list(leaf.shape)}{', donated' if leaf.donated else ''}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(lowered.args_info)
    )


def _first_pair(mine: Sequence[str], theirs: Sequence[str]) -> tuple[str, str]:
    """The first argument that differs, on both sides. A long text begins shortly before the difference."""
    pairs = itertools.zip_longest(mine, theirs, fillvalue="no more arguments")
    first, second = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
    differs = (at for at, pair in enumerate(zip(first, second, strict=False)) if len({*pair}) > 1)
    same = next(differs, min(len(first), len(second)))
    return _shown(first, same), _shown(second, same)


def _shown(text: str, same: int) -> str:
    """`text`, or the part of a long text that follows its first `same` characters, and some before."""
    if len(text) <= _LONG:
        return text
    begin = max(0, same - _LONG // 2)
    end = begin + _LONG
    return f"{'...' if begin else ''}{text[begin:end]}{'...' if end < len(text) else ''}"


def _place(places: Sequence[str]) -> str:
    """The innermost of `places` that is in the user's program."""
    return next(filter(is_users, places), "")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _by_value(values: Mapping[int, Any]) -> dict[Any, list[int]]:
    """Group ranks by their values, in the order of `values`."""
    groups: dict[Any, list[int]] = {}
    for number, value in values.items():
        groups.setdefault(value, []).append(number)
    return groups


def _named(noun: str, numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"{noun} {numbers[0]}"
    more = f" and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else ""
    return f"{noun}{'es' if noun.endswith('s') else 's'} {', '.join(map(str, numbers[:_SHOWN]))}{more}"
