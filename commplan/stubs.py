"""`commplan stubs`: a typed face of plans, for editors and type checkers.

What a phase takes, reads, returns and sets depends neither on sizes nor on shapes, so each plan is lowered
for axes of size 1, where it says no other, and trees of one leaf. Values of type tree are `Any`; arrays are
`jax.Array`, and `ArrayLike` where a phase takes them.
"""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from commplan.compiler import compile_plan
from commplan.diagnostics import fail
from commplan.ir import plan as graph
from commplan.ir import schedule as ir
from commplan.ir.analysis.input_slice import source_only
from commplan.ir.types import DType, TreeType

_CALLS = "#calls"  # the entry of the state that counts calls of random functions
_HEAD = '''"""Typed faces of plans, written by `commplan stubs`. For type checkers: no such module can be run.

from __future__ import annotations
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import {module}

plan: commplan.Plan[{module}.{name}] = commplan.load("{file}")
"""

{imports}
'''
_IMPORTS = {
    "collections.abc": ("Iterator", "Mapping"),
    "typing": ("Any", "Literal", "TypedDict", "overload"),
    "commplan.typing": ("Batches", "TypedRun"),
    "jax": ("Array",),
    "jax.typing": ("ArrayLike",),
}


class _Argument(msgspec.Struct, frozen=True):
    """Something by name: its type as Python's, and its type and placement as the plan's."""

    name: str
    type: str
    remark: str


class _Phase(msgspec.Struct, frozen=True):
    name: str
    title: str
    period: int  # 0: it is none of `every`
    reads: dict[str, str]  # states, with their types
    takes: tuple[_Argument, ...]
    gives: tuple[_Argument, ...]
    batches: bool


def stubs(plans: Sequence[graph.Plan], module: str) -> str:
    """The text of `MODULE.pyi` with a face for each plan.

    Raises CP1126 where two plans or phases would have one class, and what compiling raises.
    """
    names = [_class_of(plan.name) for plan in plans]
    if (twice := _repeated(names)) is not None:
        fail("CP1126", f"two plans would have the face `{twice}`", "write them into files of their own")
    faces = [_face(name, plan) for name, plan in zip(names, plans, strict=True)]
    if (twice := _repeated(re.findall(r"^(?:class )?(\w+)(?=[:(]| = )", "".join(faces), re.M))) is not None:
        note = "they are called as plan and phase, some with `State` or `Outputs` behind: rename a phase"
        fail("CP1126", f"two classes would be called `{twice}`", note)
    used = set(re.findall(r"\w+", "".join(faces)))
    imports = {place: [word for word in words if word in used] for place, words in _IMPORTS.items()}
    lines = [f"from {place} import {', '.join(words)}" for place, words in imports.items() if words]
    head = _HEAD.format(module=module, name=names[0], file=plans[0].file, imports="\n".join(lines))
    return "\n".join([head, *faces])


def _face(name: str, plan: graph.Plan) -> str:
    schedule = _lowered(plan)
    phases = [_phase(schedule, phase) for phase in schedule.phases]
    states = _held(schedule, schedule.states) | {k: v for own in phases for k, v in own.reads.items()}
    text = f"\n{_typed_dict(f'{name}State', states)}"
    for phase in phases:
        text += _outputs(name, phase) + _callable(name, phase)
    periods = [phase for phase in phases if phase.period]
    if periods:
        text += _every(name, periods)
    return text + _run(name, plan, phases, schedule.named)


def _lowered(plan: graph.Plan) -> ir.Schedule:
    """The plan for one rank of every axis whose size it leaves open, before any pass."""
    sizes = {axis.name: axis.size or 1 for axis in plan.axes}
    leaf = ir.Leaf("x", (math.prod(sizes.values()),), DType.F32)  # which all of them together can cut
    leaves = {value.name: (leaf,) for value in plan.values if isinstance(value.type, TreeType)}
    has_servers = any(axis.kind is graph.AxisKind.SERVER for axis in plan.axes)
    return compile_plan(plan, sizes, leaves, pipeline="", backend="mpi" if has_servers else "jax")


def _phase(schedule: ir.Schedule, phase: ir.Phase) -> _Phase:
    values = {value.id: value for value in (*schedule.entry, *phase.values)}
    inputs = {graph.name_of(ref): values[ref] for ref in phase.inputs}
    inputs |= {binding.name: values[binding.value] for binding in phase.takes}
    outputs = {binding.name: values[binding.value] for binding in phase.outputs if not binding.source_only}
    every, ahead = phase.kind == "every", source_only(phase)
    draws = any(isinstance(op, ir.Map) and op.random and not op.runs_ahead(ahead) for op in phase.ops)
    titles = {"start": "at start", "step": "each step", "every": f"every {phase.period} steps"}
    return _Phase(
        phase.name,
        titles.get(phase.kind, f"phase {phase.name}"),
        phase.period if every else 0,
        _held(schedule, phase.states) | ({_CALLS: "Mapping[str, Array]"} if draws else {}),
        tuple(_argument(name, value, "ArrayLike") for name, value in inputs.items()),
        tuple(_argument(name, value, "Array") for name, value in outputs.items()),
        any(isinstance(op, ir.Read) for op in phase.ops),
    )


def _argument(name: str, value: ir.Value, array: str) -> _Argument:
    kind = value.kind if value.kind != "array" else str(value.leaves[0].dtype)
    return _Argument(name, "Any" if value.kind == "tree" else array, f"{kind} {value.placement}")


def _outputs(name: str, phase: _Phase) -> str:
    """The class of what a phase returns: its outputs as attributes and by name."""
    lines = ["", "", f"class {_class(name, phase)}Outputs:"]
    lines.append(f'    """What `run.{_called(phase)}` returns beside the state."""')
    for own in phase.gives:
        if keyword.iskeyword(own.name):  # which is read by name alone
            continue
        lines += [
            "",
            "    @property",
            f"    def {own.name}(self) -> {own.type}:",
            f'        """{own.remark}"""',
        ]
    if phase.gives:
        lines.append("")
    for own in phase.gives:
        lines += ["    @overload"] * (len(phase.gives) > 1)
        lines.append(f'    def __getitem__(self, name: Literal["{own.name}"], /) -> {own.type}: ...')
    lines += [
        "    def __iter__(self) -> Iterator[str]: ...",
        "    def __len__(self) -> int: ...",
        "    def __contains__(self, name: object, /) -> bool: ...",
    ]
    return "\n".join(lines) + "\n"


def _callable(name: str, phase: _Phase) -> str:
    own = _class(name, phase)
    lines = ["", "", _typed_dict(f"{own}State", phase.reads)]
    lines += ["", f"class {own}:", f'    """`{phase.title}`."""', "", "    name: str"]
    takes = "".join(
        f", {argument.name}: {argument.type}"
        for argument in phase.takes
        if not keyword.iskeyword(argument.name)
    )
    others = any(keyword.iskeyword(argument.name) for argument in phase.takes)  # given as `**{"import": ..}`
    takes = (f", *{takes}" if takes else "") + (", **others: Any" if others else "")
    lines.append(f"    def __call__(self, state: {own}State, /{takes}) -> tuple[{own}Outputs, {name}State]:")
    remarks = "; ".join(f"{argument.name}: {argument.remark}" for argument in phase.takes)
    lines.append(f'        """{remarks or "It takes nothing but the state."}"""')
    return "\n".join(lines) + "\n"


def _every(name: str, phases: Sequence[_Phase]) -> str:
    lines = ["", "", f"class {name}Every:", '    """The phases `every N steps`, by N."""', ""]
    for phase in phases:
        lines += ["    @overload"] * (len(phases) > 1)
        lines.append(
            f"    def __getitem__(self, period: Literal[{phase.period}], /) -> {_class(name, phase)}: ..."
        )
    lines += ["    def __iter__(self) -> Iterator[int]: ...", "    def __len__(self) -> int: ..."]
    return "\n".join(lines) + "\n"


def _run(name: str, plan: graph.Plan, phases: Sequence[_Phase], values: Iterable[str]) -> str:
    where = f" of {plan.file}" if plan.file else ""
    lines = ["", "", f"class {name}(TypedRun):", f'    """A run of plan `{plan.name}`{where}."""', ""]
    plain = [phase for phase in phases if not phase.period and phase.name.isidentifier()]
    lines += [
        f"    {phase.name}: {_class(name, phase)}" for phase in plain if not keyword.iskeyword(phase.name)
    ]
    if any(phase.period for phase in phases):
        lines.append(f"    every: {name}Every")
    lines.append(f"    def init(self) -> {name}State: ...  # type: ignore[override]")
    lines.append(f"    def sharding(self, name: {_literal(values)}) -> Any: ...  # type: ignore[override]")
    readers = [phase.name for phase in phases if phase.batches]
    if readers:
        default = ' = "step"' if "step" in readers else ""
        lines += [
            "    def batches(  # type: ignore[override]",
            f"        self, phase: {_literal(readers)}{default}, *, member: int | None = None,",
            "        state: Mapping[str, int] | None = None, group: Any = None,",
            "        timeout: float | None = None,",
            '        workers: Literal["threads", "processes"] = "threads",',
            "    ) -> Batches: ...",
        ]
    return "\n".join(lines) + "\n"


def _held(schedule: ir.Schedule, states: Iterable[str]) -> dict[str, str]:
    """Those of `states` that workers hold, with their types."""
    entries = {value.id: value for value in schedule.entry}
    held = [entries[ref] for ref in states if entries[ref].placement.server is None]
    return {graph.name_of(value.id): "Any" if value.kind == "tree" else "Array" for value in held}


def _typed_dict(name: str, states: Mapping[str, str]) -> str:
    entries = ", ".join(f'"{state}": {kind}' for state, kind in states.items())
    return f'{name} = TypedDict("{name}", {{{entries}}})\n'


def _literal(names: Iterable[str]) -> str:
    quoted = ", ".join(f'"{name}"' for name in names)
    return f"Literal[{quoted}]"


def _class(name: str, phase: _Phase) -> str:
    return f"{name}{_camel(phase.name)}"


def _called(phase: _Phase) -> str:
    return f"every[{phase.period}]" if phase.period else phase.name


def _class_of(plan: str) -> str:
    """The name of a plan in CamelCase, or as it is with `_` behind it where Python has no such name."""
    name = _camel(plan)
    return name if name.isidentifier() and not keyword.iskeyword(name) else f"{plan}_"


def _repeated(names: Sequence[str]) -> str | None:
    return next((name for name in names if names.count(name) > 1), None)


def _camel(name: str) -> str:
    return "".join(part[:1].upper() + part[1:] for part in re.split(r"_+", name) if part)
