"""What XLA must be told to compile a step as its plan says: options of one compilation, never of a process.

`run.jit` passes them to `jax.jit`; `commplan explain --target` shows them. Names and meanings are those of
XLA's `debug_options_flags.cc`. Versions of XLA know other names: `as_installed` queries the compiler.

Not among them, by what the estimate says of steps compiled ahead of time for H100 (`bench.compiled`):

- `xla_gpu_experimental_collective_start_as_early_as_possible` changed nothing of a flat plan's schedule, and
  with an overlap limit of 2 more of a two-level plan's communication was exposed (0.82 instead of 0.64 ms,
  six layers 2048 wide).
- `xla_gpu_pipeline_all_reduce` where all-reduces are levels of others: only they, and not the gathers
  behind them, run under a loop's next round, in which all levels then crowd (48.6 instead of 44.6 ms, a scan
  tapped in levels on 32 H100).
- `xla_gpu_collective_domain_assignment` (JAX 0.11), which gives the links within hosts a limit of their own:
  0.533 instead of 0.525 ms with limits of 1, 2 and 8 (a scan tapped in levels on 32 H100).
- `xla_gpu_enable_analytical_latency_estimator` exposed 5.9 instead of 0.0 ms of the unrolled transformer, and
  1.4 instead of 0.9 of the scanned one.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from commplan.diagnostics import Diagnostic, Note, Severity
from commplan.ir.grouping import grouped
from commplan.ir.schedule import Collective, Pack, Schedule
from commplan.lowering.audit.expect import Expected, expected
from commplan.lowering.audit.targets import target as target_of

Value = bool | int | str
_COMBINED = {  # by the kind of collective: what bounds the bytes that XLA makes one of several
    "all_reduce": "xla_gpu_all_reduce_combine_threshold_bytes",
    "reduce_scatter": "xla_gpu_reduce_scatter_combine_threshold_bytes",
    "all_gather": "xla_gpu_all_gather_combine_threshold_bytes",
}
_SCHEDULER = "xla_gpu_enable_latency_hiding_scheduler"
_OVERLAP = "xla_gpu_experimental_parallel_collective_overlap_limit"
# All-reduces that no chain orders, as in a loop, and levels of all-reduces: 48.6 instead of 51.5 ms where a
# scan is tapped in levels on 32 H100, no difference where a chain orders them. Beside others more was
# exposed: 2.7 for 1.3 ms where weights are gathered on 8 H100, 5.9 for 4.1 ms beside the exchange of experts
# on 128.
AT_ONCE = 8
PIPELINED = "xla_gpu_pipeline_all_reduce"
_PIPELINES: Mapping[str, Value] = {  # names in different versions of XLA, the newest first
    PIPELINED: "COLLECTIVE_PIPELINING_MODE_ON",
    "xla_gpu_enable_pipelined_all_reduce": True,
}
_PERMUTE = "xla_gpu_collective_permute_mode"
_BLUECONNECT = "xla_gpu_all_reduce_blueconnect_num_devices_per_host"
_SYNCHRONOUS = "xla_gpu_disable_async_collectives"
LEFT_OUT, COPYING = "xla_disable_hlo_passes", "all-reduce-contiguous"
SLICING = "dynamic-slice-copy-fusion-async-wrapper"
_IDLE = {
    _SCHEDULER: "no collective runs under computation",
    **dict.fromkeys(_PIPELINES, "an all-reduce inside a loop is waited for in the round that makes it"),
}
_FLAG = re.compile(r"--(xla_\w+)(?:=(\S*))?")


class _Sizes(NamedTuple):
    """What is asked of a mesh."""

    shape: Mapping[str, int]


class CompilerOption(msgspec.Struct, frozen=True):
    """An option of XLA with its value, and why this plan needs it.

    known: whether the installed compiler accepts it; None if no compiler was queried.
    """

    name: str
    value: Value
    why: str
    known: bool | None = None

    def __str__(self) -> str:
        return f"{self.name} = {self.value}: {self.why}"


def platform_of(target: str) -> Literal["cpu", "gpu"]:
    """`gpu` for cuda, rocm and targets such as `h100:4x8`. Raises CP1150 for what is none of them."""
    name = target.strip().lower()
    if name in ("cpu", "gpu", "cuda", "rocm"):
        return "cpu" if name == "cpu" else "gpu"
    return "gpu" if target_of(name).platform == "cuda" else "cpu"


def as_installed(options: Iterable[CompilerOption]) -> tuple[CompilerOption, ...]:
    """`options` as the installed compiler names them, and whether it knows them; unchanged without JAX.

    Queries the compiler of the default devices. All compilers of one version of XLA know the same options, so
    the one for CPUs answers if there is no other.
    """
    if importlib.util.find_spec("jax") is None:
        return tuple(options)
    from commplan.lowering.jax._jit import is_known  # noqa: PLC0415  jax is loaded only here

    return tuple(_as_known(option, is_known) for option in options)


def _as_known(option: CompilerOption, is_known: Callable[[str, Value], bool]) -> CompilerOption:
    names = _PIPELINES if option.name in _PIPELINES else {option.name: option.value}
    for name, value in names.items():
        if is_known(name, value):
            return replace(option, name=name, value=value, known=True)
    return replace(option, known=False)


def accepted(options: Iterable[CompilerOption]) -> dict[str, Value]:
    """Name and value of those options that the compiler knows, or may know."""
    return {option.name: option.value for option in options if option.known is not False}


def compiler_options(schedule: Schedule, target: str) -> tuple[CompilerOption, ...]:
    """The options with which XLA compiles what `schedule` says for `target`; none where nothing is sent.

    target: cpu, gpu, cuda, rocm, or one that `commplan audit --target` takes. Raises CP1150 for another.
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
    """phases: the collectives of each phase that has some. buckets: whether buckets are all-reduced."""
    if not phases:
        return
    everything = [item for items in phases for item in items]
    why = "collectives run under computation; before H100 XLA does so only where it is asked to"
    yield CompilerOption(_SCHEDULER, True, why)
    left_out = {
        SLICING: "XLA takes slices of a loop's stacks to be longer than any collective, and hides them first"
    }
    for kind, name in _COMBINED.items():
        sizes = [_least(item) for item in everything if item.kind == kind]
        if sizes and buckets and kind == "all_reduce":
            why = f"the arrays of a bucket are reduced together: the largest has {max(sizes)} bytes"
            yield CompilerOption(name, max(sizes), why)
            left_out[COPYING] = "the arrays of a bucket are reduced as they are, and not copied into one"
        elif sizes:
            words = kind.replace("_", "-")
            why = f"no {words} of the plan is joined with another: the smallest has {min(sizes)} bytes"
            yield CompilerOption(name, min(sizes) - 1, why)
    yield CompilerOption(LEFT_OUT, ",".join(left_out), "; ".join(left_out.values()))
    kinds = [item.kind for item in everything]
    reduces = _are_all_reduces(everything)
    if "all_reduce" in kinds and not (reduces and "reduce_scatter" in kinds):
        why = "an all-reduce inside a loop, as of `run.tap`, runs under the loop's next round"
        yield CompilerOption(PIPELINED, _PIPELINES[PIPELINED], why)
    links = max(len({_links(item) for item in items}) for items in phases)
    if reduces:
        why = "all-reduces of a loop's rounds, and their levels, need not wait for each other"
        yield CompilerOption(_OVERLAP, AT_ONCE, why)
    elif links > 1:
        why = f"collectives over {links} kinds of links may run at the same time, each on its own"
        yield CompilerOption(_OVERLAP, links, why)
    if any(item.kind == "permute" for item in everything):
        why = "rounds of a program write into the receiver's memory, where NCCL has symmetric memory"
        yield CompilerOption(_PERMUTE, "COLLECTIVES_SYMMETRIC_MEMORY", why)


def _are_all_reduces(items: Sequence[Expected]) -> bool:
    """Whether what each line of each phase asks for is all-reduces, whole or in levels, and nothing else.

    Not so where gradients are scattered and parameters gathered (ZeRO), which are lines of their own.
    """

    def are(kinds: list[str]) -> bool:
        scatters, reduces, gathers = (kinds.count(k) for k in ("reduce_scatter", "all_reduce", "all_gather"))
        return 0 < reduces >= scatters == gathers and scatters + reduces + gathers == len(kinds)

    return all(are([item.kind for item in own]) for own in grouped(items, lambda item: item.scope).values())


def _links(item: Expected) -> Hashable:
    """What tells the links of one level from those of another: rounds of a program have other pairs each."""
    return item.axes if item.kind == "permute" else frozenset(item.groups)


def _least(item: Expected) -> int:
    """Bytes of what a rank gives or gets, whichever is less."""
    return max(1, item.nbytes // len(item.groups[0]) if item.kind == "reduce_scatter" else item.nbytes)


def undone(options: tuple[CompilerOption, ...], flags: str, file: str = "") -> tuple[Diagnostic, ...]:
    """What of XLA_FLAGS would undo a plan that needs `options`, each as a warning CP0858.

    Where `run.jit` compiles, the options of a compilation go before the flags of the process, but for flags
    that the plan has no option against.
    """
    given: Mapping[str, str] = {name: value or "true" for name, value in _FLAG.findall(flags)}
    wanted = {option.name: option for option in options}
    undoing: list[tuple[str, str]] = []
    for name, option in wanted.items():
        value = given.get(name)
        if value is None:
            continue
        number = int(value) if re.fullmatch(r"\d+", value) else None
        if name in _COMBINED.values() and number is not None and number > int(option.value):
            undoing.append((name, f"XLA may make one of several collectives of up to {number} bytes"))
        if name == _OVERLAP and number is not None and number < int(option.value):
            undoing.append((name, f"no more than {number} of the plan's collectives run at the same time"))
        if name == _PERMUTE and value != option.value:
            undoing.append((name, "rounds of a program are copied through buffers of NCCL's own"))
        if name == _SCHEDULER and value.lower() in ("false", "0"):
            undoing.append((name, _IDLE[name]))
    for name in _PIPELINES if PIPELINED in wanted else ():
        if given.get(name, "on").lower() not in ("on", "true", "1"):
            undoing.append((name, _IDLE[name]))
    if options and given.get(_BLUECONNECT, "0") not in ("0", ""):
        undoing.append((_BLUECONNECT, "XLA takes all-reduces apart once more, on top of the plan's levels"))
    if options and given.get(_SYNCHRONOUS, "") not in ("", "NOOP"):
        undoing.append((_SYNCHRONOUS, f"{given[_SYNCHRONOUS]} wait for their results where they begin"))
    overridden = {*wanted, *(_PIPELINES if PIPELINED in wanted else ())}
    return tuple(_warning(name, given[name], effect, name in overridden, file) for name, effect in undoing)


def _warning(name: str, value: str, effect: str, overridden: bool, file: str) -> Diagnostic:
    helps = "run.jit compiles with the plan's own value; jax.jit does not: take the flag out of XLA_FLAGS"
    note = helps if overridden else "take the flag out of XLA_FLAGS: the plan has no option against it"
    message = f"XLA_FLAGS has --{name}={value}: {effect}"
    return Diagnostic("CP0858", message, None, (Note(note),), severity=Severity.WARNING, file=file)
