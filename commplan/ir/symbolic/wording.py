"""Terms, blocks and symbols as English text, for counter-examples of the verifier."""

from __future__ import annotations

from fractions import Fraction

from commplan.ir.refs import name_of
from commplan.ir.symbolic.blocks import Block, LeafShape
from commplan.ir.symbolic.rounding import Trace
from commplan.ir.symbolic.symbols import Chain, Symbol
from commplan.ir.symbolic.terms import Atom, Contribution, Term
from commplan.ir.symbolic.values import ElementRun, whole_runs

# The maximum number of contributions of a term, and of arguments of a call, to show.
MOST = 4
# The maximum depth of nested calls whose arguments are shown.
_MOST_NESTED = 2


def element_in_words(run: ElementRun | None, other: ElementRun | None) -> str:
    """The first element of a run.

    Args:
        run: The run; None for columns without one, which are zero.
        other: The run that it is compared with, or None. The source of the element is shown unless that
            begins at the same one.
    """
    if run is None or not run.term.parts:
        return "zero"
    if other is not None and run.same_source(other):
        return term_in_words(run.term)
    return f"{term_in_words(run.term)}, at {_source(run.leaf, run.column, run.chain)}"


def _source(leaf: object, column: int, chain: Chain) -> str:
    """The place of an element, before moves; the arguments are those of `ElementRun`."""
    container = f"leaf {leaf.number}" if isinstance(leaf, LeafShape) else "a buffer"
    return f"element {column}{_chain(chain)} of {container}"


def block_in_words(block: Block) -> str:
    """The first element of a block. Rows that belong to no leaf are shown as `rows of several ranks`."""
    terms = [value for _, value in block.slots if value is not None]
    if not block.rows and len(terms) == len(block.slots):
        return element_in_words(whole_runs(block)[0] if block.runs else None, None)
    for atom in (part.atom for value in terms for part in value.parts):
        if atom.kind == "undefined":
            return _atom(atom, 0)
    if not block.runs or not terms:
        return "rows of several ranks"
    first = block.runs[0]
    source = _source(first.leaf, first.column, block.slots[first.slot][0])
    return f"rows of several ranks, the first at {source}: {term_in_words(terms[0])}"


def term_in_words(term: Term, depth: int = 0) -> str:
    """The sum of the contributions, at most `MOST` of them. `depth` counts the enclosing atoms."""
    if not term.parts:
        return "zero"
    contributions = [_contribution(part, depth) for part in term.parts[:MOST]]
    if len(term.parts) > MOST:
        contributions.append("..")
    return " + ".join(contributions)


def _contribution(part: Contribution, depth: int) -> str:
    text = _atom(part.atom, depth)
    if part.sums:
        text = f"the sum over {', '.join(part.sums)} of {text}"
    if part.coefficient != 1:
        text = f"{_number(part.coefficient)} x {text}"
    return text + _trace(part.trace)


def _number(number: Fraction) -> str:
    """A fraction, as a decimal if its denominator has more than six digits."""
    return str(number) if number.denominator < 10**6 else f"{float(number):.6g}"


def _trace(trace: Trace) -> str:
    """The conversions, scalings and sums that a contribution went through, in parentheses."""
    words: list[str] = []
    for event in trace:
        match event[0]:
            case "cast":
                words.append(f"as {event[2]}")
            case "scale":
                words.append(f"times {_number(event[1])}")
            case "sum":
                words.append(f"added over {', '.join(event[1])}")
            case _:
                over = f"added over {', '.join(event[1])} in {event[3]}, " if event[1] else ""
                words.append(f"{over}sent in {event[2]} at most")
    return f" ({'; '.join(words)})" if words else ""


def _atom(atom: Atom, depth: int) -> str:
    content = atom.content
    match atom.kind:
        case "value":
            coordinates = [coordinate_in_words(axis, symbol) for axis, symbol in content[1]]
            ranks = ", ".join(filter(None, coordinates))
            return f"`{name_of(content[0]) or content[0]}`" + (f" of {ranks}" if ranks else "")
        case "call":
            name, arguments = content
            if depth > _MOST_NESTED:
                return f"{name}(..)"
            shown = [
                term_in_words(argument.term, depth + 1) + _chain(argument.chain)
                for argument in arguments[:MOST]
            ]
            unique = list(dict.fromkeys(shown))
            if len(arguments) > MOST:
                unique.append("..")
            return f"{name}({', '.join(unique)})"
        case "extreme":
            return f"the {content[0]} over {', '.join(content[1])} of {term_in_words(content[2], depth + 1)}"
        case "only":
            ranks = ", ".join(f"{symbol[1]} {coordinate}" for symbol, coordinate in content[0])
            return f"[on rank {ranks} alone: {term_in_words(content[1], depth + 1)}]"
        case _:
            return f"undefined: {content[0]}"


def _chain(chain: Chain) -> str:
    """The rows of the cuts of `chain`, outermost first."""
    text = ""
    for cut in chain:
        row = " and ".join(row_in_words(symbol) for _, symbol in cut.digits)
        text += f" of row {row} of {cut.ways}"
    return text


def coordinate_in_words(axis: str, symbol: Symbol) -> str:
    """The rank along `axis` with the coordinate `symbol`; empty for this rank's own.

    For `shared`, it is the shares of the plan; empty if there are none.
    """
    match symbol[0]:
        case "rank" | "all":
            return "" if symbol[1] == axis else f"the rank along {axis} that this rank is along {symbol[1]}"
        case "at":
            return f"rank {symbol[1]} along {axis}"
        case "owner":
            return "its owner"
        case "shared":
            return f"a batch {' and '.join(symbol[1])}" if symbol[1] else ""
        case "before":
            last = coordinate_in_words(axis, symbol[1]) or "this one"
            return f"the rank {symbol[2]} before {last} along {axis}"
        case _:
            return f"each rank along {axis}"


def row_in_words(symbol: Symbol) -> str:
    """The row with index `symbol`."""
    match symbol[0]:
        case "rank":
            return f"this rank's along {symbol[1]}"
        case "all":
            return f"every rank's along {symbol[1]}"
        case "at":
            return str(symbol[1])
        case "owner":
            return "this owner's"
        case "before":
            return f"{row_in_words(symbol[1])} - {symbol[2]}"
        case _:
            return "each"
