"""A feed's plan is compiled once: who brings the same text has it from the feed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import commplan
from commplan.diagnostics import CommplanError
from commplan.ir.schedule import Schedule
from commplan.runtime.input.feeds import compiled
from commplan.runtime.input.ring import meeting

PLAN = """
plan twice
ensemble member = ?
source numbers : i64
fn double(i64) -> i64 on host
each step {
    raw  = load numbers batch 4 visit exactly_once seed 7
    twos = map double(raw)
    output twos
}
"""
MEMBER = """
import sys
for absent in ("jax", "commplan.api", "commplan.dsl", "commplan.compiler", "numpy.random", "multiprocessing"):
    sys.modules[absent] = None
import numpy as np
import commplan

def double(number):
    return np.int64(2 * number)

functions, sources = {"double": double}, {"numbers": np.arange(12, dtype=np.int64)}
with commplan.join(sys.argv[1], sys.argv[2], sources=sources, functions=functions) as feed:
    print(sorted(int(two) for batch in feed for two in batch["twos"]))
"""


def double(number):
    return np.int64(2 * number)


def joined(name: str, plan: Path):
    return commplan.join(
        name, plan, sources={"numbers": np.arange(12, dtype=np.int64)}, functions={"double": double}
    )


@pytest.fixture(name="plan")
def _plan(tmp_path: Path) -> Path:
    path = tmp_path / "twice.plan"
    path.write_text(PLAN)
    return path


def test_who_brings_the_same_text_needs_no_compiler(feed_name: str, plan: Path, tmp_path: Path) -> None:
    script = tmp_path / "member.py"
    script.write_text(MEMBER)
    with joined(feed_name, plan) as feed:
        member = subprocess.run(
            [sys.executable, script, feed_name, plan],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert json.loads(member.stdout or "0") == list(range(0, 24, 2)), member.stderr
        assert len(list(feed)) == 3


def test_another_text_is_compiled_and_refused(feed_name: str, plan: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.plan"
    other.write_text(PLAN.replace("seed 7", "seed 8"))
    with joined(feed_name, plan) as feed:
        key = compiled.key_of(plan.read_bytes())
        with compiled.kept(feed_name, key, "here.plan") as schedule:
            assert isinstance(schedule, Schedule) and schedule.file == "here.plan"
        with compiled.kept(feed_name, compiled.key_of(other.read_bytes()), "") as schedule:
            assert schedule is None
        with pytest.raises(CommplanError, match=r"CP0922|begun with something else"):
            joined(feed_name, other)
        assert len(list(feed)) == 3


def test_one_who_begins_for_long_holds_nobody(
    feed_name: str, plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "BEGIN_S", 0.05)
    with meeting.beginning(feed_name), joined(feed_name, plan) as feed:
        assert len(list(feed)) == 3


def test_who_begins_one_feed_holds_nobody_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "default_folder", lambda: tmp_path)
    with meeting.beginning("first"), meeting.beginning("second"):
        assert len(list(tmp_path.iterdir())) == 2  # neither waited for the other, or went on without
    assert not list(tmp_path.iterdir())
