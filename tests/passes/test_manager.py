"""Pipelines as text, the verifier after every pass, dumps, records, reproducers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import ClassVar, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.byhand import compiled, reduce_plan, tree

import commplan
from commplan.compiler import compile_plan
from commplan.cost.calibration import Calibration, MeasuredLevel
from commplan.diagnostics import CommplanError
from commplan.ir.schedule import Collective, Schedule
from commplan.ir.serialization.text import parse_schedule
from commplan.passes.base import Pass, PassContext, parse_pass
from commplan.passes.bucket.bucket import BucketPass
from commplan.passes.overlap import OverlapPass
from commplan.passes.pipeline import reproducer
from commplan.passes.pipeline.manager import PassRecord, Pipeline, both, dump_to, write_reproducer
from commplan.passes.pipeline.registry import DEFAULT, PASSES
from commplan.passes.share.share import SharePass
from commplan.topology import Level, Topology

GIVEN = {"grads": tree(w=(3, 3))}


class Breaks(Pass, frozen=True):
    """Loses the ops of every phase."""

    name: ClassVar[str] = "breaks"

    def run(self, schedule: Schedule, context: PassContext) -> Schedule:
        phases = tuple(msgspec.structs.replace(phase, ops=()) for phase in schedule.phases)
        return msgspec.structs.replace(schedule, phases=phases)


class Fails(Pass, frozen=True):
    """Divides by zero."""

    name: ClassVar[str] = "fails"
    depth: int = 1

    def run(self, schedule: Schedule, context: PassContext) -> Schedule:
        raise ZeroDivisionError(f"at depth {self.depth}")


def test_the_default_pipeline() -> None:
    assert DEFAULT == "share,rates,place,bucket,fuse_update,decompose,wire,select,overlap"
    assert str(Pipeline.parse(None)) == DEFAULT
    assert Pipeline.parse("").passes == ()
    assert Pipeline.parse("lower").passes == ()
    assert Pipeline.parse(f"lower,{DEFAULT}") == Pipeline.parse(DEFAULT)


def test_passes_print_only_what_differs() -> None:
    assert str(BucketPass()) == "bucket"
    assert str(BucketPass(max=4 * 1024**2, coalesce=False)) == "bucket{max=4MiB, coalesce=false}"
    assert str(BucketPass(max=1000)) == "bucket{max=1000}"
    assert str(SharePass(design="none")) == "share{design=none}"


@given(
    st.builds(
        lambda a, b, c, d, e: Pipeline((SharePass(a, b), BucketPass(c, d), OverlapPass(e))),
        st.sampled_from(["all_shared", "duplicate", "none"]),
        st.sampled_from(["push", "keep"]),
        st.integers(1, 2**40),
        st.booleans(),
        st.booleans(),
    )
)
def test_pipelines_print_and_parse(pipeline: Pipeline) -> None:
    assert Pipeline.parse(str(pipeline)) == pipeline


def test_spaces_and_units_do_not_matter() -> None:
    assert Pipeline.parse(" bucket { max = 2KiB , coalesce=true } , overlap ").passes == (
        BucketPass(max=2048), OverlapPass(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "code", "hint"),
    [
        ("bukket", "CP0715", "did you mean `bucket`?"),
        ("zzz", "CP0715", "known: share, rates"),
        ("bucket{mx=1}", "CP0716", "did you mean `max`?"),
        ("wire{x=1}", "CP0716", "known: none"),
        ("bucket{max=lots}", "CP0716", "Expected `int`"),
        ("bucket{max=0}", "CP0716", "Expected `int` >= 1"),
        ("bucket{max=1,max=2}", "CP0716", "is repeated"),
        ("share{design=maybe}", "CP0716", "Invalid enum value"),
        ("bucket{max}", "CP0717", "name=value"),
        ("bucket max", "CP0717", "a pass is written"),
        ("bucket,,wire", "CP0717", "a pass is written"),
        ("wire,bucket", "CP0717", "put `bucket` before it"),
        ("overlap,share", "CP0717", "put `share` before it"),
    ],
)
def test_wrong_pipelines(text: str, code: str, hint: str) -> None:
    with pytest.raises(CommplanError) as caught:
        Pipeline.parse(text)
    assert caught.value.diagnostics[0].code == code
    assert hint in str(caught.value)


def test_every_pass_has_a_summary_and_its_name() -> None:
    for name, kind in PASSES.items():
        assert kind.name == name
        assert kind.summary().endswith(".")
        assert set(kind.after) < set(PASSES)
        assert parse_pass(name, PASSES) == kind()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "wire"),
        ("rates,overlap", "rates,wire,overlap"),
        ("share,decompose,select", "share,decompose,wire,select"),
        ("bucket,rates", "bucket,rates,wire"),
        ("wire,wire", "wire,wire"),
    ],
)
def test_every_pipeline_writes_out_the_types_of_sums(text: str, expected: str) -> None:
    completed = Pipeline.parse(text).completed
    assert str(completed) == expected
    assert Pipeline.parse(expected) == completed


def test_records_of_every_pass() -> None:
    records: list[PassRecord] = []
    schedule = compile_plan(reduce_plan(), GIVEN, passes="bucket{max=8},overlap", observer=records.append)
    assert [(r.name, r.text) for r in records] == [
        ("lower", "lower"), ("bucket", "bucket{max=8}"), ("wire", "wire"), ("overlap", "overlap"),
    ]  # fmt: skip
    assert records[0].before is None
    assert records[1].before == records[0].after
    assert records[-1].after == schedule
    assert all(record.seconds >= 0 for record in records)
    assert schedule.pipeline == "lower,bucket{max=8},wire,overlap"


def test_dumps_parse_back(tmp_path: Path) -> None:
    records: list[PassRecord] = []
    observer = both(records.append, None, dump_to(tmp_path / "dump"))
    compile_plan(reduce_plan(), GIVEN, passes="bucket,overlap", observer=observer)
    names = sorted(path.name for path in (tmp_path / "dump").iterdir())
    assert names == ["00-lower.txt", "01-bucket.txt", "02-wire.txt", "03-overlap.txt"]
    text = (tmp_path / "dump" / "01-bucket.txt").read_text()
    assert parse_schedule(text) == records[1].after


def test_a_broken_invariant_names_the_pass(tmp_path: Path) -> None:
    schedule = compiled(reduce_plan(), "", **GIVEN)
    pipeline = Pipeline((BucketPass(), Breaks()))
    with pytest.raises(CommplanError) as caught:
        pipeline.run(schedule, reproducers=tmp_path)
    (problem,) = caught.value.diagnostics
    assert problem.code == "CP0718"
    assert problem.message.startswith("pass `breaks` broke the schedule: `grads.1")
    notes = "\n".join(note.text for note in problem.notes)
    assert "before `breaks`:\nschedule\n" in notes
    assert "after `breaks`:\nschedule\n" in notes
    assert "grads.1/sum/b0/pack = pack" in notes
    (path,) = tmp_path.glob("made-breaks-*.reproducer.json")
    assert str(path) in notes


class Rewires(OverlapPass, frozen=True):
    """`overlap` by a name that has that of another pass in it."""

    name: ClassVar[str] = "rewires"


def test_only_the_pass_wire_writes_means_out() -> None:
    text = """plan whole
axis a = 3
input g : tree partial a
each step {
    s = reduce g over a by mean { integers = max }
    output s
}
"""
    records: list[PassRecord] = []
    shapes = {"g": {"n": {"shape": [2], "dtype": "i32"}, "w": {"shape": [3], "dtype": "f32"}}}
    commplan.loads(text).compile(shapes=shapes, passes="", observer=records.append)
    after = Pipeline((Rewires(),)).run(records[0].after)
    assert [op.hints.integers for op in after.phases[0].ops if isinstance(op, Collective)] == ["max"]


def test_a_large_schedule_is_shown_in_part(own_temporary: Path) -> None:
    all_shapes = tree(**{f"layer{index:03}": (3,) for index in range(200)})
    schedule = compiled(reduce_plan(), "bucket{max=12}", grads=all_shapes)
    with pytest.raises(CommplanError) as caught:
        Pipeline((Breaks(),)).run(schedule)
    notes = [note.text for note in caught.value.diagnostics[0].notes]
    assert notes[-2].splitlines()[-1].startswith("... and ")
    path = Path(next(note for note in notes if "reproduce" in note).rpartition(" ")[2])
    assert read_reproducer_schedule(path) == schedule
    assert path.is_relative_to(own_temporary)


def test_failures_share_one_folder_of_the_user(own_temporary: Path) -> None:
    schedule, place = (
        compiled(reduce_plan(), "", **GIVEN),
        own_temporary / f"commplan-reproducers-{os.getuid()}",
    )
    first, path = (write_reproducer(schedule, "bucket", PassContext(), "said so") for _ in range(2))
    assert first == path and re.fullmatch(r"made-bucket-[0-9a-f]{8}\.reproducer\.json", path.name)
    other = write_reproducer(compiled(reduce_plan("max"), "", **GIVEN), "bucket", PassContext(), "said so")
    assert [*own_temporary.iterdir()] == [place] and {*place.iterdir()} == {path, other} != {path}
    other.unlink()
    place.chmod(0o777)  # others may change its contents
    assert write_reproducer(schedule, "bucket", PassContext(), "said so").parent != place
    path.unlink()
    place.rmdir()
    place.symlink_to(own_temporary / "elsewhere")
    assert write_reproducer(schedule, "bucket", PassContext(), "said so").parent != place
    assert not (own_temporary / "elsewhere").exists()


@pytest.fixture
def own_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def read_reproducer_schedule(path: Path) -> Schedule:
    return msgspec.convert(msgspec.json.decode(path.read_bytes())["schedule"], Schedule)


def test_a_failing_pass_leaves_a_reproducer(tmp_path: Path) -> None:
    order = {"grads": ("w",)}
    schedule = compiled(reduce_plan(), "bucket", **GIVEN)
    with pytest.raises(CommplanError) as caught:
        Pipeline((Fails(depth=3), OverlapPass())).run(schedule, PassContext(order), reproducers=tmp_path)
    (problem,) = caught.value.diagnostics
    assert (problem.code, problem.message) == (
        "CP0719", "pass `fails{depth=3}` failed: ZeroDivisionError: at depth 3",
    )  # fmt: skip
    (path,) = tmp_path.glob("made-fails-*.reproducer.json")
    content = msgspec.json.decode(path.read_bytes())
    assert content["pipeline"] == "fails{depth=3},overlap"
    assert content["error"] == "ZeroDivisionError: at depth 3"
    assert content["run"] == f"python -m commplan.passes.pipeline.reproducer {path.name}"


def test_a_reproducer_runs_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schedule = compiled(reduce_plan(), "", **GIVEN)
    context = PassContext({"grads": ("w",)})
    path = write_reproducer(schedule, "bucket,overlap", context, "said so", tmp_path)
    assert reproducer.read_reproducer(path) == (schedule, Pipeline.parse("bucket,overlap"), context)
    assert reproducer.main([str(path)]) == 0
    assert parse_schedule(capsys.readouterr().out).pipeline == "lower,wire,bucket,overlap"
    path.write_bytes(path.read_bytes().replace(b'"by": 4.0', b'"by": 0.0'))
    assert reproducer.main([str(path)]) == 1
    assert "CP0718" in capsys.readouterr().err
    path.write_bytes(path.read_bytes().replace(b'"name": "grads"', b'"name": "gradz"'))
    assert reproducer.main([str(path)]) == 1
    assert "CP0723" in capsys.readouterr().err


def test_a_reproducer_knows_the_machine(tmp_path: Path) -> None:
    topology = Topology("racks", (Level("host", 2, 6e-5, 25e6), Level("rack", 2, 1.2e-4, 25e6)))
    levels = (MeasuredLevel("host", 7e-5, 24e6),)
    measured = Calibration("2026-11-21", "mpi", ("a", "b"), 1e-6, 1e-10, 1e-5, 1e-5, levels=levels)
    schedule = compile_plan(reduce_plan(), GIVEN, topology=topology, backend="mpi", passes="")
    context = PassContext({}, topology, measured, (0, 2, 1, 3))
    path = write_reproducer(schedule, "bucket,select", context, "said so", tmp_path)
    schedule_read, pipeline, again = reproducer.read_reproducer(path)
    assert (schedule_read, str(pipeline)) == (schedule, "bucket,select")
    assert (again.topology, again.calibration, again.places) == (topology, measured, (0, 2, 1, 3))
    assert again.costs is not None
    assert again.costs.calibration is not None


@pytest.mark.parametrize(
    "content", [None, b"", b"{}", b"[1]", b'{"schedule": 1, "order": {}, "pipeline": ""}']
)
def test_no_reproducer(tmp_path: Path, content: bytes | None, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.json"
    if content is not None:
        path.write_bytes(content)
    assert reproducer.main([str(path)]) == 1
    assert "CP0723" in capsys.readouterr().err
    assert reproducer.main([]) == 2


def test_the_reproducer_command(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-W",
        "error",
        "-m",
        "commplan.passes.pipeline.reproducer",
        str(tmp_path / "none.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "CP0723" in done.stderr


def test_a_users_mistake_passes_through() -> None:
    class Refuses(Pass, frozen=True):
        """Says no."""

        name: ClassVar[str] = "refuses"
        mode: Literal["a"] = "a"

        def run(self, schedule: Schedule, context: PassContext) -> Schedule:
            from commplan.diagnostics import fail  # noqa: PLC0415

            fail("CP0711", "no")

    with pytest.raises(CommplanError) as caught:
        Pipeline((Refuses(),)).run(compiled(reduce_plan(), "", **GIVEN))
    assert caught.value.diagnostics[0].code == "CP0711"
