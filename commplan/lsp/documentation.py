"""What each word of the language means, in a sentence or two: for hovers and completion."""

from __future__ import annotations

from collections.abc import Mapping

from commplan.dsl.check.options import OPTIONS
from commplan.ir.stages import VERBS

STAGES: Mapping[str, str] = {
    "load": (
        "Batches of records. `n` counts the valid ones. `visit` says how often an epoch sees each record."
    ),
    "map": "A function on values, or on loaded records one by one. The result lies as its operands do.",
    "broadcast": (
        "The value of one rank on all: per to same. ROOT counts through the axes, the last one fastest."
    ),
    "share": "Pins how a loaded value is made the same for all members of an ensemble.",
    "reduce": "Combines what ranks hold: partial or per to same.",
    "scatter": "Adds the terms of a sum and leaves each rank its cut: partial to split.",
    "slice": "Each rank keeps its cut of what all have: same to split, and nothing is sent.",
    "gather": "Puts the cuts together on every rank: split to same.",
    "shift": "What a rank has goes to the rank K further, around the end: per to per.",
    "swap": "Block j of the leading dimension goes to rank j: per to per (an all-to-all).",
    "exchange": (
        "Gradients go to whoever keeps the states, FN updates them there, and all get the new ones."
    ),
    "elastic": "Elastic averaging: `d` is what the local update subtracts, `c` the new centre.",
}
WORDS: Mapping[str, str] = {
    "plan": "`plan NAME` begins a file.",
    "axis": "`axis NAME = N`: replicas; `?` for a size that is bound when the plan is compiled.",
    "ensemble": "`ensemble NAME = N`: members, which are independent networks.",
    "server": "`server NAME = N`: processes of their own, which keep states.",
    "source": "`source NAME : TYPE`: records that are loaded.",
    "fn": (
        "`fn NAME(TYPES) -> TYPES on host|device [elementwise] [linear] [random]`: a function "
        "that the program binds."
    ),
    "input": "`input NAME : TYPE PLACEMENTS`: what a phase is called with.",
    "state": "`state NAME : TYPE PLACEMENTS [on SERVER]`: what is carried from call to call.",
    "at": "`at start { }`: what runs once, and sets the states.",
    "start": "`at start { }`: what runs once, and sets the states.",
    "each": "`each step { }`: what every training step does.",
    "step": "`each step { }`: what every training step does.",
    "every": "`every N steps { }`: what every N-th step does besides.",
    "steps": "`every N steps { }`: what every N-th step does besides.",
    "phase": "`phase NAME { }`: what the program calls when it likes.",
    "output": "`output NAMES`: values that the program gets.",
    "over": "The axes along which a stage communicates.",
    "across": "Reduces over an ensemble: its members are networks of their own, so this has to be meant.",
    "from": "The rank whose value is kept; it counts through the axes, the last one fastest.",
    "by": (
        "The mathematics of a stage: `sum mean max min`, a mode of elastic averaging, or how "
        "far a `shift` goes."
    ),
    "via": (
        "Pins how a stage is carried out, and changes no result beyond rounding. Without it "
        "the compiler chooses."
    ),
    "per": "The value differs along these axes; of a load or a map, each member has its own.",
    "split": (
        "The leading dimension is cut along these axes, in this order; of a load, its records "
        "are divided."
    ),
    "partial": "Each rank holds a term of a sum that is not yet made.",
    "same": "The value is the same along an axis: the default.",
    "with": "The fn that updates the states, or the centre that is averaged with.",
    "into": "The states that are updated.",
    "visit": "How often an epoch sees each record.",
    "seed": "The order of records follows from it.",
    "tail": "What becomes of the last records of an epoch, which do not fill a batch.",
    "on": "Where a fn runs, or on which server a state lives.",
    "batch": (
        "Records of one step, all ranks together; `[32, 64] over MEMBER` gives each member a "
        "size of its own."
    ),
}  # fmt: skip
VALUES: Mapping[str, str] = {
    "exactly_once": "Each record once in an epoch.",
    "at_least_once": "Goes round again while other loads of the phase still run.",
    "at_most_once": "May leave records out.",
    "pad": "Fills the last batch with records from the start of the epoch, which do not count.",
    "short": "Makes the last batch shorter.",
    "drop": "Leaves the records out that do not fill a batch.",
    "host": "Runs on the host, record by record.",
    "device": "Runs on the accelerator, inside the compiled step.",
    "elementwise": "Works on each element for itself, so it can be applied to a cut.",
    "linear": "Commutes with sums, so it can be applied to a term of one.",
    "random": "Draws random numbers.",
    "sum": "The sum of what the ranks hold.",
    "mean": "The sum divided by the number of ranks; `mean(weight = n)` by the sum of n.",
    "max": "The largest of what the ranks hold, element by element.",
    "min": "The smallest of what the ranks hold, element by element.",
    "sync": "Every worker meets the centre in the same step: an all-reduce of the pulls.",
    "round_robin": "The centre serves one worker after another, in the order of ranks.",
    "async": "The centre serves whichever worker asks next.",
    "hogwild": "Workers add to the centre while others read it.",
    "backward": "Buckets go as soon as the backward pass has made them.",
    "stop": "An error ends the run.",
    "skip": "A record that fails is left out.",
    "continue": "The others go on without a process that dies.",
    "f32": "A 32-bit float.",
    "bf16": "A float of 16 bits, 8 of them exponent.",
    "f16": "A 16-bit float.",
    "f64": "A 64-bit float.",
    "i32": "A 32-bit integer.",
    "i64": "A 64-bit integer.",
    "u8": "An unsigned byte.",
    "bool": "True or false.",
    "bytes": "One record of variable length.",
    "tree": "A pytree, whose leaves are known when the plan is compiled.",
}
ALGORITHMS: Mapping[str, str] = {
    "native": "The backend's own collective.",
    "ring": "Every rank sends to its right neighbour, all links busy in every round.",
    "recursive_doubling": "Halves of the ranks exchange their sums: few rounds, much sent.",
    "halving_doubling": "Pairs exchange halves of what they share, and on the way back all they have.",
    "binomial_tree": "Who has it sends it on in every round: few rounds, for small messages.",
    "double_tree": "Two trees, each for half the buffer.",
    "torus": "Rings along the rows of a grid of ranks, then along its columns.",
    "bruck": "Every rank passes on all it has, twice as far each time: few rounds, any number of ranks.",
    "pairwise": "Every rank sends each block directly to the rank that it is for.",
    "chain": "Down the line of ranks, in slices that follow each other: for large buffers.",
    "scatter_gather": "A broadcast as a scatter and an all-gather: for large buffers.",
    "hierarchical": (
        "Level by level, the innermost first: `hierarchical(gpu, node)`, or `hierarchical(gpu "
        "= native, node = ring)`."
    ),
    "parameter_server": "Owners keep a share of the states: `parameter_server(owners = 2, within = gpu)`.",
    "duplicate": "Every member reads and computes for itself.",
    "all_shared": "Each member makes a part and all gather it.",
    "single_broadcast": (
        "Some members make everything and one broadcasts it: `single_broadcast(readers = "
        "2)`."
    ),
    "multi_broadcast": (
        "Some members make everything and each broadcasts its part: `multi_broadcast(readers "
        "= 2)`."
    ),
}  # fmt: skip
_OPTIONS: Mapping[str, str] = {
    "bucket": "How many bytes one buffer takes; a large leaf stays whole.",
    "overlap": "What the reduction runs beside: buckets go as soon as the backward pass has made them.",
    "wire": "The float type in which values travel.",
    "accumulate": "The float type in which values are added.",
    "chunk": "Bytes of a message of a chunk program, or of what one owner keeps together.",
    "staleness": "How far a worker may be ahead.",
    "on_error": "What a record that fails does: end the run, or be left out.",
    "on_failure": "Whether the others go on without a process that dies.",
    "cores": "Threads that make batches.",
    "device_prefetch": "Batches that lie on the devices ahead of their use.",
    "prefetch": "Batches made ahead; of a gather, layers ahead of their use.",
}
ARGUMENTS: Mapping[str, str] = {
    "weight": "The scalar that a mean is weighted with.",
    "eta": "The learning rate of elastic averaging.",
    "rho": "How strongly workers and centre pull each other.",
    "readers": "How many members read.",
    "owners": "How many workers keep a share of the states.",
    "within": "The axis along which an exchange stays inside.",
}
KINDS: Mapping[str, str] = {
    "axis": "axis", "ensemble": "ensemble", "server": "server", "source": "source", "fn": "function",
    "input": "input", "state": "state", "value": "value",
}  # fmt: skip


def of_verb(word: str) -> str:
    """The form of a stage and what it does."""
    return f"```plan\n{VERBS[word].FORM}\n```\n{STAGES[word]}"


def of_option(word: str) -> str:
    """What an option is, and which stages take it."""
    rule = OPTIONS[word]
    kinds = {"bytes": "a size, such as `25 MiB`", "count": "a whole number", "dtype": "a float type"}
    kind = kinds.get(rule.kind) or " or ".join(f"`{each}`" for each in rule.words)
    return f"{_OPTIONS[word]}\n\nIt is {kind}, of {', '.join(f'`{stage}`' for stage in rule.stages)}."


def of_word(word: str) -> str | None:
    """What a word of the language means, wherever it stands; None for any other."""
    if word in VERBS:
        return of_verb(word)
    if word in OPTIONS:
        return of_option(word)
    return next((table[word] for table in (WORDS, ALGORITHMS, VALUES, ARGUMENTS) if word in table), None)
