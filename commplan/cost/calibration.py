"""What was measured on a machine, dated, in a file that later compilations read.

version = 1
date = "2026-11-21"
backend = "mpi"
hosts = ["n0", "n0", "n1", "n1"]      # of each rank
overhead = 3.1e-06                    # seconds of CPU for a message, at each end
gamma = 1.2e-10                       # seconds for each byte reduced
call = 4.9e-05                        # seconds of an empty call into the backend
round = 1.1e-05                       # seconds of each operation after the first, in form `rounds`
[[level]]
name = "host"
latency = 6.2e-05                     # seconds
bandwidth = 2.39e+07                  # bytes a second, for each member and direction
[[curve]]
kind = "all_reduce"
algorithm = "ring"
form = "call"
shape = "host 0 1 2 3"                # how the ranks lie, see `network.shape_of`
sizes = [4, 1048576]                  # bytes of the whole buffer
seconds = [0.0002, 0.066]
[input]                               # of records and host functions: `commplan.input.measured_costs`

A file may hold the links and collectives, the input, or both.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from commplan import io
from commplan.diagnostics import fail
from commplan.input.measured_costs import InputCosts
from commplan.ir.schedule import Backend, Form
from commplan.ir.types import Printed

VERSION = 1
_LINKS = ("backend", "hosts", "overhead", "gamma", "call", "round")  # all of them, or none beside an [input]

Positive = Annotated[float, msgspec.Meta(gt=0)]
AtLeastZero = Annotated[float, msgspec.Meta(ge=0)]


class MeasuredLevel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One level: latency in seconds, bandwidth in bytes a second for each member and direction."""

    name: Printed
    latency: AtLeastZero
    bandwidth: Positive


class Curve(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Times of one collective, carried out in one way by ranks that lie in one way.

    sizes: bytes of the whole buffer, growing. seconds: one for each. chunk: bytes of a message, 0 where
    chunks were not cut or the backend chose.
    """

    kind: Printed
    algorithm: Printed
    form: Form
    shape: Printed
    sizes: Annotated[tuple[Positive, ...], msgspec.Meta(min_length=1)]
    seconds: Annotated[tuple[Positive, ...], msgspec.Meta(min_length=1)]
    chunk: Annotated[int, msgspec.Meta(ge=0)] = 0

    def at(self, nbytes: float) -> float:
        """Seconds for `nbytes`: linear between the measured sizes in the logarithms of both, the shortest
        time below them, in proportion above."""
        if nbytes <= self.sizes[0]:
            return self.seconds[0]
        if nbytes >= self.sizes[-1]:
            return self.seconds[-1] * nbytes / self.sizes[-1]
        after = next(index for index, size in enumerate(self.sizes) if size >= nbytes)
        (x0, x1), (y0, y1) = self.sizes[after - 1 : after + 1], self.seconds[after - 1 : after + 1]
        part = math.log(nbytes / x0) / math.log(x1 / x0)
        return y0 * (y1 / y0) ** part


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measured costs; the file is described above. `date` is ISO 8601."""

    date: Printed
    backend: Backend
    hosts: tuple[Printed, ...]
    overhead: AtLeastZero
    gamma: AtLeastZero
    call: AtLeastZero
    round: AtLeastZero
    levels: tuple[MeasuredLevel, ...] = msgspec.field(default=(), name="level")
    curve_list: tuple[Curve, ...] = msgspec.field(default=(), name="curve")
    topology: Printed = ""
    note: str = ""
    input: InputCosts | None = None
    version: Literal[1] = VERSION

    @property
    def links(self) -> Calibration | None:
        """This, where links and collectives were measured; None where only the input was."""
        return self if self.hosts or self.input is None else None

    def check_backend(self, backend: Backend, file: str = "") -> None:
        """Raises CP0753 where links were measured, and of another backend. file: of this calibration."""
        if self.links is not None and self.backend != backend:
            message = f"the calibration is of {self.backend}, and the plan is compiled for {backend}"
            note = f"compile with --backend {self.backend}, or measure with {backend}"
            fail("CP0753", message, note, file=file)

    def curve(
        self, backend: Backend, kind: str, algorithm: str, form: Form, shape: str, chunk: int | None
    ) -> Curve | None:
        """What was measured of exactly this, messages of `chunk` bytes included."""
        if backend != self.backend:
            return None
        native = algorithm == "native"
        matches = (
            curve
            for curve in self.curve_list
            if (curve.kind, curve.algorithm, curve.shape) == (kind, algorithm, shape)
            and (native or (curve.form, curve.chunk) == (form, chunk or 0))
        )
        return next(matches, None)


def load_calibration(path: str | Path) -> Calibration:
    """The calibration in the file at `path`. Raises CP0751 where it cannot be read or is malformed."""
    place = str(path)
    try:
        text = io.read(path).decode()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        fail("CP0751", f"calibration {place} cannot be read: {why}", file=place)
    return parse_calibration(text, place)


def parse_calibration(text: str, file: str = "<calibration>") -> Calibration:
    """The calibration that `text` (TOML) holds. Raises CP0751, which names what is wrong."""
    try:
        content = io.decode_toml(text)
    except ValueError as error:
        fail("CP0751", f"the calibration is no TOML: {error}", file=file)
    version = content.get("version")
    if version != VERSION:
        message = f"the calibration has version {version!r}, expected {VERSION}"
        fail("CP0751", message, "measure again with `commplan calibrate`", file=file)
    if "input" in content and not any(key in content for key in (*_LINKS, "level", "curve")):
        content |= {"backend": "jax", "hosts": [], **dict.fromkeys(_LINKS[2:], 0.0)}
    try:
        calibration = msgspec.convert(content, Calibration)
    except msgspec.ValidationError as error:
        fail("CP0751", f"the calibration is malformed: {error}", "see the manual on its keys", file=file)
    _check(calibration, file)
    return calibration


def _check(calibration: Calibration, file: str) -> None:
    numbers = [calibration.overhead, calibration.gamma, calibration.call, calibration.round]
    numbers += [n for level in calibration.levels for n in (level.latency, level.bandwidth)]
    numbers += [n for curve in calibration.curve_list for n in (*curve.sizes, *curve.seconds)]
    numbers += _input_numbers(calibration.input) if calibration.input else []
    if not all(map(math.isfinite, numbers)):
        fail("CP0751", "the calibration holds a number that is not finite", file=file)
    names = [level.name for level in calibration.levels]
    for twice in (name for i, name in enumerate(names) if name in names[:i]):
        fail("CP0751", f"level `{twice}` is in the calibration twice", file=file)
    for curve in calibration.curve_list:
        label = f"the curve of {curve.kind} via {curve.algorithm} on {curve.shape}"
        if len(curve.sizes) != len(curve.seconds):
            fail("CP0751", f"{label} has {len(curve.sizes)} sizes and {len(curve.seconds)} times", file=file)
        if any(a >= b for a, b in itertools.pairwise(curve.sizes)):
            fail("CP0751", f"the sizes of {label} do not grow", file=file)


def _input_numbers(costs: InputCosts) -> list[float]:
    tables = (*costs.source, *costs.fn, *costs.consumer)
    values = [value for table in (costs, *tables) for value in msgspec.structs.asdict(table).values()]
    return [value for value in values if isinstance(value, float)]


def only_input(date: str, costs: InputCosts) -> Calibration:
    """A calibration of the input alone."""
    return Calibration(date, "jax", (), 0.0, 0.0, 0.0, 0.0, input=costs)


def write_calibration(calibration: Calibration) -> str:
    """The text of the file: `parse_calibration` gives back an equal calibration."""
    content: dict[str, Any] = msgspec.to_builtins(calibration)
    tables = {name: content.pop(name) for name in ("level", "curve")}
    measured: dict[str, Any] | None = content.pop("input")
    head = {"version": content.pop("version"), **content}
    if calibration.links is None:
        head = {key: value for key, value in head.items() if key not in _LINKS}
    lines = toml_pairs(head)
    for name, rows in tables.items():
        for row in rows:
            lines += ["", f"[[{name}]]", *toml_pairs(row)]
    if measured is not None:
        rows = {name: measured.pop(name) for name in ("source", "fn", "consumer")}
        lines += ["", "[input]", *toml_pairs(measured)]
        for name, listed in rows.items():
            for row in listed:
                lines += ["", f"[[input.{name}]]", *toml_pairs(row)]
    return "\n".join(lines) + "\n"


def toml_pairs(table: dict[str, Any]) -> list[str]:
    """Lines of TOML, which has no word for None."""
    return [f"{key} = {_toml(value)}" for key, value in table.items() if value is not None]


def _toml(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, str):
        return msgspec.json.encode(value).decode()  # TOML's basic strings have JSON's escapes
    return repr(value)
