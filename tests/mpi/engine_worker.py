"""Run on every rank by test_engine.py: collectives of the engine against the oracle, many in one program.

    mpirun -n N python engine_worker.py PART...

Rank 0 prints {"cases": count, "wrong": [descriptions of errors, with ranks]}.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from mpi4py import MPI
from support.oracle.numbers import combine
from support.oracle.programs import execute

from commplan.collectives import registry
from commplan.collectives.program import KINDS as PROGRAMMED
from commplan.diagnostics import CommplanError
from commplan.ir.plan import Algorithm, Arg
from commplan.ir.types import DType
from commplan.lowering.jax.backend import BufferLayout, BufferRun
from commplan.lowering.mpi.collectives import Channel
from commplan.lowering.mpi.tuning import KINDS, NATIVE, Spec, choose_program

comm = MPI.COMM_WORLD
RANKS, RANK = comm.Get_size(), comm.Get_rank()
NUMPY = {"bfloat16": ml_dtypes.bfloat16}
NAMES = {dtype.numpy_name: dtype for dtype in DType}
ROOTED = ("broadcast", "reduce", "scatter", "gather")
CUT = ("reduce_scatter", "scatter", "all_to_all", "swap")


@dataclasses.dataclass(frozen=True)
class Case:
    spec: Spec
    size: int  # of a rank's operand
    dtype: str = "float32"
    cuts: tuple[int, ...] = ()  # sizes of the arrays in a row of operand and result, if there are several
    gap: int = 0  # elements at the end of a row that are in none of them


def operand(case: Case, rank: int) -> Any:
    rng = np.random.default_rng((rank, case.size))
    if case.dtype == "bool":
        return rng.integers(0, 2, case.size).astype(bool)
    if case.dtype in ("uint8", "int32", "int64"):
        low = 0 if case.dtype == "uint8" else -(2**30)
        return rng.integers(low, 200 if low == 0 else 2**30, case.size).astype(case.dtype)
    values = rng.standard_normal(case.size).astype(NUMPY.get(case.dtype, case.dtype))
    if case.spec.op != "sum" and case.size > 2:
        values[case.size // 2] = np.nan if rank == 0 else 1
        values[:2] = (0.0, -0.0) if rank % 2 else (-0.0, 0.0)
    if case.spec.form != "rounds" and case.dtype == "float32":
        values[-1:] = 1e-40 * (rank + 1)  # XLA flushes subnormals, the engine does not
    return values


def expected(case: Case, xs: list[Any], channel: Channel) -> list[Any] | None:
    """The expected result of each rank; None for native sums of floats, whose order of additions MPI
    chooses."""
    spec, ranks = case.spec, len(xs)
    rows = np.stack(xs)
    if spec.kind == "shift":
        return list(np.roll(rows, spec.root, 0))
    if spec.kind in ("swap", "all_to_all"):
        return list(rows.reshape(ranks, ranks, -1).swapaxes(0, 1).reshape(ranks, -1))
    whole = case.size * ranks if spec.kind in ("all_gather", "gather") else case.size
    whole_spec = dataclasses.replace(spec, axes=spec.axes or tuple(channel.groups.sizes))
    program = choose_program(whole_spec, channel.groups, whole, xs[0].dtype.itemsize)
    if program is not None and case.dtype == "bfloat16":
        wide = execute(program.program, [x.astype(np.float32) for x in xs], spec.op, DType.BF16)
        return [np.asarray(x).astype(xs[0].dtype) for x in wide]
    if program is not None:
        return [np.asarray(x) for x in execute(program.program, xs, spec.op)]

    def how(first: Any, second: Any) -> Any:
        return combine(spec.op, first, second, NAMES[case.dtype])

    if spec.kind in ("all_reduce", "reduce", "reduce_scatter"):
        if spec.op == "sum" and case.dtype.endswith(("16", "float32", "float64")):
            return None
        total = rows[0]
        for row in rows[1:]:
            total = how(total, row)
        return list(total.reshape(ranks, -1)) if spec.kind == "reduce_scatter" else [total] * ranks
    match spec.kind:
        case "all_gather" | "gather":
            return [rows.reshape(-1)] * ranks
        case "broadcast":
            return [rows[spec.root]] * ranks
        case _:
            return list(rows[spec.root].reshape(ranks, -1))


def kinds(ranks: int) -> Iterator[tuple[Any, int, int]]:
    """Kind, root, and the divisor of the operand's size."""
    for kind in KINDS:
        yield kind, (ranks - 1 if kind in (*ROOTED, "shift") else 0), (ranks if kind in CUT else 1)


def by_algorithm(sizes: tuple[int, ...], chunks: tuple[int | None, ...], form: Any) -> Iterator[Case]:
    for kind, root, ways in kinds(RANKS):
        names = ("native", *(registry.algorithms(kind) if kind in PROGRAMMED else ()))
        for name in names:
            for size in sizes:
                for chunk in chunks if name != "native" else (None,):
                    spec = Spec(kind, root=root, algorithm=Algorithm(name), chunk=chunk, form=form)
                    yield Case(spec, size * ways)


def by_dtype(form: Any) -> Iterator[Case]:
    dtypes = ("bool", "uint8", "int32", "float16", "bfloat16", "float32")
    for dtype in dtypes:
        for op in ("sum", "max", "min"):
            for algorithm in (NATIVE, Algorithm("ring")):
                for kind in ("all_reduce", "reduce_scatter"):
                    yield Case(Spec(kind, op=op, algorithm=algorithm, form=form), 9 * RANKS, dtype)  # pyright: ignore[reportArgumentType]
            butterfly = Spec("all_reduce", op=op, algorithm=Algorithm("recursive_doubling"), form=form)  # pyright: ignore[reportArgumentType]
            yield Case(butterfly, 9 * RANKS, dtype)
        for kind in ("broadcast", "all_gather", "all_to_all", "shift", "swap"):
            yield Case(Spec(kind, form=form), 2 * RANKS, dtype)
        yield Case(Spec("all_gather", algorithm=Algorithm("bruck"), form=form), 5, dtype)
        yield Case(Spec("swap", algorithm=Algorithm("bruck"), form=form), 5 * RANKS, dtype)


def large() -> Iterator[Case]:
    """More than one message between two ranks, more than a window of them."""
    for kind, root, _ in kinds(RANKS):
        for name in registry.algorithms(kind) if kind in PROGRAMMED else ("native",) * (kind == "shift"):
            for chunk in (None, 30_000):
                spec = Spec(kind, root=root, algorithm=Algorithm(name), chunk=chunk)
                yield Case(spec, 25_001 * RANKS)


def together() -> Iterator[Case]:
    """Several arrays as one buffer: every algorithm, in pieces that end within arrays and hold several.

    A buffer that is scattered, or gathered, has a row of them for each rank.
    """
    for kind in ("all_reduce", "broadcast", "reduce_scatter", "all_gather"):
        for name in ("native", *registry.algorithms(kind)):
            for cuts in ((5, 1, 31, 2, 2, 8), (40_001, 1, 60_000)):
                for chunk in (None, 20) if sum(cuts) < 100 and name != "native" else (None,):
                    root = RANKS - 1 if kind in ROOTED else 0
                    form = "split" if chunk is None else "call"
                    spec = Spec(kind, root=root, algorithm=Algorithm(name), chunk=chunk, form=form)
                    gap = 3 if kind in CUT or kind == "all_gather" else 0
                    size = (sum(cuts) + gap) * (RANKS if kind in CUT else 1)
                    yield Case(spec, size, cuts=cuts, gap=gap)
                    if chunk is not None:
                        yield Case(spec, size, "uint8", cuts=cuts, gap=gap)


def laid(cuts: tuple[int, ...], gap: int, rows: int) -> BufferLayout:
    """`rows` rows of arrays, each array's rows one after another, and a gap at the end of each row."""
    width = sum(cuts) + gap
    begins = np.cumsum([0, *cuts]).tolist()
    runs = [
        BufferRun(row * width + begins[i], i, row * size, size)
        for row in range(rows)
        for i, size in enumerate(cuts)
    ]
    return BufferLayout(rows * width, tuple(runs), tuple((1, rows * size) for size in cuts))


def apart(x: Any, case: Case, rows: int) -> list[Any]:
    """The arrays of a buffer of so many rows."""
    table = x.reshape(rows, -1)
    begins = np.cumsum([0, *case.cuts])
    return [table[:, at : at + size].reshape(1, -1) for at, size in zip(begins, case.cuts, strict=False)]


def joined(parts: Any, rows: int) -> Any:
    """The buffer again, without gaps."""
    return jnp.concatenate([part.reshape(rows, -1) for part in parts], axis=1).reshape(-1)


def without_gaps(x: Any, case: Case) -> Any:
    """A buffer of rows without the elements that belong to no array."""
    return x.reshape(-1, sum(case.cuts) + case.gap)[:, : sum(case.cuts)].reshape(-1)


def wrong(channel: Channel, cases: list[Case]) -> list[str]:
    """Run all of `cases` in one program, in order, and return the descriptions of wrong results."""
    operands = [jnp.asarray(operand(case, RANK)) for case in cases]

    def run(xs: list[Any], token: Any) -> tuple[list[Any], Any]:
        ys: list[Any] = []
        for case, x in zip(cases, xs, strict=True):
            if case.cuts:
                rows = (RANKS if case.spec.kind in CUT else 1, RANKS if case.spec.kind == "all_gather" else 1)
                operand_places, operands = (laid(case.cuts, case.gap, ways) for ways in rows)
                assert channel.can_start_packed(case.spec, operand_places.size)
                pending, token = channel.begin(
                    apart(x, case, rows[0]), case.spec, operand_places, operands, token
                )
                parts, token = channel.end(pending, token)
                y = joined(parts, rows[1])
            else:
                y, token = channel.run(x, case.spec, token)
            ys.append(y)
        return ys, token

    results, _ = jax.jit(run)(operands, channel.token())
    problems: list[str] = []
    for case, y in zip(cases, results, strict=True):
        group = channel.groups.along(case.spec.axes or tuple(channel.groups.sizes))
        place = group.index(RANK)
        xs = [operand(case, rank) for rank in group]
        promised = expected(case, xs, channel)
        if case.spec.kind in ("reduce", "gather") and place != case.spec.root:
            continue
        if promised is None:
            total = np.sum([x.astype(np.float64) for x in xs], axis=0)
            want = total.reshape(len(xs), -1)[place] if case.spec.kind == "reduce_scatter" else total
            want = without_gaps(want, case) if case.cuts else want
            right = np.allclose(np.asarray(y).astype(np.float64), want, rtol=0.02, atol=0.05)
        else:
            want = without_gaps(promised[place], case) if case.cuts else promised[place]
            right = y.shape == want.shape and np.asarray(y).tobytes() == want.tobytes()
        if not right:
            problems.append(f"rank {RANK}: {case}: {np.asarray(y)[:4]} is not {want[:4]}")
    return problems


def grid() -> tuple[Channel, list[Case]]:
    """Two axes, one after the other and both; hierarchies over them, and over the levels of one."""
    inner = 2 if RANKS % 2 == 0 else 1
    channel = Channel(comm, {"node": RANKS // inner, "gpu": inner})
    both = (Arg("ring", "gpu"), Arg("halving_doubling", "node"))
    cases: list[Case] = []
    for axes in (("gpu",), ("node",), ("node", "gpu"), ("gpu", "node")):
        ways = channel.groups.ways(axes)
        for kind in ("all_reduce", "reduce_scatter", "all_gather", "broadcast"):
            for algorithm in (NATIVE, Algorithm("ring" if kind != "broadcast" else "chain")):
                cases.append(Case(Spec(kind, axes, algorithm=algorithm), 6 * ways))  # pyright: ignore[reportArgumentType]
    for axes in (("node", "gpu"), ("gpu", "node")):
        for chunk in (None, 40):
            for levels in (both, (Arg("gpu"), Arg("node"))):
                algorithm = Algorithm("hierarchical", levels)
                cases.append(Case(Spec("all_reduce", axes, algorithm=algorithm, chunk=chunk), 301))
            algorithm = Algorithm("hierarchical", (Arg("bruck", "gpu"), Arg("pairwise", "node")))
            cases.append(Case(Spec("swap", axes, algorithm=algorithm, chunk=chunk), 60 * RANKS))
    return channel, cases


def uncountable(channel: Channel) -> list[str]:
    """Errors in blocks that exceed the 32-bit counts of MPI's collectives."""
    problems: list[str] = []
    for kind in ("reduce_scatter", "all_gather", "scatter", "gather"):
        spec = Spec(kind, axes=("ranks",), root=RANKS - 1 if kind in ROOTED else 0)
        large, small = (choose_program(spec, channel.groups, size * RANKS, 1) for size in (2**31, 2**31 - 1))
        if large is None or large.program.name != "ring" or small is not None:
            problems.append(f"{kind}: {large}, {small}")
    try:
        choose_program(Spec("all_to_all", axes=("ranks",)), channel.groups, 2**31 * RANKS, 1)
        problems.append("all_to_all")
    except CommplanError as error:
        problems += [] if error.diagnostics[0].code == "CP0831" else [str(error)]
    return problems


def cases_of(part: str) -> tuple[Channel, list[Case]]:
    if part == "grid":
        return grid()
    builders = {
        "call": lambda: by_algorithm((0, 1, 2, 37), (None, 20), "call"),
        "split": lambda: by_algorithm((1, 37), (None, 20), "split"),
        "rounds": lambda: by_algorithm((13,), (None,), "rounds"),
        "dtypes": lambda: itertools.chain(by_dtype("call"), by_dtype("split")),
        "dtypes-rounds": lambda: by_dtype("rounds"),
        "large": large,
        "together": together,
    }
    return Channel(comm), list(builders[part]())


def main() -> None:
    problems: list[str] = []
    many: dict[str, int] = {}
    channel = Channel(comm)
    problems += uncountable(channel)
    channel.close()
    for part in sys.argv[1:]:
        channel, cases = cases_of(part)
        many[part] = len(cases)
        problems += wrong(channel, cases)
        channel.close()
    every: list[list[str]] | None = comm.gather(problems)
    if RANK == 0:
        print(
            json.dumps({"cases": many, "wrong": [problem for each in every or [] for problem in each][:20]})
        )


main()
