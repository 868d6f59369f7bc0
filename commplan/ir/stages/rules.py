"""The rules of stages beyond placements, each defined once.

The docstring of a function states the rule. The function returns the violation, or None if the rule holds.
The checker applies the rules to a plan, the compiler to every stage once sizes and leaves are bound, and the
verifier to the ops of a schedule. All three report the messages defined here, with their own codes and spans.

The argument `ranks` returns the number of ranks along axes, or None before sizes are bound. Rules that need
this number then accept.
"""

import math
import struct
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal, NamedTuple

from commplan.diagnostics import Diagnostic, Note, Span, listed, plural
from commplan.ir.codec import Codec
from commplan.ir.hints import NO_HINTS, Algorithm, Cache, Hints
from commplan.ir.types import ArrayType, DType, FnElement, Ref, sized
from commplan.ir.values import Leaf

IN_BLOCKS = ("reduce", "scatter", "gather", "broadcast")  # the stages that can send values in blocks
# A function from axes to the number of ranks along them, or to None if a size is not bound yet.
Ranks = Callable[[Iterable[str]], int | None]


class Violation(NamedTuple):
    """A violated rule.

    Attributes:
        message: The message.
        notes: Remarks and fixes; may be empty.
        at: The index of the offending item, if the rule is about several, such as operands or levels; else 0.
    """

    message: str
    notes: tuple[str, ...] = ()
    at: int = 0

    def diagnostic(self, code: str, span: Span | None, file: str) -> Diagnostic:
        """The diagnostic with this message and these notes."""
        return Diagnostic(code, self.message, span, tuple(map(Note, self.notes)), file=file)


# --- map ---


def operand_count(fn: str, operands: int, count: int) -> Violation | None:
    """The function `fn`, which has `operands` operands, is called with as many values (`count`)."""
    message = f"`{fn}` takes {plural(operands, 'value')}, found {count}"
    return Violation(message) if operands != count else None


def result_count(fn: str, results: int, names: int) -> Violation | None:
    """Each of the `results` results of the function `fn` is bound to one of `names` names."""
    message = f"`{fn}` returns {plural(results, 'value')}, found {plural(names, 'name')} for them"
    return Violation(message) if results != names else None


def cacheable(
    fn: str, random: Sequence[str], sources: Sequence[str], kinds: Sequence[FnElement], cache: Cache
) -> Violation | None:
    """The results of a cached host function depend on one record alone, and fit in the cache.

    Args:
        fn: The function.
        random: The random functions among `fn` and its predecessors, the one to name in the message first.
        sources: The sources of the loads before it, one for each load.
        kinds: The types of its results, per record.
        cache: The cache.
    """
    if fn in random:
        note = "leave `cache` out, or cache the function before it"
        return Violation(f"`{fn}` is random: its result for a record differs in each epoch", (note,))
    if random:
        note = "cache the functions before the first random one"
        return Violation(
            f"`{fn}` takes the result of the random `{random[0]}`, which differs in each epoch", (note,)
        )
    if len(sources) != 1:
        message = f"`{fn}` takes records of {len(sources)} loads: {listed(sources)}"
        return Violation(message, ("results are stored by record number: cache functions of one load",))
    unsized = next((kind for kind in kinds if not isinstance(kind, ArrayType)), None)
    if unsized is not None:
        message = f"`{fn}` returns {unsized}, which has no fixed size"
        return Violation(message, ("a cache has rows of one size: cache the function that returns an array",))
    nbytes = sum(math.prod(kind.shape) * kind.dtype.nbytes for kind in kinds if isinstance(kind, ArrayType))
    if cache.nbytes < nbytes:
        message = f"`cache = {cache}` does not hold one record of `{fn}`, which takes {sized(nbytes)}"
        return Violation(message, ("make it hold many records of the source",))
    return None


# --- load ---


def dropped_tail(visit: str, tail: str) -> Violation | None:
    """A load that must visit every record does not drop the tail of an epoch."""
    if tail != "drop" or visit == "at_most_once":
        return None
    message = f"`tail drop` leaves records out, and `{visit}` promises them all"
    return Violation(message, ("pad the tail, or visit `at_most_once`",))


def short_tail(tail: str, split: tuple[str, ...]) -> Violation | None:
    """A load with a short tail is not split, since a short batch has no equal shards."""
    if tail != "short" or not split:
        return None
    note = "ranks would get batches of unequal shape: `tail pad` fills the last one up and counts"
    return Violation(f"a short tail cannot be split over {listed(split)}", (note,))


def member_batches(batch: Sequence[object], clock: str | None, ranks: Ranks) -> Violation | None:
    """If the members of the ensemble `clock` load at their own rates, there is one batch size per member.

    If `clock` is None, all load at one rate, and the rule holds.
    """
    members = None if clock is None else ranks((clock,))
    if members is None or members == len(batch):
        return None
    message = f"{plural(len(batch), 'batch size')} for the {plural(members, 'member')} of `{clock}`"
    return Violation(message, ("each member has one, in member order",))


def even_batch(batch: Sequence[int], split: tuple[str, ...], ranks: Ranks) -> Violation | None:
    """Each size in `batch` is a multiple of the number of ranks along `split`."""
    ways = ranks(split) or 1
    for index, size in enumerate(batch):
        if size % ways:
            lower, upper = size // ways * ways, (size // ways + 1) * ways
            nearest = f"the nearest that can are {lower} and {upper}"
            fix = nearest if lower else f"the smallest that can is {upper}"
            message = (
                f"a batch of {size} records cannot be split evenly over the {ways} ranks of {listed(split)}"
            )
            return Violation(message, (fix,), index)
    return None


# --- broadcast, share, exchange ---


def root_in_range(rank: int, axes: tuple[str, ...], ranks: Ranks) -> Violation | None:
    """The root `rank` is one of the ranks along `axes`."""
    count = ranks(axes)
    if count is None or 0 <= rank < count:
        return None
    verb, note = "has", "ranks count from 0"
    if len(axes) > 1:
        verb, note = "have", "ranks count from 0, row-major, the first axis named major"
    return Violation(
        f"the root {rank} is out of range: {listed(axes)} {verb} {plural(count, 'rank')}", (note,)
    )


def reader_or_owner_count(
    role: Literal["readers", "owners"], count: object, axes: tuple[str, ...], ranks: Ranks
) -> Violation | None:
    """There are 1 to n readers of a share among n members, or owners of an exchange among n workers.

    The rule holds if `count` is no integer, such as None without the argument.
    """
    most = ranks(axes)
    noun = "member" if role == "readers" else "worker"
    if not isinstance(count, int) or most is None or 1 <= count <= most:
        return None
    problem = f"more than the {plural(most, noun)} of {listed(axes)}" if count > most else "too few"
    note = f"{role} are {noun}s: at least 1, at most all of them"
    return Violation(f"{count} {role} are {problem}", (note,))


def shareable_operand(name: str, *, records: bool) -> Violation | None:
    """The operand `name` of a share is records."""
    if records:
        return None
    why = "a value that is not loaded involves no work on records that could be shared"
    return Violation(f"`share` takes loaded values, found `{name}`", (why,))


def same_for_members(name: str, varying: Sequence[str]) -> Violation | None:
    """A shared value is the same for all members: `varying`, the axes over which it varies, is empty."""
    if not varying:
        return None
    message = f"`{name}` differs between the members of `{varying[0]}` and cannot be shared"
    return Violation(message, ("share it before the stage that says `per`",))


def result_per_state(states: Sequence[Ref], results: Sequence[Ref]) -> Violation | None:
    """An exchange has one result per state."""
    if len(states) == len(results):
        return None
    return Violation(f"{len(states)} states are exchanged for {len(results)} results")


def common_home(homes: Sequence[tuple[str, str | None]]) -> Violation | None:
    """The states of an exchange are on one server, or all on workers.

    `homes` are pairs of a state and its server declaration, which is None for a state on workers.
    """
    for index, (name, home) in enumerate(homes):
        if home != homes[0][1]:
            message = f"`{name}` and `{homes[0][0]}` are in different places"
            return Violation(
                message, ("the states of one exchange are on one server, or all on the workers",), index
            )
    return None


def update_function(fn: str, where: str, *, elementwise: bool, random: bool) -> Violation | None:
    """The update function of an exchange gives the same result on chunks as on the whole.

    So it is elementwise, runs on the device, and is not random.
    """
    if where != "device" or not elementwise:
        why = "each owner updates its chunks separately, and the result must equal an update of the whole"
        return Violation(f"the update `{fn}` must be elementwise and on the device", (why,))
    if random:
        why = "each owner would draw different numbers: draw them with `map`, and add them to the gradients"
        return Violation(f"the update `{fn}` may not be random", (why,))
    return None


# --- elastic ---


def center_home(mode: str, center: str, server: str | None) -> Violation | None:
    """The center of mode `sync` is on the workers, that of any other mode on a server.

    `server` is the declaration that `center` is on; None if it is on the workers.
    """
    if (mode == "sync") == (server is None):
        return None
    if server is not None:
        message = f"the center of `sync` is on the workers, found `{center}` on a server"
        return Violation(message, (f"declare `{center}` without `on {server}`",))
    message = f"the center of `{mode}` is on a server, found `{center}` on the workers"
    return Violation(message, (f"declare `server NAME = 1` and `{center}` with `on NAME`",))


def coefficient(name: str, value: float | Ref) -> Violation | None:
    """A literal coefficient is positive and finite, in f32 too. The rule holds for a scalar value.

    `name` describes the coefficient in messages.
    """
    if isinstance(value, str):
        return None
    if not math.isfinite(value) or value <= 0:
        return Violation(f"`{name}` is a positive number, found `{value:g}`")
    try:
        (single,) = struct.unpack("f", struct.pack("f", value))
    except OverflowError:
        single = math.inf
    if single not in (0, math.inf):
        return None
    if single == 0:
        note = "the workers and the center would never move towards each other"
        return Violation(f"`{name}` is 0 in f32, found `{value:g}`", (note,))
    return Violation(f"`{name}` is infinite in f32, found `{value:g}`")


def coefficients(eta: float | Ref, rho: float | Ref) -> Violation | None:
    """Both coefficients of an elastic averaging, and their product if both are literals, are valid."""
    product = "eta" if isinstance(eta, str) or isinstance(rho, str) else eta * rho
    return coefficient("eta", eta) or coefficient("rho", rho) or coefficient("eta * rho", product)


def stability(
    mode: str, eta: float | Ref, rho: float | Ref, axes: tuple[str, ...], ranks: Ranks
) -> Violation | None:
    """Valid literal coefficients move the center by less than the full distance: p * eta * rho < 1.

    In `c <- c + eta rho sum_i (w_i - c)` over p workers, the old center has the weight 1 - eta rho p. A
    server serves one worker at a time, so p = 1 in all modes but `sync`. For `sync` before sizes are bound,
    p = 1 is a lower bound. The rule holds if a coefficient is a scalar value.

    References:
        Zhang, Choromanska and LeCun, Deep learning with elastic averaging SGD, 2015, where beta = p alpha =
        p eta rho < 1.
    """
    if isinstance(eta, str) or isinstance(rho, str):
        return None
    from fractions import Fraction  # noqa: PLC0415  only such plans need it, and its import takes long

    workers = ranks(axes) if mode == "sync" else None
    moved = Fraction(str(eta)) * Fraction(str(rho)) * (workers or 1)  # exact decimals of the literals
    if moved < 1:
        return None
    factors, suffix = ("eta * rho * p", f", with p = {workers} workers") if workers else ("eta * rho", "")
    message = f"`{mode}` is unstable: {factors} = {float(moved):.6g}, and it must be below 1{suffix}"
    why = f"every exchange would multiply the old center by {float(1 - moved):.6g}"
    bound = "the bound is that of Zhang, Choromanska and LeCun (2015), beta = p * eta * rho < 1"
    return Violation(message, (why, bound))


# --- sums ---


def reducible_dtype(how: str, dtype: DType, subject: str, hints: Hints = NO_HINTS) -> Violation | None:
    """Bools have no sum and no mean, and some integer types are only moved.

    Args:
        how: An operator, or `elastic`; the rule holds for anything else.
        dtype: The type of the values.
        subject: The values, in words for messages.
        hints: The options; only `integers` matters.
    """
    integers = None if dtype.is_float else hints.integers
    if integers == "first":
        return None
    if how in ("sum", "mean", "max", "min", "elastic") and dtype.is_only_moved:
        fix = "convert it to i32 or f32 first, or leave it out of the reduction: such values are only moved"
        first = ("or write `{ integers = first }`, which takes the first rank's",)
        notes = (fix, *first) if how == "mean" and subject.startswith("leaf ") else (fix,)
        return Violation(f"{subject} is {dtype}, which is not reduced", notes)
    if integers == "max" or how not in ("sum", "mean") or dtype is not DType.BOOL:
        return None
    fix = "`by max` computes whether any is true, `by min` whether all are; convert to i32 to count"
    return Violation(f"{subject} is bool, and truth values have no {how}", (fix,))


def averageable_dtype(how: str, dtype: DType, subject: str, hints: Hints = NO_HINTS) -> Violation | None:
    """Means and elastic averaging need floats, unless `hints.integers` is set.

    The arguments are those of `reducible_dtype`.
    """
    if how not in ("mean", "elastic") or dtype.is_float or hints.integers is not None:
        return None
    operation = "a mean"
    fixes = ("the mean of integers is not an integer: use `sum`, or convert with a fn first",)
    if subject.startswith("leaf "):
        fixes = (
            "split the tree: make the leaf a separate input, `per` the axes, and reduce it `by max`",
            "or let `reduce` treat such leaves apart: `{ integers = max }`, or `first` for the first rank's",
        )
    if how == "elastic":
        operation, fixes = "elastic averaging", ("convert it, or leave it out of the averaging",)
    return Violation(f"{operation} needs a float type, and {subject} is {dtype}", fixes)


def reducible_leaves(how: str, leaves: Iterable[Leaf], ref: Ref, hints: Hints) -> Violation | None:
    """Every leaf of the value `ref` satisfies `reducible_dtype` and `averageable_dtype`."""
    for leaf in leaves:
        label = leaf.label(ref)
        violation = reducible_dtype(how, leaf.dtype, label, hints)
        violation = violation or averageable_dtype(how, leaf.dtype, label, hints)
        if violation is not None:
            return violation
    return None


def native_accumulator(
    how: str, via: Algorithm | None, hints: Hints, dtype: DType | None, subject: str
) -> Violation | None:
    """`native`, as an algorithm or as that of a level, has no accumulator that is wider than the wire type.

    Args:
        how: The operator; max and min add nothing.
        via: The algorithm in the plan; the rule holds if it is None.
        hints: The options.
        dtype: The type of the values; None if it is not bound yet. Then the rule holds unless both types are
            explicit.
        subject: The values, in words for messages.
    """
    if via is None or how in ("max", "min") or hints.codec is not None:
        return None
    if via.name != "native" and not any(arg.key and arg.value == "native" for arg in via.args):
        return None
    wire, accumulate = (hints.wire, hints.accumulate) if dtype is None else hints.wire_types(dtype)
    if wire is None or accumulate is None or accumulate.nbytes <= wire.nbytes:
        return None
    why = "the backend's own reduction has no accumulator of another type"
    notes = (f"{why}: leave `via` out, or write `accumulate = {wire}`",)
    demand = f"{accumulate} is requested"
    if hints.accumulate is None:
        demand = f"{subject} is {dtype}"
        notes = ("without `accumulate`, values are added in their own type", *notes)
    return Violation(f"`native` adds in the wire type {wire}, but {demand}", notes)


def block_format(
    verb: str, how: str | None, via: Algorithm | None, codec: Codec, *, is_scalar: bool = False
) -> Violation | None:
    """A stage can send its values in blocks.

    Args:
        verb: The stage.
        how: The operator of a reduction.
        via: The algorithm of the stage.
        codec: The block format.
        is_scalar: Whether the value is a scalar.

    Returns:
        The violated rule; its `at` is 1 if the algorithm violates it.
    """
    if verb not in IN_BLOCKS:
        return Violation(f"`{verb}` does not send blocks", (f"{listed(IN_BLOCKS)} do: write `wire = bf16`",))
    if how in ("max", "min"):
        notes = ("leave `wire` out: a maximum is one of the values, and is exact",)
        return Violation(f"`by {how}` does not send blocks", notes)
    if is_scalar:
        notes = ("leave `wire` out: 4 bytes are no traffic, and counts and weights have to be exact",)
        return Violation(f"a scalar is sent as it is, and not in {codec}", notes)
    if via is not None and via.name != "native" and (how is not None or via.levels):
        notes = ("leave `via` out: values are encoded once for each transfer between all ranks",)
        return Violation(f"`{via.name}` would round values to {codec} again on their way", notes, 1)
    return None


def options_without_effect(
    how: str | None,
    collective: str | None,
    via: Algorithm | None,
    hints: Hints,
    dtypes: Collection[DType] | None,
) -> dict[str, Violation]:
    """Each option has an effect. It has none if other rules determine how values are sent and added.

    Args:
        how: The operator of the reduction; None if values are only moved.
        collective: The kind of collective that the stage becomes; None if the compiler chooses.
        via: The algorithm of the stage; None if the plan names none.
        hints: The options.
        dtypes: The types of the leaves; None if they are not bound yet.

    Returns:
        The violations by the name of the option: `accumulate`, `integers`, `wire` or `chunk`.
    """
    idle: dict[str, Violation] = {}
    adds = how in ("sum", "mean")
    wire, accumulate = hints.wire, hints.accumulate
    floats = None if dtypes is None else sorted({dtype for dtype in dtypes if dtype.is_float})
    if accumulate is not None and not adds:
        idle["accumulate"] = Violation(f"`by {how}` adds nothing", ("leave `accumulate` out",))
    elif accumulate is not None and floats is None:
        if wire is not None and wire.nbytes > accumulate.nbytes:
            idle["accumulate"] = _narrow_sum(wire, accumulate)
    elif accumulate is not None and floats and all(hints.wire_types(x)[1] != accumulate for x in floats):
        idle["accumulate"] = _narrow_sum(hints.wire_types(floats[0])[0], accumulate)
    if hints.integers is not None and how != "mean":
        idle["integers"] = Violation(f"`by {how}` takes integers as they are", ("leave `integers` out",))
    elif hints.integers is not None and dtypes is not None and len(floats or ()) == len(set(dtypes)):
        idle["integers"] = Violation("every leaf is a float", ("leave `integers` out",))
    moved = [hints.wire_types(dtype, adds=False)[0] for dtype in floats or ()]
    if wire is not None and not adds and moved and wire not in moved:
        message = f"values of {listed(floats or ())} are not added, and travel as they are"
        idle["wire"] = Violation(message, ("a wider type would only be more bytes: leave `wire` out",))
    algorithms: list[object] = []
    if via is not None and via.levels:
        algorithms = [arg.value if arg.key else "" for arg in via.args]
    elif via is not None:
        algorithms = [via.name]
    if hints.chunk is not None and collective == "shift":
        idle["chunk"] = Violation("no chunk program shifts values", ("leave `chunk` out",))
    elif hints.chunk is not None and set(algorithms) == {"native"}:
        note = "leave `chunk` out, or name a chunk program such as `ring`"
        idle["chunk"] = Violation("`native` chooses its messages", (note,))
    return idle


def _narrow_sum(wire: DType, accumulate: DType) -> Violation:
    """The violation of an accumulation type that is narrower than the wire type."""
    message = f"values travel in {wire}, and are never added in a narrower type"
    return Violation(message, (f"write `wire = {accumulate}` too, or leave `accumulate` out",))


def hierarchy_levels(names: Sequence[str], axes: tuple[str, ...]) -> Violation | None:
    """The levels of `hierarchical`, called `names`, are exactly the axes of the stage."""
    usage = (f"`hierarchical` lists exactly the axes of the stage, inner first; here {listed(axes)}",)
    for index, name in enumerate(names):
        if name not in axes:
            return Violation(f"this stage does not run over `{name}`", usage, index)
        if name in names[:index]:
            return Violation(f"the level `{name}` is listed twice", usage, index)
    missing = [axis for axis in axes if axis not in names]
    return Violation(f"`hierarchical` leaves out {listed(missing)}", usage, len(names)) if missing else None
