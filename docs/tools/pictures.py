"""Draw pictures for the pages as inline SVG, in the light and dark colors of `assets/site.css`.

A page requests a picture by a comment on a separate line, such as `<!-- picture: collective all_reduce ring 4
-->`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from html import escape

import commplan
from commplan.collectives import registry
from commplan.collectives.program import ChunkProgram, Kind
from commplan.explain.report import explain_plan
from commplan.ir.collective_kinds import REDUCING

WANTED = re.compile(r"^<!-- picture: ([\w ]+) -->$", re.M)
COLORS = 8  # that the style sheet knows
Held = dict[tuple[int, int], frozenset[int]]  # (rank, chunk) -> whose terms, or blocks, are in it


def drawn(markdown: str) -> str:
    """`markdown` with its pictures. Raises SystemExit for one that there is not."""
    return WANTED.sub(lambda match: _picture(*match[1].split()), markdown)


def _picture(name: str, *words: str) -> str:
    makers: dict[str, Callable[..., str]] = {
        "collective": collective,
        "placements": placements,
        "buckets": buckets,
    }
    if name not in makers:
        raise SystemExit(f"there is no picture {name}: {', '.join(makers)}")
    return makers[name](*words)


class Canvas:
    """Shapes, one after another. The picture is as wide and high as the space that they take."""

    def __init__(self) -> None:
        self.shapes: list[str] = []
        self.width = self.height = 0.0

    def box(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        self._reach(x + width, y + height)
        place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        self.shapes.append(f'<rect {place} rx="2" class="{kind}"/>')

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> None:
        width = {"start": 7.0, "middle": 3.5, "end": 0.0}[anchor]  # pixels of a letter right of x
        self._reach(x + width * len(words), y)
        self.shapes.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(words)}</text>'
        )

    def arrow(self, x: float, y: float, to_x: float, to_y: float, kind: str) -> None:
        middle = (y + to_y) / 2
        path = f"M{x:.1f} {y:.1f}C{x:.1f} {middle:.1f} {to_x:.1f} {middle:.1f} {to_x:.1f} {to_y - 4:.1f}"
        head = f"M{to_x - 3.5:.1f} {to_y - 6:.1f}h7l-3.5 6z"
        self.shapes.append(f'<path d="{path}" class="way {kind}"/><path d="{head}" class="head {kind}"/>')

    def _reach(self, x: float, y: float) -> None:
        self.width, self.height = max(self.width, x), max(self.height, y)

    def figure(self, title: str, caption: str) -> str:
        """The drawing as HTML. `title` is the text for screen readers."""
        size = f'viewBox="0 0 {self.width + 8:.0f} {self.height + 8:.0f}" width="{self.width + 8:.0f}"'
        label = f'role="img" aria-label="{escape(title)}"'
        shapes = "".join(self.shapes)
        wide = ' class="wide"' if self.width > PHONE_WIDTH else ""
        drawing = f"<svg{wide} {size} {label}>{shapes}</svg>"
        return f'<figure class="drawing">{drawing}<figcaption>{_caption(caption)}</figcaption></figure>'


def _caption(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


PHONE_WIDTH = 420.0  # what shrinks to a phone and stays readable
CELL, GAP, LEFT = 15.0, 34.0, 64.0


def collective(kind: Kind, name: str, ranks: str) -> str:
    """A chunk program: the chunks of each rank before each round, and the messages of the round."""
    program = registry.program(name, kind, int(ranks))
    canvas, held = Canvas(), _before(program)
    wide = max(program.chunks * CELL, 44.0)
    inset = (wide - program.chunks * CELL) / 2
    across, down = wide + GAP, CELL + 54
    for rank in range(program.ranks):
        canvas.text(LEFT + rank * across + wide / 2, 14, f"rank {rank}", "strong")
    for number in range(len(program.rounds) + 1):
        y = 26 + number * down
        canvas.text(LEFT - 12, y + 12, "before" if number == 0 else f"round {number}", "faint", "end")
        for rank in range(program.ranks):
            _slots(canvas, program, held, rank, LEFT + inset + rank * across, y)
        if number < len(program.rounds):
            sent = list(_transfers(program, number))
            for src, dst, chunks, reduce in sent:
                start, end = (
                    LEFT + inset + rank * across + (chunks[0] + chunks[-1] + 1) * CELL / 2
                    for rank in (src, dst)
                )
                color = f"color{chunks[0] % COLORS}"
                canvas.arrow(
                    start, y + CELL + 2, end, y + down - 2, f"{color} {'adds' if reduce else 'takes'}"
                )
            held = _after(held, sent)
    rounds = f"{len(program.rounds)} round{'' if len(program.rounds) == 1 else 's'}"
    return canvas.figure(
        f"{kind} by {name} over {ranks} ranks, round by round",
        f"{kind.replace('_', '-')} by {name} over {ranks} ranks: {rounds}. {_legend(kind)}",
    )


def _legend(kind: Kind) -> str:
    if kind in REDUCING:
        return "A slot fills as terms are added; solid arrows add, dotted ones take over what is complete."
    return (
        "swap: numbers say from whom to whom a block is."
        if kind == "swap"
        else "A slot is full once its block is there."
    )


def _before(program: ChunkProgram) -> Held:
    """The initial contents of slots."""
    n, chunks = program.ranks, program.chunks
    held = dict[tuple[int, int], frozenset[int]]()
    for rank in range(n):
        for chunk in range(chunks):
            own = (
                program.kind in REDUCING
                or program.kind == "swap"
                or (
                    rank == program.root
                    if program.kind in ("broadcast", "scatter")
                    else chunk * n // chunks == rank
                )
            )
            held[rank, chunk] = frozenset((rank,)) if own else frozenset()
    return held


def _transfers(program: ChunkProgram, number: int) -> Iterator[tuple[int, int, list[int], bool]]:
    """Of one round: from, to, a run of chunks, whether they are added."""
    for send in program.rounds[number]:
        for src, dst, first, count in zip(send.src, send.dst, send.chunk, send.count, strict=True):
            yield int(src), int(dst), list(range(int(first), int(first + count))), send.reduce


def _after(held: Held, sent: list[tuple[int, int, list[int], bool]]) -> Held:
    new = dict(held)
    for src, dst, chunks, reduce in sent:
        for chunk in chunks:
            new[dst, chunk] = held[src, chunk] | (held[dst, chunk] if reduce else frozenset())
    return new


def _slots(canvas: Canvas, program: ChunkProgram, held: Held, rank: int, x: float, y: float) -> None:
    for chunk in range(program.chunks):
        left = x + chunk * CELL
        terms = held[rank, chunk]
        full = len(terms) / (program.ranks if program.kind in REDUCING else 1)
        canvas.box(left, y, CELL - 2, CELL, "slot")
        if terms:
            height = CELL * min(1.0, full)
            canvas.box(left, y + CELL - height, CELL - 2, height, f"fill color{chunk % COLORS}")
        if program.kind == "swap":
            (source,) = terms
            target = (
                int(program.targets[source, chunk])
                if program.targets.size
                else (source + chunk) % program.ranks
            )
            canvas.text(left + CELL / 2 - 1, y + 11, f"{source}{target}", "tiny")


PLACEMENTS = (
    ("same", "the whole value, the same on all"),
    ("per data", "a value of its own on each"),
    ("partial data", "a term of a sum on each"),
    ("split data", "a cut of the leading dimension on each"),
)


def placements() -> str:
    """What four ranks hold of a value, by its placement."""
    canvas, cell, ranks = Canvas(), 15.0, 4
    for column in range(ranks):
        canvas.text(150 + column * 92 + 30, 14, f"rank {column}", "strong")
    for row, (name, words) in enumerate(PLACEMENTS):
        y = 28 + row * 92
        canvas.text(8, y + 26, name, "code strong", "start")
        for rank in range(ranks):
            x = 150 + rank * 92
            for line in range(4):
                shown = name != "split data" or line == rank
                kind = {
                    "same": "color0",
                    "per data": f"color{rank}",
                    "partial data": "color0",
                    "split data": "color0",
                }[name]
                canvas.box(x, y + line * cell, 60, cell - 2, "slot")
                if shown:
                    part = 60 / ranks if name == "partial data" else 60
                    canvas.box(
                        x + (rank * part if name == "partial data" else 0),
                        y + line * cell,
                        part,
                        cell - 2,
                        f"fill {kind}",
                    )
        canvas.text(150, y + 4 * cell + 14, words, "faint", "start")
    title = "The four placements of a value over an axis of four ranks"
    return canvas.figure(title, "Four rows are the leading dimension; a filled cell is what a rank has.")


def buckets(bound: str = "8") -> str:
    """Leaves of a tree in the order in which the backward pass makes them, and the buckets of a plan."""
    nbytes = {f"layer {n}": 1 << (20 + n % 3) for n in range(7, -1, -1)}
    shapes = {"grads": {name: {"shape": [size // 4], "dtype": "f32"} for name, size in nbytes.items()}}
    text = (
        "plan p\naxis data = 8\ninput grads : tree partial data\neach step {\n"
        f"grads = reduce grads over data by mean {{ bucket = {bound} MiB, overlap = backward }}\n"
        "output grads\n}\n"
    )
    plan = commplan.loads(text)
    schedule = plan.compile(shapes=shapes, order={"grads": list(nbytes)}).schedule
    explanation = explain_plan(plan.graph, schedule)
    packed = [
        bucket.leaves for phase in explanation.phases for line in phase.lines for bucket in line.buckets
    ]
    return _packed(nbytes, packed, bound)


def _packed(nbytes: dict[str, int], packed: list[tuple[str, ...]], bound: str) -> str:
    canvas, scale = Canvas(), 40.0 / (1 << 20)
    x, places = 8.0, dict[str, float]()
    canvas.text(8, 14, "gradients, in the order in which the backward pass makes them", "faint", "start")
    for number, (name, size) in enumerate(nbytes.items()):
        places[name] = x
        canvas.box(x, 22, size * scale - 3, 24, f"fill color{number % COLORS}")
        canvas.text(x + size * scale / 2, 38, name.split()[-1], "tiny")
        x += size * scale
    for number, leaves in enumerate(packed):
        inside = [name for name in nbytes if any(name in leaf for leaf in leaves)]
        left = min(places[name] for name in inside)
        width = sum(nbytes[name] for name in inside) * scale
        canvas.box(left, 84, width - 3, 26, "slot")
        canvas.text(left + width / 2, 101, f"bucket {number}: {width / scale / (1 << 20):.0f} MiB", "strong")
        canvas.arrow(left + width / 2, 48, left + width / 2, 82, "color0 adds")
        canvas.arrow(left + width / 2, 112, left + width / 2, 136, "color0 adds")
    canvas.text(
        8,
        152,
        "one all-reduce each, begun as soon as its bucket is full, under the rest of the backward pass",
        "faint",
        "start",
    )
    return canvas.figure(
        "Leaves packed into buckets", f"What `bucket = {bound} MiB` makes of eight layers of 1, 2 and 4 MiB."
    )
