"""What a pass is: a frozen struct whose fields are its options, and its text form."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import msgspec
from msgspec.structs import replace

from commplan.diagnostics import Span, did_you_mean, fail
from commplan.ir.hints import Algorithm
from commplan.ir.remark import Choice
from commplan.ir.schedule import Collective, Phase, Schedule

if TYPE_CHECKING:
    from commplan.cost.calibration import Calibration
    from commplan.cost.predictor import Predictor
    from commplan.cost.schedule.step import StepComputation
    from commplan.topology import Topology

_fields = functools.cache(msgspec.structs.fields)  # by class
_UNITS = {"KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}


class StageKey(NamedTuple):
    """The collectives of a stage: of one phase and plan line, of one kind, over the same axes."""

    phase: str
    span: Span
    kind: str
    axes: tuple[str, ...]


class StageChoice(msgspec.Struct, frozen=True):
    """The choice for the collectives of a stage. None leaves it to the pass.

    bucket: bytes of a bucket at most. algorithm: of all of them, levels left open or named. chunk: bytes of a
    message.
    """

    bucket: int | None = None
    algorithm: Algorithm | None = None
    chunk: int | None = None


Choices = Mapping[StageKey, StageChoice]
NO_CHOICES: Choices = {}
OPEN = StageChoice()


def key_of(phase: Phase, op: Collective) -> StageKey:
    """The key of the stage that `op`, of `phase`, carries out."""
    return StageKey(phase.name, op.span, op.kind, op.axes)


class Context(msgspec.Struct, frozen=True):
    """What passes may look at beside the schedule.

    order: name -> leaf paths in the order in which the backward pass makes them. topology: the machine.
    calibration: what was measured on it. places: the place of each rank, where ranks are known to lie
    otherwise than the axes say. costs: predicts times; None without a topology. step: the computation beside
    which phases run; None if it is not known. choices: what was chosen for stages before the passes run.
    explains: whether passes say why they choose.
    """

    order: Mapping[str, Sequence[str]] = msgspec.field(default_factory=dict[str, Sequence[str]])
    topology: Topology | None = None
    calibration: Calibration | None = None
    places: tuple[int, ...] | None = None
    costs: Predictor | None = None
    step: StepComputation | None = None
    choices: Choices | None = None
    explains: bool = True

    def chosen(self, phase: Phase, op: Collective) -> StageChoice:
        """What was chosen for the stage that `op`, of `phase`, carries out."""
        return (self.choices or NO_CHOICES).get(key_of(phase, op), OPEN)


class Pass(msgspec.Struct, frozen=True):
    """One rewrite of a schedule. Subclasses add options as fields with defaults.

    The docstring's first line is its summary; `after` names the passes that must not come later.
    """

    name: ClassVar[str] = ""
    after: ClassVar[tuple[str, ...]] = ()

    def run(self, schedule: Schedule, context: Context) -> Schedule:
        """`schedule` rewritten; choices recorded in it."""
        choices = list(schedule.choices)
        phases = tuple(self.phases(schedule, context, choices))
        return replace(schedule, phases=phases, choices=tuple(choices))

    def phases(self, schedule: Schedule, context: Context, choices: list[Choice]) -> Iterable[Phase]:
        """The phases of `schedule` rewritten; what is decided is appended to `choices`."""
        raise NotImplementedError

    @classmethod
    def summary(cls) -> str:
        return (cls.__doc__ or "").strip().splitlines()[0]

    def __str__(self) -> str:
        changed = [
            f"{field.name}={written(getattr(self, field.name))}"
            for field in _fields(type(self))
            if getattr(self, field.name) != field.default
        ]
        return f"{self.name}{{{', '.join(changed)}}}" if changed else self.name


def parse_pass(text: str, known: Mapping[str, type[Pass]]) -> Pass:
    """The pass that `text` names, such as `bucket{max=25MiB}`.

    Raises CP0715 for an unknown pass, CP0716 for an unknown option or a wrong value, CP0717 for
    text of another form.
    """
    match = re.fullmatch(r"\s*([a-z_]+)\s*(?:\{([^{}]*)\})?\s*", text)
    if match is None:
        fail("CP0717", f"`{text}` is no pass", "a pass is written `name` or `name{option=value, ..}`")
    name, options = match[1], match[2]
    if name not in known:
        fail("CP0715", f"there is no pass `{name}`", _nearest(name, known))
    fields = {field.name: field for field in _fields(known[name])}
    values: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in (options or "").split(","))):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not value:
            fail("CP0717", f"`{item}` in `{text.strip()}` is no option", "an option is written `name=value`")
        if key not in fields:
            fail("CP0716", f"pass `{name}` has no option `{key}`", _nearest(key, fields))
        if key in values:
            fail("CP0716", f"option `{key}` of pass `{name}` is given twice")
        values[key] = _parse(value, fields[key].type, f"option `{key}` of pass `{name}`")
    return known[name](**values)


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    return did_you_mean(name, known, "known:")


def written(value: Any) -> str:
    """The value of an option as a pipeline writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        for unit in ("GiB", "MiB", "KiB"):
            if value and value % _UNITS[unit] == 0:
                return f"{value // _UNITS[unit]}{unit}"
    return str(value)


def _parse(text: str, kind: Any, option: str) -> Any:
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
