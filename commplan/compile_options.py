"""The options of `Plan.compile`, and the places of ranks that it passes to `commplan.compiler`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import msgspec

from commplan.ir.schedule import Backend
from commplan.wait import TIMEOUT_S

if TYPE_CHECKING:
    from commplan.cost.calibration import Calibration
    from commplan.cost.schedule.step import StepComputation
    from commplan.passes.pipeline.manager import Observer, Pipeline


class CompileKeywords(TypedDict, total=False):
    """The fields of `CompileOptions`, which documents them, as keywords."""

    axes: Mapping[str, int] | None
    order: Mapping[str, Sequence[str]] | None
    passes: str | Pipeline | None
    mapping: Mapping[str, str] | None
    oversubscribe: bool
    backend: Backend | None
    calibration: Calibration | str | Path | None
    step: StepComputation | str | Path | None
    observer: Observer | None
    timeout: float


class CompileOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a plan is compiled.

    Attributes:
        axes: sizes of axes declared `?`, without a mesh. With a communicator, one may be omitted and is
            inferred from the number of ranks. None: no sizes.
        order: for each name, leaf paths in the order in which the backward pass computes them. None or an
            empty mapping: the order of `step`, or else last leaf first.
        passes: a pipeline such as `"share,bucket{max=4MiB},decompose,wire,overlap"`, by default all passes;
            empty for none. `wire` always runs. The default pipeline packs only stages with `{ bucket = .. }`
            if the mesh has more axes than the plan (tensor parallelism), or if it has CPU devices of one
            process only and no topology is specified.
        mapping: the topology level of axes, by axis; None: determined by names and order of the axes. With a
            communicator and no mapping, the hosts of the ranks determine it, and all ranks compile together.
            Hosts are assigned to places in the order that the topology lists, or else in natural order of
            their names, which rank 0 logs.
        oversubscribe: whether there may be more ranks than places.
        backend: `jax` or `mpi`, if there is no mesh to infer it from; None without a mesh is `jax`. It
            determines the native collectives and their costs.
        calibration: measurements by `commplan calibrate` for the topology, or the path of their file. None:
            costs are predicted from the topology alone.
        step: the computation that phases overlap with, or the path of a profile written by `commplan
            calibrate --step`. Gradients are sent in the order in which it computes them. None: unknown.
        observer: receives a `PassRecord` after `lower` and after each pass.
        timeout: seconds to wait for the other ranks of a communicator.
    """

    axes: Mapping[str, int] | None = None
    order: Mapping[str, Sequence[str]] | None = None
    passes: str | Pipeline | None = None
    mapping: Mapping[str, str] | None = None
    oversubscribe: bool = False
    backend: Backend | None = None
    calibration: Calibration | str | Path | None = None
    step: StepComputation | str | Path | None = None
    observer: Observer | None = None
    timeout: float = TIMEOUT_S


DEFAULTS = CompileOptions()  # all options with their defaults


class RankPlaces(NamedTuple):
    """Where ranks are on a topology.

    Attributes:
        places: the place of each rank on the topology, counted from 0, row-major over the axes. MPI ranks
            have the places of their hosts. None: axes are placed by their names and order.
        assumed: assumptions about the topology, one sentence each, which the schedule records.
    """

    places: tuple[int, ...] | None = None
    assumed: tuple[str, ...] = ()


IN_ORDER = RankPlaces()  # places by names and order of the axes, and no assumptions
