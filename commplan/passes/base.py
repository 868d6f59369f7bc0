"""The base class of passes, their context, and their text form.

A pass is a frozen struct whose fields are its options. Its text form, such as `bucket{max=25MiB}`, is what
`--passes` and reports contain. `pipeline.manager` runs passes one after another.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import msgspec
from msgspec.structs import replace

from commplan.diagnostics import did_you_mean, fail
from commplan.ir.hints import Algorithm
from commplan.ir.remark import Choice
from commplan.ir.schedule import Collective, Phase, Schedule

if TYPE_CHECKING:
    from commplan.cost.calibration import Calibration
    from commplan.cost.schedule.predictor import Predictor
    from commplan.cost.schedule.step import StepComputation
    from commplan.select.algorithm_search import CandidateCache
    from commplan.topology import Topology

_fields = functools.cache(msgspec.structs.fields)  # cached by class
_UNITS = {"KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}  # bytes


class StageKey(NamedTuple):
    """Identifies the collectives of a stage.

    Attributes:
        phase: The name of the phase.
        stage: The first stage that they carry out, as in `Collective.stages`; "" if there is none.
        kind: Their kind.
        axes: Their axes.
    """

    phase: str
    stage: str
    kind: str
    axes: tuple[str, ...]


class StageChoice(msgspec.Struct, frozen=True):
    """A choice for the collectives of a stage. Passes decide about options that are None.

    Attributes:
        bucket: Largest number of bytes of a bucket.
        algorithm: Their algorithm. It may be `hierarchical` without the algorithms of its levels.
        chunk: Bytes of a message.
        separate: Whether they share no buckets with the collectives of other stages.
    """

    bucket: int | None = None
    algorithm: Algorithm | None = None
    chunk: int | None = None
    separate: bool = False


Choices = Mapping[StageKey, StageChoice]
NO_CHOICES: Choices = {}  # the choices if there was no search
OPEN = StageChoice()  # the choice for a stage about which the search did not decide


def key_of(phase: Phase, op: Collective) -> StageKey:
    """The key of the stage of `op`, in `phase`."""
    return StageKey(phase.name, next(iter(op.stages), ""), op.kind, op.axes)


class PassContext(msgspec.Struct, frozen=True):
    """The information available to passes in addition to the schedule.

    Attributes:
        order: By the name of an input, leaf paths in the order of the backward pass. Other inputs are
            computed in reverse order of their leaves.
        topology: The machine; None if it is unknown.
        calibration: Measurements of the machine; None if there are none.
        places: The place of each rank in mesh order; None if the axes determine them.
        costs: Predicts times; None without a topology.
        step: The computation that phases overlap with; None to assume one.
        choices: The choices of the search for stages; None if there was no search.
        explains: Whether passes record the reasons of their choices.
        candidates: The algorithms that passes have compared already, for schedules with the same axes.
    """

    order: Mapping[str, Sequence[str]] = msgspec.field(default_factory=dict[str, Sequence[str]])
    topology: Topology | None = None
    calibration: Calibration | None = None
    places: tuple[int, ...] | None = None
    costs: Predictor | None = None
    step: StepComputation | None = None
    choices: Choices | None = None
    explains: bool = True
    candidates: CandidateCache = msgspec.field(default_factory=dict[tuple[object, ...], Any])

    def chosen(self, phase: Phase, op: Collective) -> StageChoice:
        """The search's choice for the stage of `op`, in `phase`; `OPEN` if it did not decide."""
        return (self.choices or NO_CHOICES).get(key_of(phase, op), OPEN)


class Pass(msgspec.Struct, frozen=True):
    """A rewrite of a schedule. Subclasses declare options as fields with defaults.

    The first line of a subclass's docstring is its summary in `commplan passes`.

    Class attributes:

    - `name`: the name of the pass.
    - `after`: the passes that must not run after this one.
    """

    name: ClassVar[str] = ""
    after: ClassVar[tuple[str, ...]] = ()

    def run(self, schedule: Schedule, context: PassContext) -> Schedule:
        """Return the rewritten schedule, with the decisions of the pass appended to its choices."""
        choices = list(schedule.choices)
        phases = tuple(self.phases(schedule, context, choices))
        return replace(schedule, phases=phases, choices=tuple(choices))

    def phases(self, schedule: Schedule, context: PassContext, choices: list[Choice]) -> Iterable[Phase]:
        """Return the rewritten phases of `schedule`, and append decisions to `choices`."""
        raise NotImplementedError

    @classmethod
    def summary(cls) -> str:
        """The first line of the docstring."""
        return (cls.__doc__ or "").strip().splitlines()[0]

    def __str__(self) -> str:
        """The text form, with the options that differ from their defaults. `parse_pass` parses it."""
        changed = [
            f"{field.name}={written(getattr(self, field.name))}"
            for field in _fields(type(self))
            if getattr(self, field.name) != field.default
        ]
        return f"{self.name}{{{', '.join(changed)}}}" if changed else self.name


def parse_pass(text: str, passes: Mapping[str, type[Pass]]) -> Pass:
    """Parse a pass such as `bucket{max=25MiB}`.

    Args:
        text: The text of one pass.
        passes: The known passes by name.

    Raises:
        CommplanError: CP0715 for an unknown pass, CP0716 for an unknown option or an invalid value, CP0717
            for invalid syntax.
    """
    match = re.fullmatch(r"\s*([a-z_]+)\s*(?:\{([^{}]*)\})?\s*", text)
    if match is None:
        fail("CP0717", f"`{text}` is not a pass", "a pass is written `name` or `name{option=value, ..}`")
    name, options = match[1], match[2]
    if name not in passes:
        fail("CP0715", f"there is no pass `{name}`", _nearest(name, passes))
    fields = {field.name: field for field in _fields(passes[name])}
    values: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in (options or "").split(","))):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not value:
            fail(
                "CP0717",
                f"`{item}` in `{text.strip()}` is not an option",
                "an option is written `name=value`",
            )
        if key not in fields:
            fail("CP0716", f"pass `{name}` has no option `{key}`", _nearest(key, fields))
        if key in values:
            fail("CP0716", f"option `{key}` of pass `{name}` is repeated")
        values[key] = _parse(value, fields[key].type, f"option `{key}` of pass `{name}`")
    return passes[name](**values)


def _nearest(name: str, candidates: Mapping[str, Any]) -> str:
    return did_you_mean(name, candidates, "known:")


def written(value: Any) -> str:
    """Format the value of an option as in a pipeline's text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        for unit in ("GiB", "MiB", "KiB"):
            if value and value % _UNITS[unit] == 0:
                return f"{value // _UNITS[unit]}{unit}"
    return str(value)


def _parse(text: str, kind: Any, option: str) -> Any:
    """Parse the value of an option of type `kind`. Raises CP0716, with `option` as its description."""
    number = re.fullmatch(r"([0-9]+)\s*(KiB|MiB|GiB)?", text)
    plain: Any = text
    if number is not None:
        plain = int(number[1]) * _UNITS.get(number[2], 1)
    elif text in ("true", "false"):
        plain = text == "true"
    try:
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as error:
        return fail("CP0716", f"{option} cannot be `{text}`", str(error).replace(" | null", ""))
