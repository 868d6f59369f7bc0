"""The notation of `ir.serialization.text`: write frozen structs as lines, and read lines as plain values."""

from __future__ import annotations

import functools
import json
import re
import typing
from collections.abc import Iterator
from typing import Any, cast

import msgspec

from commplan.diagnostics import Span, with_article
from commplan.ir import plan as graph
from commplan.ir import schedule as sched
from commplan.ir.schedule import Leaf, Part
from commplan.ir.types import ArrayType, Placement

# A text that needs no quotes, such as the id of a value.
_WORD = r"[A-Za-z_][A-Za-z0-9_./~-]*"
# A token. The group that matches is its kind.
_TOKEN = re.compile(
    rf'(?P<space>[ \t]+|\# [^\n]*)|(?P<newline>\n)|(?P<string>"(?:[^"\\\n]|\\.)*")|(?P<span>@\d+:\d+-\d+:\d+)'
    rf"|(?P<part>\#\d+\[\d+:\d+\]->\d+)|(?P<number>-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)|(?P<word>{_WORD})"
    r"|(?P<mark>[][{}()<>=,:;])"
)
# A whole text that needs no quotes, unless it is reserved.
_PLAIN = re.compile(_WORD)
# Words that stand for other values. A text of this form is quoted.
_RESERVED = {"none": None, "true": True, "false": False}
# The text of the last token, as shown in messages.
_END = "the end"


class TextError(Exception):
    """A syntax error.

    Attributes:
        span: Its position in the text.
    """

    def __init__(self, message: str, span: Span) -> None:
        super().__init__(message)
        self.span = span


def head(value: msgspec.Struct | type[msgspec.Struct]) -> str:
    """The word for a struct: its tag, or the name of its class in lower case if it has no tag."""
    tag = value.__struct_config__.tag
    kind = value if isinstance(value, type) else type(value)
    return str(tag) if tag else kind.__name__.lower()


# The fields before `=`, by the word for the struct: the results of an op or stage, and the id of a value.
_LEFT_OF: dict[str, tuple[str, ...]] = {
    head(kind): kind.WRITES for kind in (*typing.get_args(graph.Stage), *typing.get_args(sched.Op))
} | {"value": ("id",)}

_fields = functools.cache(msgspec.structs.fields)


def _changed(value: msgspec.Struct) -> list[tuple[str, Any]]:
    """The fields of `value` that differ from their defaults, and always the schema version."""
    changed: list[tuple[str, Any]] = []
    for field in _fields(type(value)):
        item = getattr(value, field.name)
        if field.required or item != field.default or field.name == "schema":
            changed.append((field.name, item))
    return changed


def _is_block(item: Any) -> bool:
    """Whether `item` is a non-empty tuple of structs."""
    return isinstance(item, tuple) and isinstance((*cast("tuple[Any, ...]", item), None)[0], msgspec.Struct)


def write_struct(value: msgspec.Struct, depth: int) -> list[str]:
    """The lines of the fields of a struct, one field per line, indented by `depth` levels.

    A tuple of structs becomes a block in braces, with one struct per line.
    """
    pad = "  " * depth
    lines: list[str] = []
    for name, item in _changed(value):
        if isinstance(item, Span):
            lines.append(f"{pad}{write(item)}")
        elif isinstance(item, sched.Origin | graph.Plan):
            lines += [f"{pad}{name} is {{", *write_struct(item, depth + 1), f"{pad}}}"]
        elif _is_block(item):
            lines.append(f"{pad}{name} {{")
            for element in item:
                lines += _element(element, depth + 1)
            lines.append(f"{pad}}}")
        else:
            lines.append(f"{pad}{name} = {write(item)}")
    return lines


def _element(value: msgspec.Struct, depth: int) -> list[str]:
    """The lines of a struct in a block: a block for a phase, and one line for others."""
    pad = "  " * depth
    if isinstance(value, graph.Phase | sched.Phase):
        return [f"{pad}{head(value)} {{", *write_struct(value, depth + 1), f"{pad}}}"]
    fields_left = _LEFT_OF.get(head(value), ())
    names = [name for field in fields_left for name in _several(getattr(value, field))]
    words = [head(value)]
    words += [_field(name, item) for name, item in _changed(value) if name not in fields_left]
    text = f"{', '.join(map(write, names))} = " if names else ""
    return [f"{pad}{text}{' '.join(words)}"]


def _several(item: Any) -> tuple[str, ...]:
    """The names in a field with a tuple of names, one name, or None."""
    if item is None:
        return ()
    return cast("tuple[str, ...]", item) if isinstance(item, tuple) else (item,)


def _field(name: str, item: Any) -> str:
    return write(item) if isinstance(item, Span) else f"{name}={write(item)}"


def write(item: Any) -> str:
    """The notation of the content of a field."""
    match item:
        case None | bool():
            return str(item).lower()
        case str():
            plain = str(item)  # an enum member prints as its value
            usable = _PLAIN.fullmatch(plain) and plain not in _RESERVED
            return plain if usable else json.dumps(plain)
        case int() | float():
            return repr(item)
        case tuple():
            return f"[{', '.join(write(inner) for inner in cast('tuple[Any, ...]', item))}]"
        case Span():
            return f"@{item}"
        case ArrayType():
            return f"{item.dtype}[{', '.join(map(str, item.shape))}]"
        case Leaf():
            return f"{json.dumps(item.path)}: {item.dtype}[{', '.join(map(str, item.shape))}]"
        case Part():
            return f"{write(item.value)}#{item.leaf}[{item.start}:{item.size}]->{item.offset}"
        case Placement():
            return f"<{'; '.join(item.words(write))}>"
        case _:
            return f"{head(item)}({', '.join(_field(name, inner) for name, inner in _changed(item))})"


class Reader:
    """Reads the notation into dicts, lists, texts and numbers, which `msgspec.convert` makes structs of.

    A dict has the fields of a struct by name, and its word as `type`. All methods raise `TextError` for a
    syntax error.

    Attributes:
        tokens: The kind, the text, the line and the column of each token; lines and columns count from 1.
        position: The index of the next token.
    """

    def __init__(self, text: str) -> None:
        self.tokens: list[tuple[str, str, int, int]] = []
        self.position = 0
        line, line_start, offset = 1, 0, 0
        while offset < len(text):
            match = _TOKEN.match(text, offset)
            if match is None:
                raise TextError(f"`{text[offset]}` is not allowed here", _here(line, offset - line_start + 1))
            kind = str(match.lastgroup)
            if kind != "space":
                self.tokens.append((kind, match[0], line, offset - line_start + 1))
            offset = match.end()
            if kind == "newline":
                line, line_start = line + 1, offset
        self.tokens.append(("end", _END, line, offset - line_start + 1))

    def plain(self) -> dict[str, Any]:
        """The fields in the remaining text."""
        return self._block(_END)

    def word(self, expected: str) -> None:
        """Consume the word `expected`, and blank lines before it."""
        self._skip_lines()
        self._take("word", expected)

    def _block(self, closing: str) -> dict[str, Any]:
        """The fields of a struct, one per line, up to `closing`, which is consumed."""
        fields: dict[str, Any] = {}
        while True:
            self._skip_lines()
            if self.tokens[self.position][1] == closing:
                self.position += 1
                return fields
            self._one_field(fields, blocks=True)

    def _elements(self) -> list[Any]:
        """The structs of a block, up to its closing brace, which is consumed."""
        elements: list[Any] = []
        self._skip_lines()
        while not self._accepts("}"):
            elements.append(self._element())
            self._skip_lines()
        return elements

    def _element(self) -> dict[str, Any]:
        """A struct in a block."""
        names = self._left()
        name = self._take("word")
        if self._accepts("{"):
            return self._block("}")
        fields: dict[str, Any] = {"type": name}
        self._assign_left(fields, name, names)
        while self.tokens[self.position][0] not in ("newline", "end") and not self._is("}"):
            self._one_field(fields)
        return fields

    def _left(self) -> list[str]:
        """The names of `a, b =` at the start of a line; if there are none, nothing is consumed."""
        start = self.position
        names: list[str] = []
        while self.tokens[self.position][0] in ("word", "string"):
            names.append(cast("str", self._value()))
            if self._accepts("="):
                return names
            if not self._accepts(","):
                break
        self.position = start
        return []

    def _assign_left(self, fields: dict[str, Any], name: str, names: list[str]) -> None:
        """Add the fields for the `names` before `=` of a struct with the word `name`."""
        fields_left = _LEFT_OF.get(name, ())
        if names and not fields_left:
            raise self._wrong(f"there is no op `{name}`")
        if fields_left == ("results",):  # any number of them
            fields["results"] = names
            return
        if len(names) > len(fields_left):
            raise self._wrong(f"`{name}` makes {len(fields_left)} values, not {len(names)}")
        fields.update(zip(fields_left, names, strict=False))

    def _one_field(self, fields: dict[str, Any], *, blocks: bool = False) -> None:
        """Read a field into `fields`. With `blocks`, it may be a block or a nested struct."""
        if self.tokens[self.position][0] == "span":
            fields["span"] = self._value()
            return
        name = self._take("word")
        if blocks and self._accepts("{"):
            fields[name] = self._elements()
        elif blocks and self.tokens[self.position][:2] == ("word", "is"):
            self.position += 1
            self._take("mark", "{")
            fields[name] = self._block("}")
        else:
            self._take("mark", "=")
            fields[name] = self._value()

    def _value(self) -> Any:
        """The content of a field."""
        kind, text, _, _ = self.tokens[self.position]
        self.position += 1
        match kind:
            case "span":
                numbers = [int(number) for number in re.findall(r"\d+", text)]
                return dict(zip(("line", "column", "end_line", "end_column"), numbers, strict=True))
            case "number":
                return int(text) if re.fullmatch(r"-?\d+", text) else float(text)
            case "string":
                return self._after_name(json.loads(text, strict=False))
            case "word":
                return self._after_word(text)
            case "mark" if text == "[":
                return self._list()
            case "mark" if text == "<":
                return self._placement()
            case _:
                self.position -= 1
                raise self._wrong("expected a value")

    def _after_word(self, text: str) -> Any:
        """The value that begins with the word `text`: a struct, an array type, a constant, or a name."""
        if self._accepts("("):
            return self._call(text)
        if self._accepts("["):
            return {"type": "array", "dtype": text, "shape": self._list()}
        if text in _RESERVED:
            return _RESERVED[text]
        return self._after_name(text)

    def _after_name(self, text: str) -> Any:
        """The value that begins with the name `text`: a part, a leaf, or the name alone."""
        kind, following, _, _ = self.tokens[self.position]
        if kind == "part":
            self.position += 1
            leaf, start, size, offset = (int(number) for number in re.findall(r"\d+", following))
            return {"value": text, "leaf": leaf, "start": start, "size": size, "offset": offset}
        if following == ":" and kind == "mark":
            self.position += 1
            array = self._value()
            if not isinstance(array, dict):
                raise self._wrong("expected the type of a leaf")
            return {"path": text, **cast("dict[str, Any]", array)}
        return text

    def _call(self, name: str) -> dict[str, Any]:
        """A struct `name(field=value, ..)`, after its opening parenthesis."""
        fields: dict[str, Any] = {"type": name}
        for _ in self._until(")"):
            self._one_field(fields)
        return fields

    def _list(self) -> list[Any]:
        return [self._value() for _ in self._until("]")]

    def _placement(self) -> dict[str, Any]:
        """A placement, after its opening bracket."""
        fields: dict[str, Any] = {}
        for _ in self._until(">", ";"):
            word = self._take("word")
            names = [self._value()]
            while self._accepts(","):
                names.append(self._value())
            fields["server" if word == "on" else word] = names[0] if word == "on" else names
        return fields

    def _until(self, closing: str, between: str = ",") -> Iterator[None]:
        """Iterate over items separated by `between` until `closing`, which is consumed."""
        while not self._accepts(closing):
            yield
            if not self._is(closing):
                self._take("mark", between)

    def _accepts(self, mark: str) -> bool:
        """Consume `mark` if it is next, and return whether it was."""
        accepted = self._is(mark)
        self.position += accepted
        return accepted

    def _is(self, mark: str) -> bool:
        return self.tokens[self.position][:2] == ("mark", mark)

    def _skip_lines(self) -> None:
        while self.tokens[self.position][0] == "newline":
            self.position += 1

    def _take(self, kind: str, text: str | None = None) -> str:
        """Consume a token of `kind`, with the text `text` unless that is None, and return its text."""
        actual, word, _, _ = self.tokens[self.position]
        if actual != kind or (text is not None and word != text):
            raise self._wrong(f"expected {f'`{text}`' if text else with_article(kind)}")
        self.position += 1
        return word

    def _wrong(self, message: str) -> TextError:
        """The error at the next token."""
        _, text, line, column = self.tokens[self.position]
        shown = "the end of the line" if text == "\n" else f"`{text}`"
        return TextError(f"{message}, found {shown}", _here(line, column))


def _here(line: int, column: int) -> Span:
    """The span of one character."""
    return Span(line, column, line, column + 1)
