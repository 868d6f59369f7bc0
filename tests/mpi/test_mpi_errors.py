"""Mistakes under MPI end in diagnostics on every rank; a rank that fails leaves no others waiting."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from support import mpirun, wrong_ranks

mpirun.needs_mpi()
SCRIPT = Path(wrong_ranks.__file__)


@pytest.fixture(scope="module")
def answers() -> dict[str, list[str]]:
    cases: dict[str, list[str]] = {}
    for line in mpirun.run(2, SCRIPT).splitlines():
        case, _, answer = line.partition(": ")
        cases.setdefault(case, []).append(answer)
    return cases


@pytest.mark.parametrize(
    ("case", "code", "words"),
    [
        ("a size that does not fit", "CP0840", "needs 6 ranks, but the communicator has 2"),
        ("an axis left over", "CP0840", "a multiple of 3 ranks, but the communicator has 2"),
        ("a program for more ranks", "CP0840", "has 4 ranks, but the communicator has 2"),
        ("a program for a mesh", "CP0841", "was compiled for a mesh"),
        ("a mesh for ranks", "CP0841", "is bound to a mesh"),
        ("the wrong backend", "CP0841", "the backend `jax`"),
        ("no backend", "CP0841", "no backend `nccl`"),
        ("another member", "CP0842", "this rank belongs to member"),
        ("parts of others", "CP0842", "the parts of members"),
        ("a leading dimension", "CP0805", "has the shape [1, 4], expected [4]"),
        ("an unknown input", "CP0804", "needs `x`"),
        ("a derivative", "CP0847", "differentiated"),
        ("a batch", "CP0848", "jax.vmap cannot batch"),
        ("other programs", "CP0845", "rank 1 differs from rank 0"),
        ("other seeds", "CP0845", "same seed: rank 1 differs from rank 0"),
        ("a freed communicator", "CP0843", "is null"),
        ("a freed communicator to bind", "CP0843", "is null"),
        ("two sides", "CP0843", "two groups"),
    ],
)
def test_every_rank_is_told(answers: dict[str, list[str]], case: str, code: str, words: str):
    assert len(answers[case]) == 2
    for answer in answers[case]:
        assert answer.startswith(code), answer
        assert words in answer


def test_one_name_of_two_machines_is_said(answers: dict[str, list[str]]):
    warning = (
        f"2 machines have the host name `{socket.gethostname()}`: the topology places their ranks on one host"
    )
    assert len(answers["one host name"]) == 2
    assert all(answer.startswith(warning) for answer in answers["one host name"])


def test_an_assumed_order_of_hosts_is_logged_once_by_rank_0(answers: dict[str, list[str]]):
    text = "topology `two` lists no hosts: they take its places in the order of their names, node2, node10"
    assert answers["hosts 0"] == [f"commplan: plan `p`: {text}"]
    assert "hosts 1" not in answers
    assert answers["assumed 0"] == answers["assumed 1"] == [text], "the schedule records it on every rank"


def test_who_alone_cannot_bind_tells_the_others():
    answers = dict(line.split(": ", 1) for line in mpirun.run(2, SCRIPT, "alone").splitlines())
    for case, message in (
        ("size", "CP0840 the plan has 3 ranks, but the communicator has 2"),
        ("backend", "CP0841 program `p` was compiled for a mesh"),
        ("function", "CP0803 function `scale` is not bound"),
        ("unknown source", "CP0803 the plan has no source `s`"),
        ("seed", "CP0803 the seed is '1'"),
        ("error", "ArithmeticError out of luck"),
    ):
        assert answers[f"{case} 1"].startswith(message)
        assert answers[f"{case} 0"] == f"CP0845 rank 1 cannot bind the program: {answers[f'{case} 1']}"
    assert answers["nothing 0"] == answers["nothing 1"] == "taken"


def test_too_few_threads_are_named():
    code = (
        "import mpi4py; mpi4py.rc.thread_level = 'funneled'\n"
        f"import runpy, sys; sys.argv[1:] = ['threads']; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    )
    output = mpirun.run(1, code)
    assert output.startswith("few threads: CP0844 MPI was initialized for MPI_THREAD_FUNNELED"), output


def test_a_rank_that_fails_ends_them_all():
    """Under `python -m mpi4py`: the others are in a collective that never comes."""
    code = (
        "from mpi4py import MPI\nimport numpy as np, commplan\n"
        f"program = commplan.loads({wrong_ranks.PLAN.replace('member = 2', 'member = 1')!r})"
        ".compile(MPI.COMM_WORLD)\n"
        "run = program.bind(MPI.COMM_WORLD)\n"
        "if MPI.COMM_WORLD.rank == 1: raise ValueError('on rank 1')\n"
        "run.step(run.init(), x=np.ones(4, np.float32))[0].y.block_until_ready()\n"
    )
    command = mpirun.command(2, code)
    command[command.index("-c") : command.index("-c")] = ["-m", "mpi4py"]
    done = mpirun.started(command)
    assert done.returncode != 0
    assert "ValueError: on rank 1" in done.stderr


class Elsewhere:
    """A communicator whose ranks answer as if they ran on these machines."""

    def __init__(self, names: list[str], networks: list[str]) -> None:
        self.answers = list(zip(names, networks, strict=True))

    def Get_size(self) -> int:  # noqa: N802  as mpi4py calls it
        return len(self.answers)

    def Get_rank(self) -> int:  # noqa: N802
        return 0

    def improbe(self, *_: object) -> None:
        """No message is there."""

    def allgather(self, _: object) -> list[tuple[str, str]]:
        return self.answers


def test_machines_of_one_name_are_said():
    from commplan.runtime.machines.ranks import host_names  # noqa: PLC0415  MPI is there

    assert host_names(Elsewhere(["a", "a", "b"], ["1", "1", "2"])) == ["a", "a", "b"]
    with pytest.warns(RuntimeWarning, match="2 machines have the host name `a`"):
        assert host_names(Elsewhere(["a", "a", "b"], ["1", "2", "3"])) == ["a", "a", "b"]
