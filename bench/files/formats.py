"""The formats of the files that commplan reads: samples of each, and its reader."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import random
import re
import shutil
import struct
import tempfile
import warnings
import zlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import numpy as np

import commplan
from commplan import orbax
from commplan.cli import main
from commplan.cli.jax_side import source_at
from commplan.cost.calibration import Calibration, Curve, MeasuredLevel, load_calibration, write_calibration
from commplan.ir.serialization.text import print_saved
from commplan.lowering.gpu.profile import latency_profile
from commplan.lowering.mpi import prebuilt
from commplan.passes.pipeline import reproducer
from commplan.passes.pipeline.manager import Reproducer
from commplan.recorder.file import Call, Recording, append_end
from commplan.recorder.lane import Lane
from commplan.runtime.input.cache import table
from commplan.runtime.input.ring import meeting
from commplan.runtime.input.ring.words import Shape
from commplan.runtime.param_server.checkpoint import ServerCheckpoint
from commplan.runtime.param_server.event_log import Recorder, log_header, read_events
from commplan.topology import load_topology
from tests.support.server_jobs import Job

EXAMPLES = Path(__file__).parents[2] / "examples"
PLAN = """plan p
axis data = 4
server hub = 1
source images : f32[3, 8]
fn crop(f32[3, 8]) -> f32[8] on host
input grads : tree partial data
input params : tree per data
state center : tree on hub
at start {
    center = broadcast params over data from 0
}
each step {
    batch = load images batch 8 split data visit exactly_once seed 7
    rows = map crop(batch)
    grads = reduce grads over data by mean via ring { bucket = 1 MiB, wire = bf16, accumulate = f32 }
    pull, center = elastic params with center over data by async(eta = 0.05, rho = 0.1)
    output grads, pull, rows
}
"""
SHAPES = {
    name: {"w": {"shape": [40, 31], "dtype": "f32"}, "b": {"shape": [31], "dtype": "bf16"}}
    for name in ("params", "grads", "center")
}
TOPOLOGY = (
    (EXAMPLES / "topologies" / "flat4.toml").read_text()
    + """
[[level]]
name = "rack"
count = 4
latency = "1.5ms"
bandwidth = "100Mbit/s"
[backend]
call = "8us"
round = "2us"
"""
)


CACHED = table.Column(np.dtype("f4"), (3, 8))  # a result that is kept by record


class Format(NamedTuple):
    """A format of files.

    Attributes:
        file: the name of a file.
        samples: valid files.
        read: reads one, in its folder; returns 0 if it is accepted, and 1, or a coded error, if it is
            refused.
        repair: corrects the checksums of a damaged file.
        beside: suffixes of other files that are read or written with it.
    """

    file: str
    samples: Callable[[], tuple[bytes, ...]]
    read: Callable[[Path], int]
    is_text: bool = True
    repair: Callable[[random.Random, bytes], bytes] | None = None
    beside: tuple[str, ...] = ()


def command(*words: str | Path) -> int:
    """The exit code of `commplan`, 3 for an internal failure."""
    code = main([str(word) for word in words])
    return code if code in (0, 1) else 3


# --- formats read as text ---


@functools.cache
def _here() -> Path:
    """A folder of valid files that other formats need."""
    folder = Path(tempfile.mkdtemp(prefix="commplan-files-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "p.plan").write_text(PLAN)
    (folder / "t.toml").write_text(TOPOLOGY)
    (folder / "shapes.json").write_bytes(msgspec.json.encode(SHAPES))
    return folder


@functools.cache
def _program() -> Any:
    plan = commplan.load(_here() / "p.plan")
    return plan.compile(backend="mpi", shapes=SHAPES, topology=load_topology(_here() / "t.toml"))


def _bound(path: Path, **other: Path) -> list[str | Path]:
    """The arguments that bind the plan, with one file replaced."""
    files = {"shapes": _here() / "shapes.json", "topology": _here() / "t.toml", **other}
    return [*(word for name, file in files.items() for word in (f"--{name}", file)), "--backend", "mpi"]


def _read_plan(path: Path) -> int:
    compiled = command("compile", path, *_bound(path), "-o", "out.schedule.json")
    return max(command("check", "--format", "json", path), compiled, command("fmt", path))


def _plans() -> tuple[bytes, ...]:
    return PLAN.encode(), *(path.read_bytes() for path in sorted((EXAMPLES / "plans").glob("*.plan")))


def _read_shapes(path: Path) -> int:
    return command("compile", _here() / "p.plan", *_bound(path, shapes=path), "-o", "out.schedule.json")


def _topologies() -> tuple[bytes, ...]:
    return TOPOLOGY.encode(), *(
        path.read_bytes() for path in sorted((EXAMPLES / "topologies").glob("*.toml"))
    )


def _read_topology(path: Path) -> int:
    return command("simulate", _here() / "p.plan", *_bound(path, topology=path))


@functools.cache
def _calibrations() -> tuple[bytes, ...]:
    levels = MeasuredLevel("host", 6e-5, 2.4e7), MeasuredLevel("rack", 1e-3, 1e7)
    curve = Curve("all_reduce", "ring", "call", "host 0 1", (4.0, 64.0, 1e6), (1e-4, 2e-4, 1e-2))
    hosts = tuple(f"n{number}" for number in range(8))
    calibration = Calibration(
        "2026-11-21", "mpi", hosts, 1e-6, 1e-10, 5e-5, 1e-5, levels, (curve, curve), "flat4"
    )
    return (write_calibration(calibration).encode(),)


def _read_calibration(path: Path) -> int:
    load_calibration(path)
    return command("simulate", _here() / "p.plan", *_bound(path), "--calibration", path)


def _schedules() -> tuple[bytes, ...]:
    _program().save(_here() / "p.schedule.json")
    return ((_here() / "p.schedule.json").read_bytes(),)


def _read_schedule(path: Path) -> int:
    return max(command("verify", path), command("simulate", path, "--topology", _here() / "t.toml"))


def _texts() -> tuple[bytes, ...]:
    return (print_saved(_program().schedule).encode(),)


def _reproducers() -> tuple[bytes, ...]:
    schedule = _program().schedule
    topology, (calibration,) = load_topology(_here() / "t.toml"), _calibrations()
    (_here() / "c.toml").write_bytes(calibration)
    measured = load_calibration(_here() / "c.toml")
    content = Reproducer("command", "error", "overlap", {}, topology, measured, None, None, None, schedule)
    return (msgspec.json.encode(content),)


def _read_reproducer(path: Path) -> int:
    return reproducer.main([str(path)])


def _traces() -> tuple[bytes, ...]:
    events: list[dict[str, Any]] = [
        {"name": f"all_reduce {n}", "ph": "X", "pid": n % 3, "tid": n % 2, "ts": n * 10, "dur": 7, "args": {}}
        for n in range(12)
    ]
    events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": 0, "args": {"name": "stream"}})
    return msgspec.json.encode({"traceEvents": events}), msgspec.json.encode(events)


def _read_trace(path: Path) -> int:
    words = "report", _here() / "p.plan", *_bound(path), "--trace", path, "-o", "out.html"
    return command(*words)


# --- formats read as bytes ---


@functools.cache
def _records() -> tuple[bytes, ...]:
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, COMMPLAN_RECORDS=folder):
        contents: list[bytes] = []
        for lane in ("", "input"):
            recording = Recording("5f0c", "p", 1, 8, {"data": 4, "worker": 2}, lane=lane)
            writer = Lane(recording)
            name = writer.name("line 6 of p.plan", "wait", "group")
            for number in range(20):
                operation = writer.begin(name, number, number)
                if number < 19:
                    writer.end(name, operation, number)
                else:
                    writer.awaits(name, operation, 3)
            recording.put_call(Call("`crop`, line 7", 1.0, "p.py:3 in crop"))
            contents.append(recording.path.read_bytes())
        return tuple(contents)


def _read_record(path: Path) -> int:
    named = path.with_name(f"commplan-{os.getuid()}-5f0c.1.rec")
    path.rename(named) if os.path.lexists(path) else None
    codes = [command("blame", "--format", style, named) for style in ("human", "json")]
    codes += [command("trace", named, "-o", "out.json"), command("trace", "summarize", named)]
    with contextlib.suppress(OSError, ValueError):
        append_end(named, "was killed", 0.0)
    return max(*codes, command("blame", path.parent))


@functools.cache
def _job() -> Any:
    return Job(_program(), {})


@functools.cache
def _recordings() -> tuple[bytes, ...]:
    recorder = Recorder(_here() / "x.order", log_header(_job().sites, 0))
    for number in range(40):
        recorder.add(number % 2, 16 + number % 3)
        if number % 10 == 9:
            recorder.flush()
    recorder.close()
    return ((_here() / "x.order").read_bytes(),)


def _read_recording(path: Path) -> int:
    list(read_events(path, log_header(_job().sites, 0)))
    return 0


def _repair_recording(rng: random.Random, data: bytes) -> bytes:
    """The first block again, with events of any size behind a right checksum."""
    end = data.find(b"\n", data.find(b"\n") + 1) + 1
    packed = zlib.compress(bytes(8 * rng.choice((0, 1, 40, 2**14, 2**22, 2**27))))
    count = rng.choice((0, 1, 40, 2**14, 2**14 + 1, 2**29, 2**32 - 1))
    return data[:end] + struct.pack("<III", count, len(packed), zlib.crc32(packed)) + packed + data[end:]


@functools.cache
def _checkpoints() -> tuple[bytes, ...]:
    keep = ServerCheckpoint(_here() / "kept", _job().drivers[0].store, 0)
    for cell, kept in keep.store:
        kept.slots = [np.zeros(kept.unit.size, dtype.numpy_name) for dtype in kept.dtypes]
        kept.scalars = [np.zeros((), dtype.numpy_name) for dtype in kept.scalar_dtypes]
        for kept.version in (1, 2):
            keep.save(cell, kept)
    keep.close()
    return ((_here() / "kept" / "server-0.state").read_bytes(),)


def _read_checkpoint(path: Path) -> int:
    keep = ServerCheckpoint(path.parent, _job().drivers[0].store, 0)
    if keep.existed:
        keep.load()
        for cell, kept in keep.store:
            kept.version += 1
            keep.save(cell, kept)
    keep.close()
    return 0


def _repair_checkpoint(rng: random.Random, data: bytes) -> bytes:
    """The checksum of each place made right for its numbers."""
    repaired = bytearray(data)
    for at in range(4096, len(data) - 64, 64):
        version, updates, nbytes, crc = struct.unpack_from("<QQQI", data, at)
        if crc and nbytes < len(data):
            crc = zlib.crc32(
                data[at + 64 : at + 64 + nbytes], zlib.crc32(struct.pack("<QQ", version, updates))
            )
            struct.pack_into("<I", repaired, at + 24, crc)
    return bytes(repaired)


@functools.cache
def _rows() -> tuple[bytes, ...]:
    files = [BytesIO() for _ in range(3)]
    arrays = (
        np.zeros((5, 3, 8), np.float32),
        np.asfortranarray(np.eye(4)),
        np.zeros(3, [("a", "i4"), ("b", "O")]),
    )
    for file, array in zip(files, arrays, strict=True):
        np.save(file, array)
    return tuple(file.getvalue() for file in files)


def _read_rows(path: Path) -> int:
    rows = source_at("images", str(path))
    sum(bytes(row) != b"" for row in rows[:3])
    return 0


def _profiles() -> tuple[bytes, ...]:
    return (
        b'costs { name: "all-reduce.1" cost_us: 12.5 }\ncosts { name: "dot" cost_us: 1 }\n',
        b"\n\x12\n\x03dot",
    )


def _read_profile(path: Path) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a profile is of no use without a GPU
        latency_profile(path, [])
    return 0


def _targets() -> tuple[bytes, ...]:
    return (b'{"mpi": "Open MPI v5.0.8", "ffi": "0.3", "machine": "x86_64", "level": "x86-64-v3"}',)


def _read_target(path: Path) -> int:
    with mock.patch.object(prebuilt, "DESCRIPTION", path):
        return int(prebuilt.target() is None)


@functools.cache
def _feeds() -> tuple[bytes, ...]:
    shape = Shape(slots=2, slot_nbytes=4096, parts=2, processes=4, cursors=4)
    facts = {"the plan": f"p {'0' * 64}", "source `images`": "100 records, key k"}
    feed = meeting.created("photos", "feed 'photos'", shape, facts, cores=2, makers=1, epoch=1, unit=8)
    feed.keep_plan(b'{"key": "k", "schedule": {}}')
    data = os.pread(feed.descriptor, shape.nbytes, 0)
    feed.close()
    return (data,)


def _read_feed(path: Path) -> int:
    status = path.stat() if path.exists() else os.stat_result([0] * 10)
    candidate = meeting.MemoryFile("photos", (status.st_dev, status.st_ino), str(path))
    with mock.patch.object(meeting, "is_locked", return_value=True):
        opened = meeting.opened(candidate, "feed 'photos'")
    if opened is None:
        return 1
    opened.plan()
    opened.close()
    return 0


@functools.cache
def _caches() -> tuple[bytes, ...]:
    contents: list[bytes] = []
    for columns in ([CACHED], [CACHED, table.Column(np.dtype("i4"), ())]):
        path = _here() / f"{len(columns)}.cache"
        rows = table.in_file(str(path), table.Shape.of("0" * 32, columns, 6, 1 << 20))
        for record in range(4):
            rows.write(record, [np.full(column.shape, record, column.dtype) for column in columns])
        contents.append(path.read_bytes())
    return tuple(contents)


def _read_cache(path: Path) -> int:
    """A row in the cache is correct, or was never in the file."""
    rows, numbers = table.in_file(str(path), table.Shape.of("0" * 32, [CACHED], 6, 1 << 20)), np.arange(6)
    out = np.zeros((6, *CACHED.shape), CACHED.dtype)
    is_stored = rows.has(numbers)
    rows.read(numbers, is_stored, [out])
    rows.write(5, [np.full(CACHED.shape, 5, CACHED.dtype)])
    if (out != numbers.reshape(6, 1, 1))[is_stored].any():
        raise AssertionError(f"rows {numbers[is_stored]} are {out[is_stored, 0, 0]}")
    return 0


def _repair_cache(rng: random.Random, data: bytes) -> bytes:
    """Its header with another number and a right checksum."""
    head = struct.Struct("<8sIQ")
    if len(data) < head.size:
        return data
    magic, _, length = head.unpack_from(data)
    facts, rest = data[head.size : head.size + length % 4096], data[head.size + length % 4096 :]
    number = rng.choice(("-1", "7", str(2**31), str(2**32 - 2), str(2**63), "null", "1e9", '""')).encode()
    facts = re.sub(rng.choice((rb'(?<="rows": )\d+', rb'(?<="generation": )\d+')), number, facts)
    return head.pack(magic, zlib.crc32(facts), len(facts)) + facts + rest


def _checkpoint_records() -> tuple[bytes, ...]:
    leaf = {"shape": [3], "dtype": "f32"}
    return (msgspec.json.encode({"plan": "p", "seed": 1, "states": {}, "values": {}, "batches": [leaf]}),)


def _read_checkpoint_record(path: Path) -> int:
    orbax.read(path.parent)
    return 0


FORMATS = {
    "plan": Format("a.plan", _plans, _read_plan),
    "topology": Format("a.toml", _topologies, _read_topology),
    "calibration": Format("a.calibration.toml", _calibrations, _read_calibration),
    "shapes": Format("a.json", lambda: (msgspec.json.encode(SHAPES),), _read_shapes),
    "schedule": Format("a.schedule.json", _schedules, _read_schedule),
    "text": Format("a.schedule", _texts, _read_schedule),
    "reproducer": Format("a.reproducer.json", _reproducers, _read_reproducer),
    "trace": Format("a.trace.json", _traces, _read_trace),
    "record": Format("a.rec", _records, _read_record, is_text=False),
    "recording": Format("x.order", _recordings, _read_recording, is_text=False, repair=_repair_recording),
    "checkpoint": Format(
        "server-0.state", _checkpoints, _read_checkpoint, is_text=False, repair=_repair_checkpoint,
        beside=(".state", ".new", ".lock"),
    ),
    "rows": Format("a.npy", _rows, _read_rows, is_text=False),
    "profile": Format("a.pbtxt", _profiles, _read_profile),
    "target": Format("engine.json", _targets, _read_target),
    "feed": Format("feed", _feeds, _read_feed, is_text=False),
    "cache": Format("a.cache", _caches, _read_cache, is_text=False, repair=_repair_cache),
    "orbax": Format("commplan.json", _checkpoint_records, _read_checkpoint_record),
}  # fmt: skip
