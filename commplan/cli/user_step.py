"""The training step of a user's program: compiled to estimate it, or measured on this machine."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from commplan.cli.argument_types import once
from commplan.cli.binding import checked
from commplan.cli.console import Console, name_of
from commplan.cli.jax_side import choose_devices, function_at, raised_at, user_code
from commplan.cli.saved import is_saved, read_saved
from commplan.cli.simulated import NAME_ONE
from commplan.cost.schedule.step import StepComputation
from commplan.cost.step_profile import load_step
from commplan.diagnostics import CommplanError, fail, text_of
from commplan.frontend.bind_axes import bind_axes
from commplan.ir.plan import AxisKind

if TYPE_CHECKING:
    from commplan.lowering.audit.estimate import Estimate
    from commplan.lowering.audit.targets import Target
    from commplan.lowering.jax.gradient_times import GradientTimes


def with_step(args: Namespace, path: str, console: Console, *, estimate: bool = True) -> Namespace:
    """`args` with `computation`: what --step-profile holds, or --step is estimated to take on --target.

    Plans are compiled for a profile, as by `Plan.compile(step=..)`, and not for an estimate, which programs
    do not have. path: of the plan or the saved schedule. estimate: False to leave --step alone.
    Raises CP0772 for the profile, and what `estimated` raises.
    """
    computation: StepComputation | None = None
    if args.step_profile:
        computation = load_step(args.step_profile)
    elif estimate and args.step:
        computation = estimated(args, mesh_sizes_of(path, args, console))
    return Namespace(**{**vars(args), "computation": computation})


def need_machine(args: Namespace) -> None:
    """Refuse a step without a topology (CP0752)."""
    if args.step or args.step_profile:
        fail("CP0752", "there is no topology to predict the step on", NAME_ONE)


def mesh_sizes_of(path: str, args: Namespace, console: Console) -> dict[str, int]:
    """The sizes of the mesh that the plan or the saved schedule at `path` is for."""
    text = console.read(path)
    if is_saved(path, text):
        from commplan.verify import verify

        return read_saved(text, name_of(path), verify).mesh_sizes
    axes = bind_axes(checked(path, console), once(args.axis, "--axis"))
    return {axis.name: axis.size for axis in axes if axis.kind is not AxisKind.SERVER}


def estimated(args: Namespace, sizes: Mapping[str, int]) -> StepComputation:
    """The step of --step, compiled for --target, and its computation as the audit estimates it.

    Raises CP0850 without the compiler for GPUs, CP1150 and CP1152 for the target, CP1153, CP1154 and CP1157
    for the step.
    """
    from commplan.lowering.audit.estimate import estimate
    from commplan.lowering.audit.targets import target
    from commplan.lowering.audit.walk import audit_text

    machine = target(args.target)
    choose_devices(1)
    from commplan.lowering.jax.aot import compile_step, mesh_on

    with user_code(), naming_step(args.step):
        step, arguments = step_at(args.step, mesh_on(machine, sizes))
        times = shares_of(args.step, step, arguments)
        costs = estimate(audit_text(compile_step(step, *arguments).compiled), machine.machine)
    return computation_of(costs, times, machine)


def computation_of(costs: Estimate, times: GradientTimes, machine: Target) -> StepComputation:
    """The computation of a compiled step, estimated for `machine`; its gradients by the shares of `times`."""
    until = costs.computation - costs.after
    ready = tuple((name, path, share * until) for name, path, share in times.shares)
    return StepComputation(until, ready, f"estimated for {machine} from the compiled step", costs.after)


def shares_of(where: str, step: Any, arguments: tuple[Any, ...]) -> GradientTimes:
    """The gradients of a step, with the shares of its products. Raises CP1157 if no phase gets any."""
    from commplan.lowering.jax.gradient_times import gradient_times

    times = gradient_times(step, arguments)
    if times is None:
        fail(
            "CP1157",
            f"--step {where} calls no phase of a plan with an input inside of a shard_map",
            "call the phase that reduces the gradients in a function decorated with @run.spmd(..)",
        )
    return times


def step_at(where: str, mesh: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The step and its arguments, as the user's function gives them. Raises CP1153 where it gives others."""
    given: Any = function_at(f"--step {where}", where)(mesh)
    parts: list[Any] = [*given] if isinstance(given, tuple) else [given]
    if [callable(part) for part in parts[:1]] + [type(part) for part in parts[1:]] != [True, tuple]:
        names = ", ".join(type(part).__name__ for part in parts)
        message = f"--step {where} gave {names}: a step and a tuple of its arguments were expected"
        fail("CP1153", message, "return train, (state, params, batch)")
    return parts[0], parts[1]


@contextmanager
def naming_step(step: str | None) -> Generator[None]:
    """Around what runs the user's step: an error of its own is one of what was given (CP1154)."""
    try:
        yield
    except (CommplanError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        if step is None:
            raise
        reason = text_of(error).partition("\n")[0]
        fail("CP1154", f"--step {step} cannot be compiled: {reason}", *raised_at(error))
