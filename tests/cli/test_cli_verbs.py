"""The verbs of the command, in this process: their output and their exit codes."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from pathlib import Path

import msgspec
import pytest
from support.commands import document

from commplan import __version__
from commplan.cli import main
from commplan.cli.arguments import EMITS, parser
from commplan.cli.jax_side import function_at
from commplan.diagnostics import CommplanError
from commplan.ir.serialization.canonical_json import decode
from commplan.ir.serialization.text import parse_plan, parse_schedule
from commplan.passes.pipeline.registry import PASSES

EXAMPLES = Path(__file__).parents[2] / "examples"
PLANS = sorted((EXAMPLES / "plans").glob("*.plan"))
DATA_PARALLEL = str(EXAMPLES / "plans" / "data_parallel.plan")
LEAF = {"shape": [4, 3], "dtype": "f32"}
SHAPES = {"params": {"w": LEAF}, "grads": {"w": LEAF}}
BAD = "plan p\naxes data = 8\n"

Capture = pytest.CaptureFixture[str]


@pytest.fixture(name="shapes")
def _shapes(tmp_path: Path) -> str:
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps(SHAPES))
    return str(path)


@pytest.fixture(name="bad")
def _bad(tmp_path: Path) -> str:
    path = tmp_path / "bad.plan"
    path.write_text(BAD)
    return str(path)


def stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))


# check


def test_check_of_good_plans_is_quiet_on_stdout(capsys: Capture) -> None:
    assert main(["check", *map(str, PLANS)]) == 0
    out, err = capsys.readouterr()
    assert out == "" and err == f"{len(PLANS)} plans, no problems\n"


def test_check_reports_all_files_and_fails(bad: str, tmp_path: Path, capsys: Capture) -> None:
    assert main(["check", bad, str(tmp_path / "none.plan"), str(tmp_path), DATA_PARALLEL]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{bad}:2:1" in err and "^^^^" in err
    assert "No such file" in err and "Is a directory" in err
    assert "3 errors; `commplan explain CODE` says more of CP0008, CP0001\n" in err


@pytest.mark.parametrize("style", ["concise", "github", "json", "sarif"])
def test_check_writes_what_programs_read_to_stdout(style: str, bad: str, capsys: Capture) -> None:
    assert main(["check", "--format", style, bad]) == 1
    out, err = capsys.readouterr()
    assert err == "" and "CP0008" in out
    if style == "json":
        assert json.loads(out)["summary"] == {"errors": 1, "warnings": 0}
    if style == "sarif":
        assert json.loads(out)["runs"][0]["results"][0]["ruleId"] == "CP0008"


def test_check_reads_stdin(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    stdin(monkeypatch, BAD.encode())
    assert main(["check", "-", "--format", "concise"]) == 1
    assert capsys.readouterr().out.startswith("<stdin>:2:1: error[CP0008]")


def test_check_of_other_encodings_names_the_byte(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "latin.plan"
    path.write_bytes(b"plan p\n# gr\xf6\xdfe\n")
    assert main(["check", "--format", "concise", str(path)]) == 1
    assert f"{path}:2:5: error[CP0002]" in capsys.readouterr().out


def test_check_of_names_that_no_file_can_have(capsys: Capture) -> None:
    assert main(["check", "--format", "concise", "a\0b"]) == 1
    assert "CP0001" in capsys.readouterr().out


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_check_of_files_one_may_not_read(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "secret.plan"
    path.write_text("plan p\n")
    path.chmod(0)
    assert main(["check", str(path)]) == 1
    assert "Permission denied" in capsys.readouterr().err


@pytest.mark.parametrize(
    "choice, no_color, term, expected",
    [("always", "1", "dumb", True), ("never", "", "xterm", False), ("auto", "", "xterm", True),
     ("auto", "1", "xterm", False), ("auto", "", "dumb", False)],
)  # fmt: skip
def test_color(
    choice: str,
    no_color: str,
    term: str,
    expected: bool,
    bad: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    main(["check", "--color", choice, bad])
    assert ("\x1b[" in capsys.readouterr().err) is expected


# fmt


def test_fmt_rewrites_in_place_and_says_so_once(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "a.plan"
    path.write_text("plan p\naxis a=1\n")
    assert main(["fmt", str(path)]) == 0
    assert path.read_text() == "plan p\n\naxis a = 1\n"
    assert main(["fmt", str(path)]) == 0
    assert capsys.readouterr() == ("", f"reformatted {path}\n")


def test_fmt_check_and_diff_change_nothing(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "a.plan"
    path.write_text("plan p\naxis a=1")
    assert main(["fmt", "--check", str(path)]) == 1
    assert capsys.readouterr() == ("", f"would reformat {path}\n")
    assert main(["fmt", "--diff", str(path)]) == 1
    out, _ = capsys.readouterr()
    assert out.splitlines()[2:] == [
        "@@ -1,2 +1,3 @@", " plan p", "-axis a=1", "\\ no newline at the end", "+", "+axis a = 1",
    ]  # fmt: skip
    assert path.read_text() == "plan p\naxis a=1"
    assert main(["fmt", "--check", "--diff", *map(str, PLANS)]) == 2  # argparse: one of the two
    assert main(["fmt", "--check", *map(str, PLANS)]) == 0


def test_fmt_of_stdin_goes_to_stdout(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    stdin(monkeypatch, b"plan p\naxis a=1")
    assert main(["fmt", "-"]) == 0
    assert capsys.readouterr() == ("plan p\n\naxis a = 1\n", "")


def test_fmt_leaves_what_does_not_parse_alone(bad: str, tmp_path: Path, capsys: Capture) -> None:
    good = tmp_path / "good.plan"
    good.write_text("plan p\naxis a=1\n")
    assert main(["fmt", bad, str(good)]) == 1
    assert Path(bad).read_text() == BAD
    assert good.read_text() == "plan p\n\naxis a = 1\n"
    assert "CP0008" in capsys.readouterr().err


def test_fmt_keeps_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.plan"
    path.write_bytes(b"plan p\r\naxis a=1\r\n")
    assert main(["fmt", str(path)]) == 0
    assert path.read_bytes() == b"plan p\r\n\r\naxis a = 1\r\n"


def test_fmt_as_json(tmp_path: Path, bad: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    stdin(monkeypatch, b"plan p\naxis a=1")
    assert main(["fmt", "--format", "json", "--check", "-", bad, DATA_PARALLEL]) == 1
    report = document(capsys)
    assert report["files"] == [
        {"file": "<stdin>", "changed": True, "text": "plan p\n\naxis a = 1\n"},
        {"file": DATA_PARALLEL, "changed": False, "text": None},
    ]
    assert [d["code"] for d in report["diagnostics"]] == ["CP0008"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_fmt_of_files_one_may_not_write(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "a.plan"
    path.write_text("plan p\naxis a=1\n")
    path.chmod(0o400)
    assert main(["fmt", str(path)]) == 1
    assert "CP1101" in capsys.readouterr().err


# compile


def test_compile_prints_the_schedule(shapes: str, capsys: Capture) -> None:
    assert main(["compile", DATA_PARALLEL, "--shapes", shapes]) == 0
    out, err = capsys.readouterr()
    assert parse_schedule(out).plan == "data_parallel" and err == ""


def test_compile_saves_what_programs_load(shapes: str, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "x.schedule.json"
    topology = str(EXAMPLES / "topologies" / "h100_64.toml")
    arguments = ["compile", DATA_PARALLEL, "--shapes", shapes, "-o", str(out), "--topology", topology]
    assert main([*arguments, "--map", "data=gpu"]) == 0
    schedule = decode(out.read_bytes())
    assert schedule.axis("data").level == "gpu"
    assert capsys.readouterr() == ("", f"axis data = 8 on gpu\nwrote {out}\n")


def test_compile_as_json_is_one_document(shapes: str, tmp_path: Path, capsys: Capture) -> None:
    assert (
        main(["compile", DATA_PARALLEL, "--shapes", shapes, "--format", "json", "--passes", "overlap"]) == 0
    )
    report = document(capsys)
    assert report["axes"] == {"data": 8} and report["mapping"] == {"data": None} and report["output"] is None
    assert [item["name"] for item in report["passes"]] == ["lower", "wire", "overlap"]
    assert decode(msgspec.json.encode(report["artifact"])).pipeline == report["pipeline"]
    out = str(tmp_path / "x.json")
    assert main(["compile", DATA_PARALLEL, "--shapes", shapes, "--format", "json", "-o", out]) == 0
    report = document(capsys)
    assert report["artifact"] is None and report["output"] == out and Path(out).exists()


@pytest.mark.parametrize("emit", ["plan", "dot", "mermaid"])
def test_compile_draws_without_shapes(emit: str, capsys: Capture) -> None:
    assert main(["compile", DATA_PARALLEL, "--emit", emit]) == 0
    out, _ = capsys.readouterr()
    if emit == "plan":
        assert parse_plan(out).name == "data_parallel"
    else:
        assert out.startswith({"dot": "digraph", "mermaid": "---\ntitle: plan data_parallel"}[emit])
    assert main(["compile", DATA_PARALLEL, "--emit", emit, "--format", "json"]) == 0
    assert document(capsys)["artifact"] == out


def test_compile_dumps_and_times_passes(shapes: str, tmp_path: Path, capsys: Capture) -> None:
    dump = tmp_path / "dump"
    assert (
        main(["compile", DATA_PARALLEL, "--shapes", shapes, "--dump-passes", str(dump), "--time-passes"]) == 0
    )
    out, err = capsys.readouterr()
    assert len(list(dump.iterdir())) == len(PASSES) + 1
    assert all(re.search(rf"^{name} +\d+\.\d+ ms$", err, re.MULTILINE) for name in ("lower", *PASSES))
    last = sorted(dump.iterdir())[-1].read_text()
    assert parse_schedule(last) == parse_schedule(out)


def test_compile_binds_open_sizes(tmp_path: Path, shapes: str, capsys: Capture) -> None:
    path = tmp_path / "open.plan"
    path.write_text(Path(DATA_PARALLEL).read_text().replace("axis data = 8", "axis data = ?"))
    assert main(["compile", str(path), "--shapes", shapes]) == 1
    assert "CP0706" in capsys.readouterr().err
    assert main(["compile", str(path), "--shapes", shapes, "--axis", "data=3"]) == 0
    assert parse_schedule(capsys.readouterr().out).axis("data").size == 3


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "not JSON"),
        ("[1]", "a JSON array"),
        ("3", "a JSON number"),
        ("null", "a JSON null"),
        ('{"params": {"w": 1, "w": 2}}', "`w` is written twice"),
        ('{"params": ' + "9" * 5000 + "}", "not JSON"),
    ],
)
def test_compile_refuses_malformed_shapes(
    content: str, message: str, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "s.json"
    path.write_text(content)
    assert main(["compile", DATA_PARALLEL, "--shapes", str(path)]) == 1
    err = capsys.readouterr().err
    assert "CP1103" in err and message in err


def test_compile_refuses_more_ranks_than_places(shapes: str, capsys: Capture) -> None:
    arguments = ["compile", DATA_PARALLEL, "--shapes", shapes]
    arguments += ["--topology", str(EXAMPLES / "topologies" / "flat4.toml")]
    assert main(arguments) == 1
    assert "--oversubscribe" in capsys.readouterr().err
    assert main([*arguments, "--oversubscribe"]) == 0


def test_compile_refuses_two_sizes_of_an_axis(shapes: str, capsys: Capture) -> None:
    assert main(["compile", DATA_PARALLEL, "--shapes", shapes, "--axis", "data=8", "--axis", "data=4"]) == 1
    assert "CP1104" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["-o", "--dump-passes"])
def test_compile_says_what_it_cannot_write(flag: str, shapes: str, bad: str, capsys: Capture) -> None:
    assert main(["compile", DATA_PARALLEL, "--shapes", shapes, flag, f"{bad}/x.json"]) == 1
    assert "CP1101" in capsys.readouterr().err


def test_no_input_is_written_over(shapes: str, tmp_path: Path, capsys: Capture) -> None:
    plan, topology = tmp_path / "a.plan", tmp_path / "t.toml"
    plan.write_text(Path(DATA_PARALLEL).read_text())
    topology.write_text((EXAMPLES / "topologies" / "h100_64.toml").read_text())
    read = {path: path.read_text() for path in (plan, topology, Path(shapes))}
    flags = [str(plan), "--shapes", shapes, "--topology", str(topology)]
    for verb, output in (("compile", "-o"), ("report", "-o"), ("simulate", "--trace")):
        for path in read:
            link = tmp_path / f"{verb}.{path.name}"
            link.symlink_to(path)
            assert main([verb, *flags, output, str(link)]) == 1
            assert f"error[CP1101]: cannot write {link}: it is one of the files" in capsys.readouterr().err
    assert read == {path: path.read_text() for path in read}
    assert main(["compile", *flags, "-o", str(tmp_path / "new.txt")]) == 0
    assert main(["compile", *flags, "-o", str(tmp_path / "new.txt")]) == 0


def test_problems_are_the_document_in_json(bad: str, capsys: Capture) -> None:
    assert main(["compile", bad, "--format", "json"]) == 1
    assert [d["code"] for d in document(capsys)["diagnostics"]] == ["CP0008"]


# explain


def test_explain_prints_a_page(capsys: Capture) -> None:
    assert main(["explain", "cp0006"]) == 0
    assert capsys.readouterr().out.startswith("# CP0006: a bracket is never closed\n")
    assert main(["explain", "CP0006", "--format", "json"]) == 0
    report = document(capsys)
    assert (report["code"], report["title"]) == ("CP0006", "a bracket is never closed")
    assert main(["explain", "CP0006", "--color", "always"]) == 0
    assert "\x1b[" in capsys.readouterr().out


def test_explain_of_unknown_codes(capsys: Capture) -> None:
    assert main(["explain", "CP9999"]) == 1
    assert "CP1102" in capsys.readouterr().err
    assert main(["explain", "CP0312"]) == 0 and main(["explain", "CP0699"]) == 1
    assert "CP0616: values that cannot be sent in blocks" in capsys.readouterr().err
    assert main(["explain", "CP98"]) == 1
    assert "CP03..: placements" in capsys.readouterr().err


def test_explain_lists_codes(capsys: Capture) -> None:
    assert main(["explain", "cp03"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["CP03  placements", "  CP0301  the value is already the same"]
    assert main(["explain", "CP", "--format", "json"]) == 0
    codes = document(capsys)["codes"]
    assert codes["CP0006"] == "a bracket is never closed" and len(codes) > 300


def test_explain_of_a_plan(shapes: str, capsys: Capture) -> None:
    assert main(["explain", DATA_PARALLEL, "--shapes", shapes]) == 0
    out, _ = capsys.readouterr()
    assert "each step" in out and "bf16" in out
    assert main(["explain", DATA_PARALLEL, "--shapes", shapes, "--format", "json"]) == 0
    report = document(capsys)
    assert [phase["name"] for phase in report["phases"]] == ["start", "step"]


# passes, new, completion


def test_passes(capsys: Capture) -> None:
    assert main(["passes"]) == 0
    out, _ = capsys.readouterr()
    assert all(re.search(rf"^{name} ", out, re.MULTILINE) for name in PASSES)
    assert "max=25MiB" in out
    assert main(["passes", "--format", "json"]) == 0
    report = document(capsys)
    assert [item["name"] for item in report["passes"]] == list(PASSES)
    assert report["default"] == ",".join(PASSES)


def test_version_and_help(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"commplan {__version__}\n"
    assert main(["--help"]) == 0
    assert "Exit codes" in capsys.readouterr().out
    assert main([]) == 2
    assert {"check", "fmt", "simulate", "run", "new"} <= set(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["banana"],
        ["check"],
        ["check", "--format", "xml", "x"],
        ["compile", "x", "--axis", "data"],
        ["compile", "x", "--axis", "data=-1"],
        ["compile", "x", "--axis", "data=1e9"],
        ["compile", "x", "--axis", "data=٣"],
        ["run", "x", "--steps", "9" * 5000],
        ["compile", "x", "--map", "=gpu"],
        ["run", "x", "--steps", "0"],
        ["compile", "x", "--emit", "banana"],
    ],
)
def test_wrong_usage_is_two(arguments: list[str], capsys: Capture) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and "usage: commplan" in err


def test_every_verb_has_help_and_every_flag_says_what_it_is(capsys: Capture) -> None:
    for verb in ("check", "fmt", "compile", "explain", "run", "passes", "new", "completion"):
        assert main([verb, "--help"]) == 0
        assert capsys.readouterr().out.startswith(f"usage: commplan {verb}")
    assert parser().prog == "commplan" and len(EMITS) == 6


def test_internal_failures_are_two_and_say_where(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.delenv("COMMPLAN_TRACEBACK", raising=False)
    monkeypatch.setattr("commplan.dsl.analyze", lambda text, file: 1 // 0)
    assert main(["check", DATA_PARALLEL]) == 2
    err = capsys.readouterr().err
    assert "internal failure: ZeroDivisionError" in err and "test_cli_verbs.py" in err
    monkeypatch.setenv("COMMPLAN_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        main(["check", DATA_PARALLEL])


def test_interruptions_are_said(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def interrupt(text: str, file: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("commplan.dsl.analyze", interrupt)
    assert main(["check", DATA_PARALLEL]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_what_is_given_twice_is_said_by_every_flag(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "p.plan"
    path.write_text("plan p\naxis data = 2\ninput x : f32 per data\neach step { output x }\n")
    twice = ["check", str(path), "--records", "s=1", "--records", "s=2"]
    assert main(twice) == 1
    assert "CP1104" in capsys.readouterr().err


def test_a_program_is_run_once_and_hides_no_module(tmp_path: Path) -> None:
    program, hiding = tmp_path / "two_functions.py", tmp_path / "json.py"
    program.write_text("class Made: pass\none, two = (lambda: Made), (lambda: Made)\n")
    hiding.write_text("one = len\n")
    first, second = (function_at("--fn", f"{program}:{name}") for name in ("one", "two"))
    assert first() is second()
    with pytest.raises(CommplanError, match="has the name of the loaded module `json`"):
        function_at("--fn", f"{hiding}:one")
    program.write_text("one = str\n")
    os.utime(program, ns=(1, 1))
    assert function_at("--fn", f"{program}:one") is str


def test_a_live_view_of_feeds_is_for_people(capsys: Capture) -> None:
    assert main(["feeds", "--watch", "--format", "json"]) == 2
    assert "--watch would write many" in capsys.readouterr().err
