"""The passes there are, in the order in which they usually run."""

from __future__ import annotations

from commplan.passes.base import Pass
from commplan.passes.bucket import BucketPass
from commplan.passes.decompose import DecomposePass
from commplan.passes.fuse_update import FuseUpdatePass
from commplan.passes.overlap import OverlapPass
from commplan.passes.place import PlacePass
from commplan.passes.rates import RatesPass
from commplan.passes.select import SelectPass
from commplan.passes.share import SharePass
from commplan.passes.wire import WirePass

PASSES: dict[str, type[Pass]] = {
    kind.name: kind
    for kind in (
        SharePass, RatesPass, PlacePass, BucketPass, FuseUpdatePass, DecomposePass, WirePass,
        SelectPass, OverlapPass,
    )
}  # fmt: skip
DEFAULT = ",".join(PASSES)
