"""Compile a checked plan to a schedule: bind sizes and shapes, lower, and run the passes."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from msgspec.structs import replace

from commplan.compile_options import DEFAULTS, IN_ORDER, CompileKeywords, CompileOptions, RankPlaces
from commplan.cost.network.rank_placement import spread_as
from commplan.cost.schedule.predictor import predictor_for
from commplan.cost.schedule.step_profile import check_step, load_step
from commplan.diagnostics import CommplanError, Diagnostic, Note, fail, fail_if
from commplan.frontend.bind_axes import bind_axes
from commplan.frontend.infer_shapes import infer
from commplan.frontend.lower.stages import lower
from commplan.frontend.shape_errors import check_leaves, check_sizes
from commplan.ir.plan import Plan
from commplan.ir.schedule import Backend, Leaf, Schedule
from commplan.ir.serialization.text import print_schedule
from commplan.passes.base import PassContext
from commplan.passes.pipeline.manager import PassRecord, Pipeline
from commplan.protocol.build_sites import sites
from commplan.topology import Topology, assign_levels, declared_in, topology_of
from commplan.verify.equivalence import Reference
from commplan.verify.structural import verify

if TYPE_CHECKING:
    from commplan.cost.calibration import Calibration


def compile_plan(
    plan: Plan,
    shapes: Mapping[str, tuple[Leaf, ...]],
    topology: Topology | str | Path | None = None,
    options: CompileOptions = DEFAULTS,
    ranks: RankPlaces = IN_ORDER,
    **keywords: Unpack[CompileKeywords],
) -> Schedule:
    """Compile `plan` for axes of the sizes `options.axes`.

    Args:
        plan: the checked plan.
        shapes: leaves by name, for inputs, states and map results of type tree. Shapes are global: without
            `per` dimensions, before splits, and for records without the dimension of the batch.
        topology: the machine, or the path of its file. Without one, here or in the plan, axes have no
            location.
        options: the options. Without a backend, `jax`.
        ranks: the places of ranks, if they differ from the order of axes.
        keywords: replace fields of `options`.

    Returns:
        The verified schedule.

    Raises:
        CommplanError: CP07xx, including CP0772 for a step with other gradients; CP0606 if leaves are wider
            than the dtype in which `native` adds.
    """
    options = replace(options, **keywords)
    backend, mapping, places = options.backend or "jax", options.mapping, ranks.places
    step = load_step(options.step) if isinstance(options.step, str | Path) else options.step
    pipeline = options.passes if isinstance(options.passes, Pipeline) else Pipeline.parse(options.passes)

    # Bind the axes, and place them on the machine.
    axes = bind_axes(plan, options.axes or {})
    machine = topology_of(plan, topology)
    if machine is not None:
        with declared_in(plan) if topology is None else nullcontext():
            axes = assign_levels(axes, machine, mapping or {}, oversubscribe=options.oversubscribe)
        placed_axes = spread_as(axes, machine, places) if places is not None else None
        if placed_axes is not None:  # the axes describe the places of ranks
            axes, places = placed_axes, None
    elif mapping:
        fail(
            "CP0714",
            "axes are mapped to levels, but there is no topology",
            'pass --topology FILE, or write `topology "FILE"` in the plan',
        )
    calibration = _calibration(options.calibration, machine, backend)

    # Bind the shapes, and lower.
    start = time.perf_counter()
    sizes = {axis.name: axis.size for axis in axes}
    values = infer(plan, sizes, shapes)
    fail_if(check_sizes(plan, values, math.prod(sizes.values())))
    fail_if(check_leaves(plan, values, sizes))
    _check_order(plan, options.order or {})
    schedule = lower(plan, axes, values, backend, machine.hosts if machine is not None else ())
    if step is not None:
        check_step(step, schedule)
    if machine is not None:
        schedule = replace(schedule, topology=machine.compiled(ranks.assumed))
    seconds = time.perf_counter() - start
    reference = _verify_lowering(plan, schedule)
    if options.observer is not None:
        options.observer(PassRecord("lower", "lower", seconds, None, schedule))

    # Run the passes.
    order = options.order or (step.order if step is not None else {})
    leaf_order = {name: tuple(paths) for name, paths in order.items()}
    costs = predictor_for(axes, machine, calibration, backend, places)
    context = PassContext(leaf_order, machine, calibration, places, costs, step=step)
    return pipeline.completed.run(schedule, context, options.observer, reference=reference)


def _verify_lowering(plan: Plan, schedule: Schedule) -> Reference:
    """Compare the lowered schedule with the plan, and return the meaning of the plan.

    Raises:
        CommplanError: CP0718 if they differ, and errors of the plan's calls to servers.
    """
    sites(schedule)  # raises errors of the plan, which must not be reported as errors of lowering
    assert schedule.origin is not None
    reference = Reference(schedule.origin, schedule.axes)
    problems = verify(schedule, reference=reference, written_out=False)  # passes have yet to write out casts
    if problems:
        notes = [Note(problem.message, problem.span) for problem in problems]
        notes.append(Note(f"after `lower`:\n{print_schedule(schedule)}"))
        message = f"lowering broke the schedule: {problems[0].message}"
        raise CommplanError(Diagnostic("CP0718", message, problems[0].span, tuple(notes), file=plan.file))
    return reference


def _calibration(
    calibration: Calibration | str | Path | None, topology: Topology | None, backend: Backend
) -> Calibration | None:
    """Load the calibration; None if there is none.

    Raises:
        CommplanError: CP0727 if there is no topology and it measures nothing but links; CP0753 if it measures
            links of another backend; or an error of `load_calibration`.
    """
    if calibration is None:
        return None
    path = ""
    if isinstance(calibration, str | Path):
        from commplan.cost.calibration import load_calibration  # noqa: PLC0415  only if there is one

        path, calibration = str(calibration), load_calibration(calibration)
    if calibration.links is None:  # input costs do not depend on topology or backend
        return calibration
    if topology is None and calibration.input is None:
        message = "a calibration without a topology"
        note = "it measures the levels of a machine: pass the topology that it was made with"
        fail("CP0727", message, note)
    if topology is not None:
        calibration.check_backend(backend, path)
    return calibration


def _check_order(plan: Plan, order: Mapping[str, Sequence[str]]) -> None:
    """Raise CP0711 for an entry that is not a list of paths, or whose name the plan does not have."""
    names = {value.name for value in plan.values}
    for name, paths in order.items():
        is_list = not isinstance(paths, str) and isinstance(paths, Sequence)  # pyright: ignore[reportUnnecessaryIsInstance]
        if not is_list or not all(isinstance(path, str) for path in paths):  # pyright: ignore[reportUnnecessaryIsInstance]
            message = f"the order for `{name}` is {paths!r}: expected a list of paths"
            fail("CP0711", message, f'such as order={{{name!r}: ["b", "w"]}}', file=plan.file)
        if name not in names:
            message = f"an order for `{name}`, which plan `{plan.name}` does not have"
            fail("CP0711", message, file=plan.file)
