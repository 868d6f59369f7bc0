"""The training step of a user's program: compiled for an estimate, or measured on this machine."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from commplan.cli.argument_types import once
from commplan.cli.binding import load_plan
from commplan.cli.console import Console, name_of
from commplan.cli.jax_side import choose_devices, function_at, raised_at, user_code
from commplan.cli.saved import is_saved, read_saved
from commplan.cli.simulated import NAME_ONE
from commplan.cost.schedule.step import StepComputation
from commplan.cost.schedule.step_profile import load_step
from commplan.diagnostics import CommplanError, fail, text_of
from commplan.frontend.bind_axes import bind_axes
from commplan.ir.plan import AxisKind

if TYPE_CHECKING:
    from commplan.lowering.gpu.estimate import Estimate
    from commplan.lowering.gpu.targets import Target
    from commplan.lowering.jax.gradient_times import GradientTimes


def with_step(args: Namespace, path: str, console: Console, *, estimate: bool = True) -> Namespace:
    """Add `computation` to `args`: the profile of --step-profile, or an estimate of --step on --target.

    Plans are compiled for a profile, as by `Plan.compile(step=..)`, but not for an estimate, which programs
    do not have.

    Args:
        args: the flags.
        path: the plan or saved schedule.
        console: the output.
        estimate: whether to estimate --step.

    Raises:
        CommplanError: CP0772 for an invalid profile, or as `estimated`.
    """
    computation: StepComputation | None = None
    if args.step_profile:
        computation = load_step(args.step_profile)
    elif estimate and args.step:
        computation = estimated(args, mesh_sizes_of(path, args, console))
    return Namespace(**{**vars(args), "computation": computation})


def need_machine(args: Namespace) -> None:
    """Raise CP0752 if a step is specified without a topology."""
    if args.step or args.step_profile:
        fail("CP0752", "there is no topology to predict the step on", NAME_ONE)


def mesh_sizes_of(path: str, args: Namespace, console: Console) -> dict[str, int]:
    """The sizes of the axes, without servers, of the plan or saved schedule at `path`.

    Raises the errors of loading it, and CP07xx for an open axis without --axis.
    """
    text = console.read(path)
    if is_saved(path, text):
        from commplan.verify import verify

        return read_saved(text, name_of(path), verify).mesh_sizes
    axes = bind_axes(load_plan(path, console), once(args.axis, "--axis"))
    return {axis.name: axis.size for axis in axes if axis.kind is not AxisKind.SERVER}


def estimated(args: Namespace, sizes: Mapping[str, int]) -> StepComputation:
    """Compile the step of --step for --target and estimate its computation.

    Raises:
        CommplanError: CP0850 without the compiler for GPUs, CP1150 and CP1152 for the target, CP1153, CP1154
            and CP1157 for the step.
    """
    from commplan.lowering.gpu.estimate import estimate
    from commplan.lowering.gpu.targets import target
    from commplan.lowering.hlo.walk import audit_text

    machine = target(args.target)
    choose_devices(1)
    from commplan.lowering.jax.aot import compile_step, mesh_on

    with user_code(), naming_step(args.step):
        step, arguments = step_at(args.step, mesh_on(machine, sizes))
        times = shares_of(args.step, step, arguments)
        costs = estimate(audit_text(compile_step(step, *arguments).compiled), machine.machine)
    return computation_of(costs, times, machine)


def computation_of(costs: Estimate, times: GradientTimes, machine: Target) -> StepComputation:
    """The estimated computation of a compiled step, with gradients ready at the fractions in `times`.

    Args:
        costs: seconds of the step on one device.
        times: when the backward pass has computed each gradient, as fractions.
        machine: the target of the estimate.
    """
    until = costs.computation - costs.after
    ready = tuple((name, path, share * until) for name, path, share in times.shares)
    return StepComputation(until, ready, f"estimated for {machine} from the compiled step", costs.after)


def shares_of(location: str, step: Any, arguments: tuple[Any, ...]) -> GradientTimes:
    """The gradients of a step, with the fraction of its matrix products that precede each.

    Args:
        location: the value of --step, for the error.
        step: the step.
        arguments: its arguments.

    Raises:
        CommplanError: CP1157 if no phase receives a gradient inside of a shard_map.
    """
    from commplan.lowering.jax.gradient_times import gradient_times

    times = gradient_times(step, arguments)
    if times is None:
        fail(
            "CP1157",
            f"--step {location} calls no phase of a plan with an input inside of a shard_map",
            "call the phase that reduces the gradients in a function decorated with @run.spmd(..)",
        )
    return times


def step_at(location: str, mesh: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Call the user's function at `location` with `mesh`, for the step and the tuple of its arguments.

    Raises:
        CommplanError: CP1109 if the function cannot be imported, CP1153 if its result is invalid.
    """
    returned: Any = function_at(f"--step {location}", location)(mesh)
    parts: list[Any] = [*returned] if isinstance(returned, tuple) else [returned]
    if len(parts) != 2 or not callable(parts[0]) or type(parts[1]) is not tuple:
        names = ", ".join(type(part).__name__ for part in parts)
        message = f"--step {location} returned {names}: expected a step and a tuple of its arguments"
        fail("CP1153", message, "return train, (state, params, batch)")
    return parts[0], cast("tuple[Any, ...]", parts[1])


@contextmanager
def naming_step(step: str | None) -> Generator[None]:
    """Context for compiling the step of --step: its errors are reported as errors of the input (CP1154).

    Without a step, errors are not changed.
    """
    try:
        yield
    except (CommplanError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        if step is None:
            raise
        reason = text_of(error).partition("\n")[0]
        fail("CP1154", f"--step {step} cannot be compiled: {reason}", *raised_at(error))
