"""The XLA options that make a compiled step follow its plan.

They apply to one compilation, not to a process. `run.jit` passes them to `jax.jit`; `commplan explain
--target` prints them. Names and values are those of XLA's `debug_options_flags.cc`. Option names differ
between versions of XLA: `as_installed` queries the compiler.

Options that are not used, based on estimates of steps compiled ahead of time for H100 (`bench.compiled`):

- `xla_gpu_experimental_collective_start_as_early_as_possible` did not change the schedule of a flat plan.
  With an overlap limit of 2 more communication of a two-level plan was exposed (0.82 instead of 0.64 ms, six
  layers 2048 wide).
- `xla_gpu_pipeline_all_reduce`, if all-reduces are levels of others: only they, not the gathers after them,
  overlap with the next iteration of a loop, and all levels then compete there (48.6 instead of 44.6 ms, a
  scan tapped in levels on 32 H100).
- `xla_gpu_collective_domain_assignment` (JAX 0.11), which gives the links within hosts a separate limit:
  0.533 instead of 0.525 ms with limits of 1, 2 and 8 (a scan tapped in levels on 32 H100).
- `xla_gpu_enable_analytical_latency_estimator` exposed 5.9 instead of 0.0 ms of the unrolled transformer, and
  1.4 instead of 0.9 ms of the scanned one.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from commplan.diagnostics import Diagnostic, Note, Severity
from commplan.ir.grouping import grouped
from commplan.ir.schedule import Collective, Pack, Schedule
from commplan.lowering.audit.expect import Expected, expected
from commplan.lowering.gpu.targets import target as target_of
from commplan.lowering.hlo.step import Platform
from commplan.lowering.xla_passes import COPYING, DISABLED_PASSES, SLICING

Value = bool | int | str
# Names of options. The maximum number of bytes that XLA combines to one collective, by kind of collective:
_COMBINED = {
    "all_reduce": "xla_gpu_all_reduce_combine_threshold_bytes",
    "reduce_scatter": "xla_gpu_reduce_scatter_combine_threshold_bytes",
    "all_gather": "xla_gpu_all_gather_combine_threshold_bytes",
}
# Whether XLA orders instructions such that collectives overlap with computation:
_SCHEDULER = "xla_gpu_enable_latency_hiding_scheduler"
# The maximum number of collectives that run at the same time:
_OVERLAP = "xla_gpu_experimental_parallel_collective_overlap_limit"
# The value of `_OVERLAP` for all-reduces without an order, as in a loop, and for levels of all-reduces: 48.6
# instead of 51.5 ms for a scan tapped in levels on 32 H100, and no difference for ordered ones. With other
# collectives more was exposed: 2.7 instead of 1.3 ms for gathered weights on 8 H100, 5.9 instead of 4.1 ms
# for an exchange of experts on 128.
OVERLAP_LIMIT = 8
# Whether an all-reduce in a loop overlaps with the next iteration:
PIPELINED = "xla_gpu_pipeline_all_reduce"
# Its name and value in different versions of XLA, the newest first.
_PIPELINES: Mapping[str, Value] = {
    PIPELINED: "COLLECTIVE_PIPELINING_MODE_ON",
    "xla_gpu_enable_pipelined_all_reduce": True,
}
# How XLA runs permutes: through buffers of NCCL, or by writing into the receiver's memory:
_PERMUTE = "xla_gpu_collective_permute_mode"
# The devices of a host, if XLA splits all-reduces into levels itself; 0 if it does not:
_BLUECONNECT = "xla_gpu_all_reduce_blueconnect_num_devices_per_host"
# The kinds of collectives that block until they are complete:
_SYNCHRONOUS = "xla_gpu_disable_async_collectives"
# The effect of a flag that switches an option off, for warnings.
_EFFECTS = {
    _SCHEDULER: "collectives do not overlap with computation",
    **dict.fromkeys(_PIPELINES, "an all-reduce inside a loop does not overlap with the next iteration"),
}
_FLAG = re.compile(r"--(xla_\w+)(?:=(\S*))?")  # a flag in XLA_FLAGS; without a value it is true


class _Sizes(NamedTuple):
    """A `MeshLike`: the sizes of the axes."""

    shape: Mapping[str, int]


class CompilerOption(msgspec.Struct, frozen=True):
    """An option of XLA for the compilation of one plan.

    Attributes:
        name: The name of the option.
        value: Its value.
        why: The reason that the plan needs it, as text.
        known: Whether the installed compiler accepts it; None if no compiler was queried.
    """

    name: str
    value: Value
    why: str
    known: bool | None = None

    def __str__(self) -> str:
        return f"{self.name} = {self.value}: {self.why}"


def platform_of(target: str) -> Platform:
    """The platform of a target: `cpu` for cpu; `gpu` for gpu, cuda, rocm and targets such as `h100:4x8`.

    Raises:
        CommplanError: CP1150 for other texts.
    """
    name = target.strip().lower()
    if name in ("cpu", "gpu", "cuda", "rocm"):
        return "cpu" if name == "cpu" else "gpu"
    return "gpu" if target_of(name).platform == "cuda" else "cpu"


def as_installed(options: Iterable[CompilerOption]) -> tuple[CompilerOption, ...]:
    """`options` under the names of the installed compiler, with `known` set; unchanged without JAX.

    Queries the compiler of the default devices. All compilers of one version of XLA accept the same options,
    so the CPU compiler can answer if there is no other.
    """
    if importlib.util.find_spec("jax") is None:
        return tuple(options)
    from commplan.lowering.jax._jit import is_known  # noqa: PLC0415  jax is loaded only here

    return tuple(_with_known_names(option, is_known) for option in options)


def _with_known_names(option: CompilerOption, is_known: Callable[[str, Value], bool]) -> CompilerOption:
    """The option under the first name that the compiler accepts, with `known` set."""
    names = _PIPELINES if option.name in _PIPELINES else {option.name: option.value}
    for name, value in names.items():
        if is_known(name, value):
            return replace(option, name=name, value=value, known=True)
    return replace(option, known=False)


def accepted(options: Iterable[CompilerOption]) -> dict[str, Value]:
    """Names and values of the options that the compiler accepts, or may accept."""
    return {option.name: option.value for option in options if option.known is not False}


def compiler_options(schedule: Schedule, target: str) -> tuple[CompilerOption, ...]:
    """The options with which XLA compiles `schedule` for `target`.

    Empty for CPUs, for schedules that are not for JAX, and for schedules without collectives.

    Args:
        schedule: The schedule.
        target: The target: cpu, gpu, cuda, rocm, or a target of `commplan audit --target` such as `h100:4x8`.

    Raises:
        CommplanError: CP1150 for an unknown target.
    """
    if platform_of(target) == "cpu" or schedule.backend != "jax":
        return ()
    mesh = _Sizes(schedule.mesh_sizes)
    phases = [expected(schedule, phase.name, mesh, "gpu") for phase in schedule.phases]
    packs = {op.result for phase in schedule.phases for op in phase.ops if isinstance(op, Pack)}
    ops = (op for phase in schedule.phases for op in phase.ops if isinstance(op, Collective))
    buckets = any(op.kind == "all_reduce" and op.operand in packs for op in ops)
    return tuple(_options([phase for phase in phases if phase], buckets))


def _options(phases: list[tuple[Expected, ...]], buckets: bool) -> Iterator[CompilerOption]:
    """The options for a program.

    Args:
        phases: The collectives of each phase that has any.
        buckets: Whether packed buffers are all-reduced.
    """
    if not phases:
        return
    collectives = [item for items in phases for item in items]
    why = "collectives overlap with computation; XLA enables this by default only for H100 and newer"
    yield CompilerOption(_SCHEDULER, True, why)

    # Combining: XLA must merge the arrays of a bucket, and nothing else.
    disabled = {
        SLICING: "XLA overestimates slices of a loop's stacks, and would overlap them instead of collectives"
    }
    for kind, name in _COMBINED.items():
        sizes = [_operand_nbytes(item) for item in collectives if item.kind == kind]
        if sizes and buckets and kind == "all_reduce":
            why = f"a bucket is one all-reduce of several arrays; the largest bucket has {max(sizes)} bytes"
            yield CompilerOption(name, max(sizes), why)
            disabled[COPYING] = "the arrays of a bucket are reduced without copying them into one buffer"
        elif sizes:
            words = kind.replace("_", "-")
            why = f"XLA combines no two {words}s of the plan; the smallest has {min(sizes)} bytes"
            yield CompilerOption(name, min(sizes) - 1, why)
    yield CompilerOption(DISABLED_PASSES, ",".join(disabled), "; ".join(disabled.values()))

    # Overlap: with the next iteration of a loop, and of collectives with each other.
    kinds = [item.kind for item in collectives]
    reduces = _are_all_reduces(collectives)
    if "all_reduce" in kinds and not (reduces and "reduce_scatter" in kinds):
        why = "an all-reduce inside a loop, as of `run.tap`, overlaps with the next iteration"
        yield CompilerOption(PIPELINED, _PIPELINES[PIPELINED], why)
    links = max(len({_links(item) for item in items}) for items in phases)
    if reduces:
        why = "all-reduces of different iterations or levels do not depend on each other"
        yield CompilerOption(_OVERLAP, OVERLAP_LIMIT, why)
    elif links > 1:
        why = f"collectives over {links} kinds of links may run at the same time, one on each"
        yield CompilerOption(_OVERLAP, links, why)

    if any(item.kind == "permute" for item in collectives):
        why = "rounds of a program write into the receiver's memory, if NCCL has symmetric memory"
        yield CompilerOption(_PERMUTE, "COLLECTIVES_SYMMETRIC_MEMORY", why)


def _are_all_reduces(items: Sequence[Expected]) -> bool:
    """Whether every line of each phase consists of all-reduces, whole or in levels, and nothing else.

    This is not so if gradients are scattered and parameters gathered (ZeRO), which are different lines.
    """

    def is_all_reduce(kinds: list[str]) -> bool:
        scatters, reduces, gathers = (kinds.count(k) for k in ("reduce_scatter", "all_reduce", "all_gather"))
        return 0 < reduces >= scatters == gathers and scatters + reduces + gathers == len(kinds)

    lines = grouped(items, lambda item: item.scope).values()
    return all(is_all_reduce([item.kind for item in line]) for line in lines)


def _links(item: Expected) -> Hashable:
    """A key that is equal for collectives over the same links.

    It is the groups, or for a permute the axes: the rounds of a program have different pairs on one axis.
    """
    return item.axes if item.kind == "permute" else frozenset(item.groups)


def _operand_nbytes(item: Expected) -> int:
    """The bytes of a rank's operand or result, whichever is smaller; at least 1."""
    return max(1, item.nbytes // len(item.groups[0]) if item.kind == "reduce_scatter" else item.nbytes)


def overriding_flags(
    options: tuple[CompilerOption, ...], flags: str, file: str = ""
) -> tuple[Diagnostic, ...]:
    """Warnings CP0858 for flags in XLA_FLAGS that defeat the plan's options.

    In a compilation of `run.jit`, its options override the flags of the process, except flags for which the
    plan has no option.

    Args:
        options: The options of the plan. Without options there are no warnings.
        flags: The value of XLA_FLAGS.
        file: The plan's file, for the warnings.
    """
    process_flags: Mapping[str, str] = {name: value or "true" for name, value in _FLAG.findall(flags)}
    needed = {option.name: option for option in options}
    effects: list[tuple[str, str]] = []
    for name, option in needed.items():
        value = process_flags.get(name)
        if value is None:
            continue
        number = int(value) if re.fullmatch(r"\d+", value) else None
        if name in _COMBINED.values() and number is not None and number > int(option.value):
            effects.append((name, f"XLA may combine several collectives of up to {number} bytes"))
        if name == _OVERLAP and number is not None and number < int(option.value):
            effects.append((name, f"at most {number} of the plan's collectives run at the same time"))
        if name == _PERMUTE and value != option.value:
            effects.append((name, "rounds of a program are copied through NCCL's buffers"))
        if name == _SCHEDULER and value.lower() in ("false", "0"):
            effects.append((name, _EFFECTS[name]))
    for name in _PIPELINES if PIPELINED in needed else ():
        if process_flags.get(name, "on").lower() not in ("on", "true", "1"):
            effects.append((name, _EFFECTS[name]))
    if options and process_flags.get(_BLUECONNECT, "0") not in ("0", ""):
        effects.append((_BLUECONNECT, "XLA splits all-reduces again, in addition to the plan's levels"))
    if options and process_flags.get(_SYNCHRONOUS, "") not in ("", "NOOP"):
        effects.append((_SYNCHRONOUS, f"{process_flags[_SYNCHRONOUS]} block until they are complete"))
    overridden = {*needed, *(_PIPELINES if PIPELINED in needed else ())}
    return tuple(
        _warning(name, process_flags[name], effect, name in overridden, file) for name, effect in effects
    )


def _warning(name: str, value: str, effect: str, overridden: bool, file: str) -> Diagnostic:
    fix = "run.jit overrides it with the plan's value, jax.jit does not: remove the flag from XLA_FLAGS"
    note = fix if overridden else "remove the flag from XLA_FLAGS: the plan has no option that overrides it"
    message = f"XLA_FLAGS has --{name}={value}: {effect}"
    return Diagnostic("CP0858", message, None, (Note(note),), severity=Severity.WARNING, file=file)
