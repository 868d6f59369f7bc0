"""The stages of a plan, one module per verb, and functions for all of them.

A module defines the fields of a stage, its syntax and its semantics. `base` has the interface of a stage,
`rules` the rules beyond placements, and `builtins` the built-in functions.
"""

from typing import get_args

from commplan.ir.refs import Ref, getter
from commplan.ir.stages.base import StageOverAxes as StageOverAxes
from commplan.ir.stages.broadcast import Broadcast as Broadcast
from commplan.ir.stages.elastic import ElasticStage as ElasticStage
from commplan.ir.stages.exchange import ExchangeStage as ExchangeStage
from commplan.ir.stages.fragment import MergeStage as MergeStage
from commplan.ir.stages.fragment import PickStage as PickStage
from commplan.ir.stages.gather import Gather as Gather
from commplan.ir.stages.load import Load as Load
from commplan.ir.stages.map import MapStage as MapStage
from commplan.ir.stages.reduce import Reduce as Reduce
from commplan.ir.stages.scatter import Scatter as Scatter
from commplan.ir.stages.share import ShareStage as ShareStage
from commplan.ir.stages.shift import Shift as Shift
from commplan.ir.stages.slice import SliceStage as SliceStage
from commplan.ir.stages.swap import Swap as Swap

# Any stage.
Stage = (
    Load
    | MapStage
    | Broadcast
    | ShareStage
    | Reduce
    | Scatter
    | SliceStage
    | Gather
    | Shift
    | Swap
    | ExchangeStage
    | ElasticStage
    | PickStage
    | MergeStage
)

# The stages of the language by verb. The checker adds the other stages.
VERBS: dict[str, type[Stage]] = {
    str(kind.__struct_config__.tag): kind for kind in get_args(Stage) if hasattr(kind, "FORM")
}
# Those with one operand over some axes.
OVER_AXES = {verb: kind for verb, kind in VERBS.items() if issubclass(kind, StageOverAxes)}


def operands(stage: Stage) -> tuple[Ref, ...]:
    """The values that `stage` reads, each once, in source order."""
    return tuple(dict.fromkeys(getter(type(stage), stage.READS)(stage)))


def results(stage: Stage) -> tuple[Ref, ...]:
    """The values that `stage` makes, in the order of `WRITES`."""
    return getter(type(stage), stage.WRITES)(stage)
