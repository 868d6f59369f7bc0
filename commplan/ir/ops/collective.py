from collections.abc import Mapping
from typing import Literal

from commplan.diagnostics import Span
from commplan.ir.hints import Algorithm, Hints
from commplan.ir.ops.base import BaseOp, Ranks, Work
from commplan.ir.roles import Ref
from commplan.ir.symbolic import moves, steps
from commplan.ir.symbolic.interpretation import Held, Interpretation
from commplan.ir.types import DType
from commplan.ir.values import Value

CollectiveKind = Literal[
    "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce"
]  # fmt: skip
ReduceOp = Literal["sum", "max", "min"]
# How a backend carries out a chunk program: one operation of its own for each round (`lax.ppermute`,
# `mpi4jax.sendrecv`), the whole program in one call, or a call that starts it and one that finishes it.
Form = Literal["rounds", "call", "split"]


class Collective(BaseOp, frozen=True, tag="collective", gc=False):
    """One collective over `axes`, leaf by leaf.

    `algorithm`: `native`, a chunk program of `commplan.collectives`, or `hierarchical` with one per level:
    the keys of its levels are axes of `axes`, or, of one axis, the levels of the topology that it spans
    (`Axis.levels`). `hints.chunk` is the number of bytes of a message, where programs are cut into slices.
    all_reduce: same shape out. reduce_scatter: a flat [n*k] in, this rank's [k] out.
    all_gather: [k] in, [n*k] out in rank order. all_to_all: flat [n*k] in and out, row i to rank
    i. broadcast: from `root`, counted row-major over `axes`, first major. reduce: the result on `root`, and
    zeros elsewhere.
    """

    kind: CollectiveKind
    result: Ref
    operand: Ref
    axes: tuple[str, ...]
    dtype: DType  # of the widest leaf that moves
    nbytes: int  # of one rank's operand
    span: Span
    op: ReduceOp | None = None
    root: int | None = None
    algorithm: Algorithm = Algorithm("native")
    hints: Hints = Hints()
    after: tuple[Ref, ...] = ()
    lane: str = "network"
    form: Form | None = None  # None: the backend's usual one
    pinned: bool = False  # the plan says `via`: no pass takes another algorithm

    def meaning(self, env: Interpretation) -> None:
        operand, value = env.of(self.operand), env.values[self.result]
        if self.op is not None:
            again = self.kind == "all_reduce"
            operand = steps.reduced(env, operand, operand.value, self.axes, self.op, self.hints, again=again)
        elif self.kind != "all_to_all":
            operand = steps.moved(env, operand, self.hints)
        env.put(self.result, self._moved(env, operand, value))

    def _moved(self, env: Interpretation, held: Held, value: Value) -> Held:
        """What lies where, once sums are made."""
        algebra, flat = env.algebra, value.kind == "flat"
        match self.kind:
            case "reduce_scatter" if flat:
                return held.each(value, lambda block: moves.scattered(algebra, block, self.axes))
            case "reduce_scatter":
                return env.sliced(held, value, *env.row(self.axes))
            case "all_gather":
                return env.gathered(held, value, self.axes)
            case "all_to_all":
                return held.each(value, lambda block: moves.exchanged(algebra, block, self.axes))
            case "broadcast":
                return held.renamed(algebra, value, env.root(self.axes, self.root or 0))
            case "reduce":
                where = [(symbol, place[1]) for symbol, place in env.root(self.axes, self.root or 0).items()]
                return held.like(value, lambda term, _: algebra.only(term, where))
            case "all_reduce":
                return Held(value, held.uniform, () if held.uniform else held.blocks)

    @property
    def title(self) -> str:
        return self.kind

    def detail(self, values: Mapping[Ref, Value]) -> str:
        return f"{self.op + ' ' if self.op else ''}{self.dtype} over {', '.join(self.axes)}, {self.algorithm}"

    @property
    def is_split(self) -> bool:
        return self.form == "split"

    def staged(self, nbytes: Mapping[Ref, int]) -> int:
        """A chunk program receives beside its buffer: a round brings at most one message into each slot."""
        return 0 if self.algorithm.name == "native" else max(nbytes[self.operand], nbytes[self.result])

    def buffers(self, nbytes: Mapping[Ref, int]) -> int:
        return nbytes[self.operand] + nbytes[self.result] + self.staged(nbytes)

    def work(self, nbytes: Mapping[Ref, int], ranks: Ranks) -> Work:
        what, chunk = f"{self.kind} via {self.algorithm}", self.hints.chunk
        return Work(self.kind, what, self.nbytes, self.axes, self.algorithm, chunk, self.root or 0, self.form)
