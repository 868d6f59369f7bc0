"""Measured costs of a machine, in a TOML file that later compilations read.

`commplan calibrate` writes the file. It contains links and collectives, the input, or both:

    version = 1
    date = "2026-11-21"
    backend = "mpi"
    hosts = ["n0", "n0", "n1", "n1"]  # the host of each rank
    overhead = 3.1e-06                # CPU seconds per message, at each end
    gamma = 1.2e-10                   # seconds per reduced byte
    call = 4.9e-05                    # seconds of an empty call into the backend
    round = 1.1e-05                   # seconds of each operation after the first, in form `rounds`
    topology = "cluster"              # the name of the measured topology; optional
    note = "two hosts, idle"          # optional
    [[level]]
    name = "host"
    latency = 6.2e-05                 # seconds
    bandwidth = 2.39e+07              # bytes per second, for each member and direction
    [[curve]]
    kind = "all_reduce"
    algorithm = "ring"
    form = "call"
    shape = "host 0 1 2 3"            # the placement of the ranks, see `network.shape_of`
    sizes = [4, 1048576]              # bytes of the whole buffer
    seconds = [0.0002, 0.066]         # for each size
    chunk = 65536                     # bytes of a message; 0 or absent for the default
    [input]                           # costs of records and host functions: `commplan.input.measured_costs`
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from commplan import io
from commplan.diagnostics import fail
from commplan.input.measured_costs import AtLeastZero, InputCosts, Positive
from commplan.ir.schedule import Backend, Form
from commplan.ir.types import Printed

VERSION = 1
# A file has all of these, or none if it has only [input].
_LINKS = ("backend", "hosts", "overhead", "gamma", "call", "round")


class MeasuredLevel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry `[[level]]`: the links of one level.

    Attributes:
        name: The name of the level in the topology.
        latency: Seconds.
        bandwidth: Bytes per second, for each member and direction.
    """

    name: Printed
    latency: AtLeastZero
    bandwidth: Positive


class Curve(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry `[[curve]]`: times of one collective with one algorithm and one placement of the ranks.

    Attributes:
        kind: The kind of collective.
        algorithm: The algorithm, as in plans; `native` for the library's own.
        form: The form of the program; without meaning for `native`.
        shape: The placement of the ranks, as from `commplan.cost.network.network.shape_of`.
        sizes: Bytes of the whole buffer, as in `CollectiveQuery`, in increasing order.
        seconds: The time for each entry of `sizes`.
        chunk: Bytes of a message; 0 if chunks were not sliced, or the backend chose the size.
    """

    kind: Printed
    algorithm: Printed
    form: Form
    shape: Printed
    sizes: Annotated[tuple[Positive, ...], msgspec.Meta(min_length=1)]
    seconds: Annotated[tuple[Positive, ...], msgspec.Meta(min_length=1)]
    chunk: Annotated[int, msgspec.Meta(ge=0)] = 0

    def at(self, nbytes: float) -> float:
        """Seconds for a buffer of `nbytes`.

        Between two measured sizes, the logarithm of the time is interpolated linearly in the logarithm of the
        size. Below the smallest size it is the time of that size. Above the largest it grows in proportion to
        the size.
        """
        if nbytes <= self.sizes[0]:
            return self.seconds[0]
        if nbytes >= self.sizes[-1]:
            return self.seconds[-1] * nbytes / self.sizes[-1]
        index_above = next(index for index, size in enumerate(self.sizes) if size >= nbytes)
        (x0, x1), (y0, y1) = (
            self.sizes[index_above - 1 : index_above + 1],
            self.seconds[index_above - 1 : index_above + 1],
        )
        part = math.log(nbytes / x0) / math.log(x1 / x0)
        return y0 * (y1 / y0) ** part


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a calibration file.

    Attributes:
        date: The date of the measurement, ISO 8601.
        backend: The backend of the measurements of links and collectives; without meaning if only the input
            was measured.
        hosts: The host of each rank; empty if only the input was measured.
        overhead: CPU seconds per message, at each end.
        gamma: Seconds per reduced byte.
        call: Seconds of an empty call into the backend.
        round: Seconds of each operation after the first, in form `rounds`.
        levels: The measured levels.
        curve_list: The measured collectives.
        topology: The name of the measured topology; "" if unknown.
        note: A remark on the measurement.
        input: Costs of the input; None if they were not measured.
        version: The version of the file format.
    """

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
        """This calibration if it contains links and collectives; None if it contains only the input."""
        return self if self.hosts or self.input is None else None

    def check_backend(self, backend: Backend, file: str = "") -> None:
        """Check that links, if they were measured, were measured with `backend`.

        Raises:
            CommplanError: CP0753 if they were measured with another backend. It names `file`, the file of
                this calibration.
        """
        if self.links is not None and self.backend != backend:
            message = f"the calibration is for {self.backend}, but the plan is compiled for {backend}"
            note = f"compile with --backend {self.backend}, or measure with {backend}"
            fail("CP0753", message, note, file=file)

    def curve(
        self, backend: Backend, kind: str, algorithm: str, form: Form, shape: str, chunk: int | None
    ) -> Curve | None:
        """The curve of a collective; None if it was not measured.

        Args:
            backend: The backend.
            kind: The kind of collective.
            algorithm: The algorithm, as in plans.
            form: The form; ignored for `native`.
            shape: The placement of the ranks, as from `shape_of`.
            chunk: Bytes of a message, which must be equal; None for the default. Ignored for `native`.
        """
        if backend != self.backend:
            return None
        is_native = algorithm == "native"
        matches = (
            curve
            for curve in self.curve_list
            if (curve.kind, curve.algorithm, curve.shape) == (kind, algorithm, shape)
            and (is_native or (curve.form, curve.chunk) == (form, chunk or 0))
        )
        return next(matches, None)


def load_calibration(path: str | Path) -> Calibration:
    """Load the calibration at `path`.

    Raises:
        CommplanError: CP0751 if the file cannot be read or is malformed.
    """
    file = str(path)
    try:
        text = io.read(path).decode()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        fail("CP0751", f"calibration {file} cannot be read: {reason}", file=file)
    return parse_calibration(text, file)


def parse_calibration(text: str, file: str = "<calibration>") -> Calibration:
    """Parse a calibration from TOML.

    Args:
        text: The content of the file.
        file: Its name, for errors.

    Raises:
        CommplanError: CP0751 if the text is not TOML, has another version or other fields, or contains
            numbers, levels or curves that cannot be used.
    """
    try:
        content = io.decode_toml(text)
    except ValueError as error:
        fail("CP0751", f"the calibration is not TOML: {error}", file=file)
    version = content.get("version")
    if version != VERSION:
        message = f"the calibration has version {version!r}, expected {VERSION}"
        fail("CP0751", message, "measure again with `commplan calibrate`", file=file)
    if "input" in content and not any(key in content for key in (*_LINKS, "level", "curve")):
        content |= {"backend": "jax", "hosts": [], **dict.fromkeys(_LINKS[2:], 0.0)}
    try:
        calibration = msgspec.convert(content, Calibration)
    except msgspec.ValidationError as error:
        fail("CP0751", f"the calibration is malformed: {error}", "the manual describes its keys", file=file)
    _check(calibration, file)
    return calibration


def _check(calibration: Calibration, file: str) -> None:
    """Raise CP0751 for numbers, levels and curves that cannot be used."""
    numbers = [calibration.overhead, calibration.gamma, calibration.call, calibration.round]
    numbers += [n for level in calibration.levels for n in (level.latency, level.bandwidth)]
    numbers += [n for curve in calibration.curve_list for n in (*curve.sizes, *curve.seconds)]
    numbers += _input_numbers(calibration.input) if calibration.input else []
    if not all(map(math.isfinite, numbers)):
        fail("CP0751", "the calibration contains a number that is not finite", file=file)
    names = [level.name for level in calibration.levels]
    for name in (name for i, name in enumerate(names) if name in names[:i]):
        fail("CP0751", f"the calibration contains level `{name}` twice", file=file)
    for curve in calibration.curve_list:
        label = f"the curve of {curve.kind} via {curve.algorithm} on {curve.shape}"
        if len(curve.sizes) != len(curve.seconds):
            fail("CP0751", f"{label} has {len(curve.sizes)} sizes and {len(curve.seconds)} times", file=file)
        if any(a >= b for a, b in itertools.pairwise(curve.sizes)):
            fail("CP0751", f"the sizes of {label} are not increasing", file=file)


def _input_numbers(costs: InputCosts) -> list[float]:
    """All numbers of `costs` that must be finite."""
    tables = (*costs.source, *costs.fn, *costs.consumer)
    values = [value for table in (costs, *tables) for value in msgspec.structs.asdict(table).values()]
    return [value for value in values if isinstance(value, float)]


def only_input(date: str, costs: InputCosts) -> Calibration:
    """A calibration that contains only the input. Its costs of links are zeros, which are never used."""
    return Calibration(date, "jax", (), 0.0, 0.0, 0.0, 0.0, input=costs)


def write_calibration(calibration: Calibration) -> str:
    """The text of the file. `parse_calibration` restores an equal calibration."""
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
    """The entries of `table` as lines of TOML. Entries that are None are omitted, since TOML has no null."""
    return [f"{key} = {_toml(value)}" for key, value in table.items() if value is not None]


def _toml(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, str):
        return msgspec.json.encode(value).decode()  # TOML's basic strings have the escapes of JSON
    return repr(value)
