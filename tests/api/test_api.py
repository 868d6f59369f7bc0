"""The public interface: loading plans, compiling, saving and loading programs, and errors."""

from __future__ import annotations

import copy
import os
import pickle
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import commplan
from commplan.compile_options import CompileKeywords
from commplan.diagnostics import CommplanError
from commplan.ir.schedule import Pack

PLANS = Path(__file__).parents[2] / "examples" / "plans"
TREE = {"w": {"shape": [3, 4], "dtype": "f32"}, "b": [{"shape": [2], "dtype": "f32"}]}
TEXT = """plan small

axis data = ?

input grads : tree partial data

each step {
    grads = reduce grads over data by mean
    output grads
}
"""


def mesh(**sizes: int) -> Any:
    return SimpleNamespace(shape=dict(sizes), axis_names=tuple(sizes))


def program(**sizes: int) -> commplan.Program:
    return commplan.loads(TEXT).compile(mesh(**(sizes or {"data": 4})), {"grads": TREE})


def refusal(call: Any, *args: Any, **named: Any) -> Any:
    with pytest.raises(CommplanError) as caught:
        call(*args, **named)
    return caught.value.diagnostics[0]


def test_import_loads_no_backend_and_no_parser() -> None:
    modules = ("jax", "mpi4py", "commplan.dsl", "numpy")
    code = f"import commplan, sys; print([m for m in {modules} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_a_program_is_loaded_and_read_without_the_compiler(tmp_path: Path) -> None:
    plan = tmp_path / "read.plan"
    plan.write_text(
        "plan read\nsource numbers : i32\neach step {\n"
        "    drawn = load numbers batch 2 visit exactly_once seed 1\n    output drawn\n}\n"
    )
    saved = commplan.load(plan).compile().save(tmp_path / "read.schedule.json")
    code = (
        "import sys, commplan, numpy\nfrom commplan.runtime.input import PhaseBatches\n"
        f"schedule = commplan.Program.load({str(saved)!r}).schedule\n"
        "with PhaseBatches(schedule, 'step', {'numbers': numpy.arange(4, dtype='i4')}, {}) as batches:\n"
        "    print(sum(len(batch.values) for batch in batches))\n"
        "rooms = ('collectives', 'compiler', 'cost', 'dsl', 'frontend.lower', 'passes', 'recorder.file',"
        " 'select', 'topology')\n"
        "print([room for room in rooms if f'commplan.{room}' in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "2\n[]\n", done.stderr


def test_the_public_face_needs_no_jax_but_where_it_runs() -> None:
    """Sources, plans and topologies are there without jax; `import *` too."""
    code = (
        "import sys; sys.modules['jax'] = None\n"
        "from commplan import *\n"
        "import commplan\n"
        "names = [paths([]).__class__.__name__, load_topology.__name__, Topology.__name__]\n"
        "print(folder is commplan.folder, *names)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "True Files load_topology Topology\n"


@pytest.mark.parametrize("name", dir(commplan))
def test_every_public_name_is_found(name: str) -> None:
    assert getattr(commplan, name) is not None


def test_dir_shows_the_public_names_and_nothing_else() -> None:
    code = "import commplan, commplan.cli, commplan.runtime.run; print(*dir(commplan))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == sorted({*commplan.__all__, "Run", "guard", "optax"})


def test_names_that_are_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'commplan' has no attribute 'laod'"):
        _ = commplan.laod  # pyright: ignore[reportAttributeAccessIssue]


def test_a_plan_from_a_file_and_from_text() -> None:
    plan = commplan.load(PLANS / "data_parallel.plan")
    assert plan.name == "data_parallel"
    assert plan.digest == commplan.loads((PLANS / "data_parallel.plan").read_text()).digest
    assert plan == commplan.load(str(PLANS / "data_parallel.plan"))
    assert hash(plan) == hash(commplan.load(PLANS / "data_parallel.plan"))


def test_comments_and_layout_are_no_part_of_a_plans_digest() -> None:
    loose = TEXT.replace("axis data", "# so many\n\naxis     data").replace("    grads =", "\tgrads   =")
    assert commplan.loads(loose).digest == commplan.loads(TEXT).digest
    assert commplan.loads(TEXT.replace("mean", "sum")).digest != commplan.loads(TEXT).digest


def test_a_wrong_plan() -> None:
    with pytest.raises(CommplanError) as caught:
        commplan.loads(TEXT.replace("over data", "over dta"), "small.plan")
    assert "small.plan:8:" in str(caught.value)


def test_files_that_are_no_plans(tmp_path: Path) -> None:
    assert refusal(commplan.load, tmp_path / "none.plan").code == "CP1009"
    assert refusal(commplan.load, tmp_path).code == "CP1009"
    (tmp_path / "binary.plan").write_bytes(b"\xff\xfe\x00plan")
    assert refusal(commplan.load, tmp_path / "binary.plan").code == "CP1009"


def test_a_plan_as_bytes() -> None:
    with pytest.raises(CommplanError) as error:
        commplan.loads(b"plan p")  # pyright: ignore[reportArgumentType]
    assert error.value.diagnostics[0].code == "CP0002"
    assert "this is of type bytes" in str(error.value)


def test_meshes_and_mappings_and_sizes_say_the_same() -> None:
    plan, shapes = commplan.loads(TEXT), {"grads": TREE}
    by_mesh = plan.compile(mesh(data=4, model=1), shapes)
    assert by_mesh == plan.compile({"data": 4}, shapes) == plan.compile(axes={"data": 4}, shapes=shapes)
    assert [axis.size for axis in by_mesh.schedule.axes] == [4]


def test_an_abstract_mesh_is_compiled_for_its_sizes() -> None:
    import jax  # noqa: PLC0415

    plan, shapes = commplan.loads(TEXT), {"grads": TREE}
    assert plan.compile(jax.sharding.AbstractMesh((4,), ("data",)), shapes) == plan.compile(
        {"data": 4}, shapes
    )


def test_a_jax_mesh() -> None:
    import jax  # noqa: PLC0415

    devices = jax.make_mesh((4, 2), ("data", "model"))
    shapes = {"grads": {"w": jax.ShapeDtypeStruct((3, 4), "float32"), "b": [jax.numpy.zeros(2)]}}
    # Leaves may be sharded over `model`: they are packed only if the plan says so.
    whole = commplan.loads(TEXT).compile(devices, shapes)
    assert whole == commplan.loads(TEXT).compile({"data": 4}, shapes, passes=whole.schedule.pipeline)
    assert "bucket{pinned=true}" in whole.schedule.pipeline
    # CPU devices of one process share its memory.
    shared = commplan.loads(TEXT).compile(jax.make_mesh((4, 1), ("data", "model")), shapes)
    assert "bucket{in_process=true}" in shared.schedule.pipeline
    assert "overlap{in_process=true}" in shared.schedule.pipeline
    assert not any(isinstance(op, Pack) for phase in shared.schedule.phases for op in phase.ops)
    (text,) = [choice.what for choice in shared.schedule.choices if choice.by == "bucket"]
    assert text == "`grads`: each leaf separately, 56 B"


def test_nodes_that_only_jax_knows() -> None:
    import jax  # noqa: PLC0415

    box = jax.tree_util.Partial(max, jax.numpy.zeros((3, 4)), b=jax.numpy.zeros(2))
    schedule = commplan.loads(TEXT).compile(axes={"data": 2}, shapes={"grads": box}).schedule
    assert [leaf.shape for leaf in schedule.entry[0].leaves] == [(3, 4), (2,)]


def test_what_a_plan_cannot_be_compiled_for() -> None:
    plan, shapes = commplan.loads(TEXT), {"grads": TREE}
    assert refusal(plan.compile, 4, shapes).code == "CP0722"
    assert refusal(plan.compile, mesh(model=4), shapes).code == "CP0707"
    assert refusal(plan.compile, None, shapes).code == "CP0706"
    assert refusal(plan.compile, mesh(data=4)).code == "CP0701"
    problem = refusal(plan.compile, mesh(data=4), shapes, axes={"data": 8})
    assert (problem.code, "size 8 in `axes` and 4 in the mesh" in problem.message) == ("CP0708", True)
    assert refusal(plan.compile, mesh(data=4), shapes, passes="buckets").code == "CP0715"
    assert refusal(plan.compile, mesh(data=4), shapes, topology="none.toml").code == "CP0712"
    assert refusal(plan.compile, mesh(data=4), shapes, mapping={"data": "gpu"}).code == "CP0714"


@pytest.mark.parametrize(
    ("code", "named"),
    [
        ("CP0708", {"axes": {"data": "4"}}),
        ("CP0708", {"axes": {"data": 4.0}}),
        ("CP0708", {"axes": {"data": True}}),
        ("CP0708", {"axes": {"data": -4}}),
        ("CP0709", {"axes": {"data": 4, "node": 2}}),
        ("CP0720", {"axes": {"data": 4}, "shapes": [TREE]}),
        ("CP0720", {"axes": {"data": 4}, "shapes": {"grads": "w"}}),
        ("CP0711", {"axes": {"data": 4}, "order": {"grads": "w"}}),
        ("CP0711", {"axes": {"data": 4}, "order": {"grads": ["w", "w"]}}),
        ("CP0711", {"axes": {"data": 4}, "order": ["w"]}),
        ("CP0717", {"axes": {"data": 4}, "passes": 3}),
        ("CP0722", {"mesh": "data"}),
        ("CP0722", {"axes": [("data", 4)]}),
        ("CP0708", {"mesh": {"data": "4"}}),
        ("CP0708", {"mesh": {"data": 2.5}}),
    ],
)
def test_arguments_of_other_kinds(code: str, named: dict[str, Any]) -> None:
    assert refusal(commplan.loads(TEXT).compile, **({"shapes": {"grads": TREE}} | named)).code == code


def test_sizes_may_be_any_whole_number() -> None:
    import numpy as np  # noqa: PLC0415

    assert commplan.loads(TEXT).compile(axes={"data": np.int64(4)}, shapes={"grads": TREE}) == program()


def test_an_ensemble_needs_an_axis_of_the_mesh() -> None:
    problem = refusal(commplan.load(PLANS / "ensemble_training.plan").compile, mesh(data=4), {})
    assert problem.code == "CP0707"
    assert "add an axis `member` of size 2 to the mesh" in problem.notes[1].text


def test_programs_are_frozen_hashable_values() -> None:
    first, second = program(), program()
    assert first == second
    assert hash(first) == hash(second)
    assert {first: 1}[second] == 1
    assert first != program(data=8)
    assert first != "program"
    assert repr(first) == f"<Program small data=4 {first.digest[:12]}>"
    for name in ("schedule", "digest", "_digest", "other"):
        with pytest.raises(AttributeError):
            setattr(first, name, None)


def test_structures_are_kept_but_not_compared(tmp_path: Path) -> None:
    original = program()
    assert original.structures == {"grads": TREE}
    loaded = commplan.Program.load(original.save(tmp_path / "p"))
    assert loaded == original
    assert loaded.structures == {}


def test_saving_and_loading(tmp_path: Path) -> None:
    original = program()
    assert original.save(tmp_path / "one.json") == tmp_path / "one.json"
    assert original.save(str(tmp_path / "two")) == tmp_path / "two.schedule.json"
    assert original.save(tmp_path) == tmp_path / "small.schedule.json"
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1
    assert len(list(tmp_path.iterdir())) == 3  # nothing temporary is left
    assert commplan.Program.load(tmp_path / "one.json", commplan.loads(TEXT)) == original
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE((tmp_path / "one.json").stat().st_mode) == 0o666 & ~mask


def test_saving_over_a_file_is_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = program().save(tmp_path / "p.json")
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    problem = refusal(program(data=8).save, path)
    assert (problem.code, "No space left" in problem.message) == ("CP1009", True)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_programs_are_copied_and_pickled(again: Any) -> None:
    original = program()
    other = again(original)
    assert (other, other.schedule, other.structures) == (original, original.schedule, original.structures)


def test_saving_where_nothing_can_be_saved(tmp_path: Path) -> None:
    assert refusal(program().save, tmp_path / "missing" / "p.json").code == "CP1009"
    (tmp_path / "taken.json").mkdir()
    assert program().save(tmp_path / "taken.json").parent == tmp_path / "taken.json"


def test_loading_what_is_no_program(tmp_path: Path) -> None:
    assert refusal(commplan.Program.load, tmp_path / "none.json").code == "CP1009"
    (tmp_path / "text.json").write_text("plan x")
    problem = refusal(commplan.Program.load, tmp_path / "text.json")
    assert (problem.code, problem.file) == ("CP1001", str(tmp_path / "text.json"))


def test_loading_for_another_plan(tmp_path: Path) -> None:
    original = program()
    path = original.save(tmp_path / "p.json")
    other = commplan.loads(TEXT.replace("mean", "sum"))
    problem = refusal(commplan.Program.load, path, other)
    assert problem.code == "CP1007"
    notes = " ".join(note.text for note in problem.notes)
    assert other.digest in notes
    assert original.schedule.plan_digest in notes


def test_binding_to_a_mesh_of_other_sizes(tmp_path: Path) -> None:
    loaded = commplan.Program.load(program().save(tmp_path / "p.json"))
    problem = refusal(loaded.bind, mesh(data=8))
    assert problem.code == "CP1006"
    notes = [note.text for note in problem.notes]
    assert notes[0] == f"compiled for data=4 (schedule {loaded.digest})"
    assert notes[1] == "found data=8"


def test_other_shapes_give_another_program() -> None:
    other = commplan.loads(TEXT).compile({"data": 4}, {"grads": {"w": {"shape": [4, 3], "dtype": "f32"}}})
    assert other.digest != program().digest


def test_binding_runs_on_the_mesh() -> None:
    import jax  # noqa: PLC0415

    devices = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    run = program().bind(devices)
    assert run.program == program()


@pytest.mark.parametrize("order", [{"grads": 3}, {"grads": "w"}, {"grads": [["w"], "b/0"]}])
def test_an_order_lists_paths(order: Any) -> None:
    problem = refusal(commplan.loads(TEXT).compile, {"data": 4}, {"grads": TREE}, order=order)
    assert problem.code == "CP0711"
    assert "expected a list of paths" in problem.message


def test_an_axis_of_a_mesh_has_a_size() -> None:
    declared = commplan.loads(TEXT.replace("data = ?", "data = 4"))
    assert refusal(declared.compile, {"data": None}, {"grads": TREE}).code == "CP0708"


def test_a_name_that_no_file_can_have() -> None:
    assert refusal(commplan.load, "a\0").code == "CP1009"


def test_each_option_of_a_compilation_is_a_keyword() -> None:
    assert set(CompileKeywords.__annotations__) == set(commplan.CompileOptions.__struct_fields__)
    plan, options = commplan.loads(TEXT), commplan.CompileOptions(axes={"data": 4}, passes="bucket{max=4}")
    compiled = plan.compile(shapes={"grads": TREE}, options=options)
    assert compiled == plan.compile(shapes={"grads": TREE}, axes={"data": 4}, passes="bucket{max=4}")
    assert plan.compile(shapes={"grads": TREE}, options=options, axes={"data": 2}).schedule.mesh_sizes == {
        "data": 2
    }


def test_options_that_are_none_are_refused() -> None:
    sizes: Any = {"data": 4}
    problem = refusal(commplan.loads(TEXT).compile, None, {"grads": TREE}, None, sizes)
    assert (problem.code, problem.message) == ("CP0722", "options is of type dict: expected CompileOptions")
