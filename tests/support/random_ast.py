"""Random syntax trees, and a printer with random space: the parser must return the same tree.

Nothing here uses the parser or the formatter. `bare` is a tree without its spans.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec

from commplan.diagnostics import Span
from commplan.dsl import ast

NOWHERE = Span(1, 1, 1, 1)
NAMES = [
    "x", "y2", "grads", "_", "member", "data", "batch", "start", "step", "steps", "same", "host", "mean",
    "in", "hidden",
]  # fmt: skip
MAY_CONTINUE = (
    "over", "across", "from", "by", "via", "per", "split", "partial", "with", "into", "visit", "seed", "tail",
    "on", "{",
)  # fmt: skip
KINDS = ("broadcast", "share", "reduce", "scatter", "slice", "gather", "shift", "swap")


def bare(node: Any) -> Any:
    """`node` as nested plain data; spans and the text itself left out."""
    if isinstance(node, ast.Number):
        return ("Number", node.text, node.value, node.unit)
    if isinstance(node, msgspec.Struct):
        skipped = {"span", "header", "text"} if not isinstance(node, ast.Name) else {"span"}
        fields = {f: bare(getattr(node, f)) for f in node.__struct_fields__ if f not in skipped}
        return (type(node).__name__, fields)
    if isinstance(node, tuple):
        return [bare(item) for item in node]
    return node


class Trees:
    """Random trees, all of them well formed, few of them with a meaning."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def name(self) -> ast.Name:
        return ast.Name(span=NOWHERE, text=self.rng.choice(NAMES))

    def names(self, most: int = 3) -> tuple[ast.Name, ...]:
        return tuple(self.name() for _ in range(self.rng.randint(1, most)))

    def whole(self) -> ast.Number:
        text = self.rng.choice(["0", "8", "64", "1_000", "32", "007", "-3"])
        return ast.Number(span=NOWHERE, text=text, value=int(text.replace("_", "")))

    def number(self) -> ast.Number:
        match self.rng.randrange(3):
            case 0:
                return self.whole()
            case 1:
                text = self.rng.choice(["0.1", "1e-3", "2.50", "1_0.5E+2"])
                return ast.Number(span=NOWHERE, text=text, value=float(text.replace("_", "")))
            case _:
                unit = self.rng.choice(["KiB", "MiB", "GiB", "Mbit/s", "Gbit/s", "GB/s", "us", "ms", "s"])
                whole = self.whole()
                return ast.Number(span=NOWHERE, text=whole.text, value=whole.value, unit=unit)

    def maybe(self, make: Any) -> Any:
        return make() if self.rng.random() < 0.5 else None

    def type(self) -> ast.TypeExpr:
        dims = self.maybe(lambda: tuple(self.whole() for _ in range(self.rng.randint(0, 3))))
        return ast.TypeExpr(span=NOWHERE, name=self.name(), dims=dims)

    def types(self, least: int) -> tuple[ast.TypeExpr, ...]:
        return tuple(self.type() for _ in range(self.rng.randint(least, 3)))

    def placement(self) -> tuple[ast.PlacementItem, ...]:
        kinds = self.rng.sample(["same", "per", "partial", "split"], self.rng.randint(0, 3))
        return tuple(ast.PlacementItem(span=NOWHERE, kind=kind, axes=self.axes(kind)) for kind in kinds)

    def axes(self, kind: str) -> tuple[ast.Name, ...]:
        """Axes of a placement; behind `same` they are optional, and cannot begin with a `same`."""
        if kind == "same" and self.rng.random() < 0.5:
            return ()
        names = self.names()
        return () if kind == "same" and names[0].text == "same" else names

    def value(self) -> ast.Name | ast.Number:
        return self.name() if self.rng.random() < 0.5 else self.number()

    def call(self) -> ast.CallExpr:
        args = self.maybe(
            lambda: tuple(
                ast.CallArg(span=NOWHERE, value=self.value(), key=self.maybe(self.name))
                for _ in range(self.rng.randint(0, 3))
            )
        )
        return ast.CallExpr(span=NOWHERE, name=self.name(), args=args)

    def options(self) -> ast.Options:
        items = tuple(
            ast.Option(span=NOWHERE, key=self.name(), value=self.value())
            for _ in range(self.rng.randint(0, 3))
        )
        return ast.Options(span=NOWHERE, items=items)

    def declaration(self) -> Any:
        match self.rng.randrange(6):
            case 0:
                kind = self.rng.choice(["axis", "ensemble", "server"])
                return ast.AxisDecl(span=NOWHERE, kind=kind, name=self.name(), size=self.maybe(self.whole))
            case 1:
                return ast.SourceDecl(span=NOWHERE, name=self.name(), type=self.type())
            case 2:
                where = self.maybe(self.name)
                flags = tuple(self.name() for _ in range(self.rng.randint(0, 2))) if where else ()
                return ast.FnDecl(
                    span=NOWHERE, name=self.name(), operands=self.types(0), results=self.types(1),
                    where=where, flags=flags,
                )  # fmt: skip
            case 3:
                return ast.InputDecl(
                    span=NOWHERE, name=self.name(), type=self.type(), placement=self.placement()
                )
            case 4:
                path = self.rng.choice(["cluster.toml", "../a b/c#d.toml", "x = {y}", ""])
                return ast.TopologyDecl(span=NOWHERE, path=path)
            case _:
                return ast.StateDecl(
                    span=NOWHERE, name=self.name(), type=self.type(), placement=self.placement(),
                    server=self.maybe(self.name),
                )  # fmt: skip

    def expression(self) -> Any:
        match self.rng.randrange(5):
            case 0:
                sizes = tuple(self.whole() for _ in range(self.rng.randint(1, 3)))
                batch = ast.BatchClause(span=NOWHERE, sizes=sizes, over=self.maybe(self.name))
                return ast.LoadExpr(
                    span=NOWHERE, source=self.name(), batch=batch,
                    split=self.maybe(self.names) or (), per=self.maybe(self.names) or (),
                    visit=self.maybe(self.name), seed=self.maybe(self.whole), tail=self.maybe(self.name),
                    options=self.maybe(self.options),
                )  # fmt: skip
            case 1:
                return ast.MapExpr(
                    span=NOWHERE, fn=self.name(), operands=self.maybe(self.names) or (),
                    per=self.maybe(self.names) or (), options=self.maybe(self.options),
                )  # fmt: skip
            case 2:
                return ast.ExchangeExpr(
                    span=NOWHERE, gradient=self.name(), states=self.names(), fn=self.name(),
                    over=self.names(),
                    by=self.maybe(self.call), via=self.maybe(self.call), options=self.maybe(self.options),
                )  # fmt: skip
            case 3:
                return ast.ElasticExpr(
                    span=NOWHERE, operand=self.name(), center=self.name(), over=self.names(),
                    by=self.maybe(self.call), via=self.maybe(self.call), options=self.maybe(self.options),
                )  # fmt: skip
            case _:
                word = ast.Name(span=NOWHERE, text=self.rng.choice(["over", "across"]))
                return ast.StageExpr(
                    span=NOWHERE, kind=self.rng.choice(KINDS), operand=self.name(), over_word=word,
                    over=self.names(), root=self.maybe(self.whole),
                    by=self.maybe(self.call) or self.maybe(self.whole),
                    via=self.maybe(self.call), options=self.maybe(self.options),
                )  # fmt: skip

    def statement(self) -> Any:
        if self.rng.random() < 0.2:
            return ast.OutputStmt(span=NOWHERE, names=self.names())
        return ast.StageStmt(span=NOWHERE, targets=self.names(), expr=self.expression())

    def phase(self) -> ast.PhaseDecl:
        kind = self.rng.choice(["start", "step", "every", "named"])
        return ast.PhaseDecl(
            span=NOWHERE, kind=kind, header=NOWHERE,
            body=tuple(self.statement() for _ in range(self.rng.randint(0, 4))),
            period=self.whole() if kind == "every" else None,
            fragments=self.maybe(self.whole) if kind == "every" else None,
            hidden=self.maybe(self.whole) if kind == "every" else None,
            name=self.name() if kind == "named" else None,
        )  # fmt: skip

    def file(self, name: str) -> ast.File:
        items = [self.phase() if self.rng.random() < 0.4 else self.declaration()
                 for _ in range(self.rng.randint(0, 8))]  # fmt: skip
        return ast.File(span=NOWHERE, file=name, text="", name=self.name(), items=tuple(items))


class Printer:
    """Trees to text with random space, newlines and comments wherever the language allows them."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.text = ""
        self.comments: list[str] = []

    def file(self, tree: ast.File) -> str:
        assert tree.name
        self._statement(["plan", tree.name.text])
        for item in tree.items:
            if isinstance(item, ast.PhaseDecl):
                self._phase(item)
            else:
                self._statement(_declaration(item))
        return self.text

    def _phase(self, phase: ast.PhaseDecl) -> None:
        header = {"start": ["at", "start"], "step": ["each", "step"]}.get(phase.kind)
        if phase.period:
            header = ["every", phase.period.text, "steps"]
        if phase.fragments:
            header = [*header, "in", phase.fragments.text, "fragments"]
        if phase.hidden:
            header = [*header, "hidden", "under", phase.hidden.text, "steps"]
        if phase.name:
            header = ["phase", phase.name.text]
        assert header
        self._words([*header, "{"])
        self._ending()
        for statement in phase.body:
            self._statement(_statement(statement))
        self._words(["}"])
        self._ending()

    def _statement(self, words: Sequence[str]) -> None:
        self._words(words)
        self._ending()

    def _words(self, words: Sequence[str]) -> None:
        depth = 0
        for index, word in enumerate(words):
            if index:
                free = depth > 0 or (word in MAY_CONTINUE)
                self.text += self._gap(words[index - 1], word, free)
            self.text += word
            depth += (word in "([{") - (word in ")]}")

    def _gap(self, before: str, word: str, free: bool) -> str:
        if free and self.rng.random() < 0.15:
            return f"{self._comment()}\n{self._blank()}"
        needed = before[-1].isalnum() or before[-1] == "_"
        if needed and (word[0].isalnum() or word[0] == "_"):
            return self._blank() or " "
        return self._blank()

    def _blank(self) -> str:
        return self.rng.choice(["", " ", " ", "  ", "\t"])

    def _comment(self) -> str:
        if self.rng.random() < 0.5:
            return self._blank()
        text = self.rng.choice(["# why", "#", "#x = map f(y) {", "# ((é"])
        self.comments.append(text)
        return f"{self._blank()}{text}"

    def _ending(self) -> None:
        newline = self.rng.choice(["\n", "\n", "\n\n\n"])
        self.text += f"{self._comment()}{newline}{self._blank()}"
        if self.rng.random() < 0.1:
            self.comments.append("# alone")
            self.text += f"# alone\n{self._blank()}"


def _listed(groups: Sequence[Sequence[str]]) -> list[str]:
    words: list[str] = []
    for index, group in enumerate(groups):
        words += [",", *group] if index else group
    return words


def _names(names: Sequence[ast.Name]) -> list[str]:
    return _listed([[name.text] for name in names])


def _number(number: ast.Number) -> str:
    return f"{number.text} {number.unit}" if number.unit else number.text


def _value(value: ast.Name | ast.Number) -> str:
    return value.text if isinstance(value, ast.Name) else _number(value)


def _type(node: ast.TypeExpr) -> list[str]:
    if node.dims is None:
        return [node.name.text]
    return [node.name.text, "[", *_listed([[dim.text] for dim in node.dims]), "]"]


def _placement(items: Sequence[ast.PlacementItem]) -> list[str]:
    return [word for item in items for word in (item.kind, *_names(item.axes))]


def _declaration(node: Any) -> list[str]:
    match node:
        case ast.AxisDecl():
            return [node.kind, node.name.text, "=", node.size.text if node.size else "?"]
        case ast.TopologyDecl():
            return ["topology", f'"{node.path}"']
        case ast.SourceDecl():
            return ["source", node.name.text, ":", *_type(node.type)]
        case ast.FnDecl():
            where = ["on", node.where.text, *(flag.text for flag in node.flags)] if node.where else []
            operands = _listed([_type(operand) for operand in node.operands])
            return [
                "fn",
                node.name.text,
                "(",
                *operands,
                ")",
                "->",
                *_listed([_type(t) for t in node.results]),
                *where,
            ]
        case ast.InputDecl():
            return ["input", node.name.text, ":", *_type(node.type), *_placement(node.placement)]
        case _:
            server = ["on", node.server.text] if node.server else []
            return ["state", node.name.text, ":", *_type(node.type), *_placement(node.placement), *server]


def _call(word: str, call: ast.CallExpr | ast.Number | None) -> list[str]:
    if call is None:
        return []
    if isinstance(call, ast.Number):
        return [word, call.text]
    if call.args is None:
        return [word, call.name.text]
    args = [[*([arg.key.text, "="] if arg.key else []), _value(arg.value)] for arg in call.args]
    return [word, call.name.text, "(", *_listed(args), ")"]


def _options(options: ast.Options | None) -> list[str]:
    if options is None:
        return []
    return ["{", *_listed([[item.key.text, "=", _value(item.value)] for item in options.items]), "}"]


def _how(node: Any) -> list[str]:
    return [*_call("by", node.by), *_call("via", node.via), *_options(node.options)]


def _clause(word: str, names: Sequence[ast.Name]) -> list[str]:
    return [word, *_names(names)] if names else []


def _statement(node: Any) -> list[str]:
    if isinstance(node, ast.OutputStmt):
        return ["output", *_names(node.names)]
    return [*_names(node.targets), "=", *_expression(node.expr)]


def _expression(node: Any) -> list[str]:
    match node:
        case ast.LoadExpr():
            sizes = [size.text for size in node.batch.sizes]
            batch = sizes if len(sizes) == 1 else ["[", *_listed([[size] for size in sizes]), "]"]
            over = ["over", node.batch.over.text] if node.batch.over else []
            return [
                "load", node.source.text, "batch", *batch, *over, *_clause("split", node.split),
                *_clause("per", node.per), *(["visit", node.visit.text] if node.visit else []),
                *(["seed", node.seed.text] if node.seed else []),
                *(["tail", node.tail.text] if node.tail else []), *_options(node.options),
            ]  # fmt: skip
        case ast.MapExpr():
            operands = _names(node.operands)
            return [
                "map",
                node.fn.text,
                "(",
                *operands,
                ")",
                *_clause("per", node.per),
                *_options(node.options),
            ]
        case ast.ExchangeExpr():
            return [
                "exchange", node.gradient.text, "into", *_names(node.states), "with", node.fn.text,
                "over", *_names(node.over), *_how(node),
            ]  # fmt: skip
        case ast.ElasticExpr():
            return [
                "elastic", node.operand.text, "with", node.center.text, "over", *_names(node.over),
                *_how(node),
            ]  # fmt: skip
        case _:
            root = ["from", node.root.text] if node.root else []
            return [node.kind, node.operand.text, node.over_word.text, *_names(node.over), *root, *_how(node)]
