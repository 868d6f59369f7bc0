"""Typed stubs of plans, for editors and type checkers; `commplan stubs` writes them.

Arguments, states and results of phases depend neither on sizes nor on shapes, so each plan is lowered with
open axes of size 1 and trees with one leaf. Trees have type `Any`; arrays have type `jax.Array`, or
`ArrayLike` as arguments.
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

_CALLS = "#calls"  # the entry of the state that counts the calls of phases that depend on their number
# The beginning of a stub file.
_HEAD = '''"""Typed faces of plans, written by `commplan stubs`. For type checkers: no such module can be run.

from __future__ import annotations
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import {module}

plan: commplan.Plan[{module}.{name}] = commplan.load("{file}")
"""

{imports}
'''
_IMPORTS = {  # names that stubs may use, by module; a stub file imports those that it uses
    "collections.abc": ("Iterator", "Mapping"),
    "typing": ("Any", "Literal", "TypedDict", "overload"),
    "commplan.typing": ("Batches", "PhaseRun", "TypedRun"),
    "jax": ("Array",),
    "jax.typing": ("ArrayLike",),
}


class _Argument(msgspec.Struct, frozen=True):
    """An input or output of a phase.

    Attributes:
        name: its name in the plan, which may be a keyword of Python.
        type: its Python type.
        remark: its type and placement in the plan, for the docstring.
    """

    name: str
    type: str
    remark: str


class _Phase(msgspec.Struct, frozen=True):
    """The signature of a phase.

    Attributes:
        name: its name in the schedule.
        title: its heading in the plan, such as `each step`.
        period: steps between two calls; 0 unless the phase is `every`.
        reads: Python types of the states that it reads, by name.
        takes: its inputs.
        gives: its outputs.
        batches: whether it loads records.
        is_hidden: whether steps may run while it communicates, so that its run has `begin`.
    """

    name: str
    title: str
    period: int
    reads: dict[str, str]
    takes: tuple[_Argument, ...]
    gives: tuple[_Argument, ...]
    batches: bool
    is_hidden: bool


def stubs(plans: Sequence[graph.Plan], module: str) -> str:
    """Generate the text of `MODULE.pyi` with a class for each plan.

    Args:
        plans: at least one plan; the first is the example in the module's docstring.
        module: name of the module, without `.pyi`.

    Raises:
        CommplanError: CP1126 if two plans or phases would have the same class name, or an error of compiling.
    """
    names = [_class_of(plan.name) for plan in plans]
    if (duplicate := _repeated(names)) is not None:
        fail("CP1126", f"two plans would have the class `{duplicate}`", "write them to separate files")
    faces = [_plan_class(name, plan) for name, plan in zip(names, plans, strict=True)]
    # Classes and TypedDicts, which are the only unindented definitions.
    if (
        duplicate := _repeated(re.findall(r"^(?:class )?(\w+)(?=[:(]| = )", "".join(faces), re.M))
    ) is not None:
        note = "they are called as plan and phase, some with `State` or `Outputs` behind: rename a phase"
        fail("CP1126", f"two classes would be called `{duplicate}`", note)
    used = set(re.findall(r"\w+", "".join(faces)))
    imports = {source: [word for word in words if word in used] for source, words in _IMPORTS.items()}
    lines = [f"from {source} import {', '.join(words)}" for source, words in imports.items() if words]
    head = _HEAD.format(module=module, name=names[0], file=plans[0].file, imports="\n".join(lines))
    return "\n".join([head, *faces])


def _plan_class(name: str, plan: graph.Plan) -> str:
    """The class `name` for the runs of `plan`, after the classes of its state and its phases."""
    schedule = _lowered(plan)
    phases = [_phase(schedule, phase) for phase in schedule.phases]
    states = _worker_states(schedule, schedule.states)
    for phase in phases:
        states |= phase.reads
    text = f"\n{_typed_dict(f'{name}State', states)}"
    for phase in phases:
        text += _outputs(name, phase) + _callable(name, phase)
    periods = [phase for phase in phases if phase.period]
    if periods:
        text += _every(name, periods)
    return text + _run(name, plan, phases, schedule.named)


def _lowered(plan: graph.Plan) -> ir.Schedule:
    """Lower the plan for one rank of every open axis, without passes."""
    sizes = {axis.name: axis.size or 1 for axis in plan.axes}
    leaf = ir.Leaf("x", (math.prod(sizes.values()),), DType.F32)  # divisible by all axes
    leaves = {value.name: (leaf,) for value in plan.values if isinstance(value.type, TreeType)}
    has_servers = any(axis.kind is graph.AxisKind.SERVER for axis in plan.axes)
    return compile_plan(plan, leaves, axes=sizes, passes="", backend="mpi" if has_servers else "jax")


def _phase(schedule: ir.Schedule, phase: ir.Phase) -> _Phase:
    """The signature of `phase`."""
    values = {value.id: value for value in (*schedule.entry, *phase.values)}
    inputs = {graph.name_of(ref): values[ref] for ref in phase.inputs}
    inputs |= {binding.name: values[binding.value] for binding in phase.takes}
    outputs = {binding.name: values[binding.value] for binding in phase.outputs if not binding.source_only}
    every, ahead = phase.kind == "every", source_only(phase)
    draws = any(isinstance(op, ir.Map) and op.random and not op.runs_ahead(ahead) for op in phase.ops)
    is_counted = draws or phase.fragments > 1  # the number of the call selects random keys and the fragment
    titles = {"start": "at start", "step": "each step", "every": f"every {phase.period} steps"}
    return _Phase(
        phase.name,
        titles.get(phase.kind, f"phase {phase.name}"),
        phase.period if every else 0,
        _worker_states(schedule, phase.states) | ({_CALLS: "Mapping[str, Array]"} if is_counted else {}),
        tuple(_argument(name, value, "ArrayLike") for name, value in inputs.items()),
        tuple(_argument(name, value, "Array") for name, value in outputs.items()),
        any(isinstance(op, ir.Read) for op in phase.ops),
        phase.hidden > 0,
    )


def _argument(name: str, value: ir.Value, array: str) -> _Argument:
    """An input or output; `array` is the Python type of arrays."""
    kind = value.kind if value.kind != "array" else str(value.leaves[0].dtype)
    return _Argument(name, "Any" if value.kind == "tree" else array, f"{kind} {value.placement}")


def _outputs(name: str, phase: _Phase) -> str:
    """The class of the results of a phase: its outputs as attributes and items."""
    lines = ["", "", f"class {_class(name, phase)}Outputs:"]
    call = f"every[{phase.period}]" if phase.period else phase.name
    lines.append(f'    """What `run.{call}` returns beside the state."""')
    for output in phase.gives:
        if keyword.iskeyword(output.name):  # only available by name
            continue
        lines += [
            "",
            "    @property",
            f"    def {output.name}(self) -> {output.type}:",
            f'        """{output.remark}"""',
        ]
    if phase.gives:
        lines.append("")
    for output in phase.gives:
        lines += ["    @overload"] * (len(phase.gives) > 1)
        lines.append(f'    def __getitem__(self, name: Literal["{output.name}"], /) -> {output.type}: ...')
    lines += [
        "    def __iter__(self) -> Iterator[str]: ...",
        "    def __len__(self) -> int: ...",
        "    def __contains__(self, name: object, /) -> bool: ...",
    ]
    return "\n".join(lines) + "\n"


def _callable(name: str, phase: _Phase) -> str:
    """The class of a phase as an attribute of the run: a function of state and inputs."""
    cls = _class(name, phase)
    lines = ["", "", _typed_dict(f"{cls}State", phase.reads)]
    lines += ["", f"class {cls}:", f'    """`{phase.title}`."""', "", "    name: str"]
    takes = "".join(
        f", {argument.name}: {argument.type}"
        for argument in phase.takes
        if not keyword.iskeyword(argument.name)
    )
    # Names that are keywords of Python are passed as `**{"import": ..}`.
    has_keyword_inputs = any(keyword.iskeyword(argument.name) for argument in phase.takes)
    takes = (f", *{takes}" if takes else "") + (", **others: Any" if has_keyword_inputs else "")
    lines.append(f"    def __call__(self, state: {cls}State, /{takes}) -> tuple[{cls}Outputs, {name}State]:")
    remarks = "; ".join(f"{argument.name}: {argument.remark}" for argument in phase.takes)
    lines.append(f'        """{remarks or "It takes nothing but the state."}"""')
    if phase.period:
        lines += ["", "    @property", "    def interval(self) -> int: ..."]
    if phase.is_hidden:
        lines += ["", f"    def begin(self, state: {cls}State, /{takes}) -> PhaseRun: ..."]
    return "\n".join(lines) + "\n"


def _every(name: str, phases: Sequence[_Phase]) -> str:
    """The class of `run.every`, a mapping from periods to phases."""
    lines = ["", "", f"class {name}Every:", '    """The phases `every N steps`, by N."""', ""]
    for phase in phases:
        lines += ["    @overload"] * (len(phases) > 1)
        lines.append(
            f"    def __getitem__(self, period: Literal[{phase.period}], /) -> {_class(name, phase)}: ..."
        )
    lines += ["    def __iter__(self) -> Iterator[int]: ...", "    def __len__(self) -> int: ..."]
    return "\n".join(lines) + "\n"


def _run(name: str, plan: graph.Plan, phases: Sequence[_Phase], values: Iterable[str]) -> str:
    """The class of the run of a plan, with its phases as attributes.

    Args:
        name: name of the class.
        plan: the plan.
        phases: signatures of its phases.
        values: names that `run.sharding` accepts.
    """
    origin = f" of {plan.file}" if plan.file else ""
    lines = ["", "", f"class {name}(TypedRun):", f'    """A run of plan `{plan.name}`{origin}."""', ""]
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


def _worker_states(schedule: ir.Schedule, states: Iterable[str]) -> dict[str, str]:
    """Those of `states` that workers store, with their types."""
    entries = {value.id: value for value in schedule.entry}
    local = [entries[ref] for ref in states if entries[ref].placement.server is None]
    return {graph.name_of(value.id): "Any" if value.kind == "tree" else "Array" for value in local}


def _typed_dict(name: str, states: Mapping[str, str]) -> str:
    entries = ", ".join(f'"{state}": {kind}' for state, kind in states.items())
    return f'{name} = TypedDict("{name}", {{{entries}}})\n'


def _literal(names: Iterable[str]) -> str:
    quoted = ", ".join(f'"{name}"' for name in names)
    return f"Literal[{quoted}]"


def _class(name: str, phase: _Phase) -> str:
    """The name of the class of a phase; `name` is that of the plan's class."""
    return f"{name}{_camel(phase.name)}"


def _class_of(plan: str) -> str:
    """The plan's name in CamelCase, or with `_` appended if that is not a valid Python name."""
    name = _camel(plan)
    return name if name.isidentifier() and not keyword.iskeyword(name) else f"{plan}_"


def _repeated(names: Sequence[str]) -> str | None:
    """The first name that occurs more than once, or None."""
    return next((name for name in names if names.count(name) > 1), None)


def _camel(name: str) -> str:
    """`name` in CamelCase: `data_parallel` is `DataParallel`."""
    return "".join(part[:1].upper() + part[1:] for part in re.split(r"_+", name) if part)
