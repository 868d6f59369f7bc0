"""All passes in their usual order."""

from __future__ import annotations

from commplan.passes.base import Pass
from commplan.passes.bucket.bucket import BucketPass
from commplan.passes.decompose import DecomposePass
from commplan.passes.exchange.place import PlacePass
from commplan.passes.fuse.fuse_update import FuseUpdatePass
from commplan.passes.overlap import OverlapPass
from commplan.passes.rates import RatesPass
from commplan.passes.select import SelectPass
from commplan.passes.share.share import SharePass
from commplan.passes.wire import WirePass

PASSES: dict[str, type[Pass]] = {
    kind.name: kind
    for kind in (
        SharePass, RatesPass, PlacePass, BucketPass, FuseUpdatePass, DecomposePass, WirePass,
        SelectPass, OverlapPass,
    )
}  # fmt: skip
DEFAULT = ",".join(PASSES)


def default(*, pinned: bool, in_process: bool) -> str:
    """The default pipeline with options for `bucket` and `overlap`."""
    bucket = "bucket{pinned=true}" if pinned else "bucket{in_process=true}" if in_process else "bucket"
    overlap = "overlap{in_process=true}" if in_process else "overlap"
    return ",".join({"bucket": bucket, "overlap": overlap}.get(name, name) for name in PASSES)
