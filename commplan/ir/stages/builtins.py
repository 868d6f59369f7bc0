"""Built-in functions: elementwise formulas that a plan names, so that no function has to be bound.

Each has one formula. The lowerings evaluate it on arrays, and the prover on linear forms. The arguments of a
formula are the operands, then the parameters in order. Result i has the leaves of operand i, except that a
cast changes their types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import msgspec

from commplan.diagnostics import listed
from commplan.ir.roles import Meaning
from commplan.ir.stages.rules import Violation
from commplan.ir.types import DType
from commplan.ir.values import Leaf

if TYPE_CHECKING:
    from fractions import Fraction

# The names of the built-in functions, as in a plan.
BuiltinName = Literal["zeros", "add", "subtract", "scale", "blend", "sgd", "nesterov", "cast"]
BUILTIN_NAMES: tuple[BuiltinName, ...] = get_args(BuiltinName)
# The largest finite number in f32, (2 - 2**-23) * 2**127.
_LARGEST_F32 = 3.4028234663852886e38


def _zeros(_: Any) -> Any:
    return 0


def _add(x: Any, y: Any) -> Any:
    return x + y


def _subtract(x: Any, y: Any) -> Any:
    return x - y


def _scale(x: Any, factor: Any) -> Any:
    return factor * x


def _blend(x: Any, y: Any, alpha: Any) -> Any:
    """alpha x + (1 - alpha) y, as streaming DiLoCo mixes local weights x with the center y.

    References:
        Douillard et al., Streaming DiLoCo with overlapping communication, 2025, arXiv 2501.18512.
    """
    return alpha * x + (1 - alpha) * y


def _sgd(w: Any, g: Any, rate: Any) -> Any:
    """w - rate g, as `optax.sgd(rate)`."""
    return w - rate * g


def _nesterov(w: Any, m: Any, g: Any, rate: Any, momentum: Any) -> Any:
    """Stochastic gradient descent with Nesterov's momentum, as `optax.sgd(rate, momentum, nesterov=True)`.

    m' = momentum m + g, w' = w - rate (momentum m' + g). The outer optimizer of DiLoCo, whose g is the mean
    of the center minus the local weights.

    References:
        Sutskever et al., On the importance of initialization and momentum in deep learning, 2013.
        Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, 2023, arXiv
        2311.08105, algorithm 1.
    """
    m = momentum * m + g
    return w - rate * (momentum * m + g), m


def _cast(x: Any) -> Any:
    return x


class Parameter(NamedTuple):
    """A number that a built-in function takes.

    Attributes:
        name: The key in the plan.
        range: The valid numbers, in words for messages.
        least: The smallest valid number.
        most: The largest valid number.
    """

    name: str
    range: str
    least: float
    most: float


class Definition(NamedTuple):
    """A built-in function.

    Attributes:
        operands: The names of the operands, in messages and documentation.
        results: The number of results.
        formula: A function of operands and then parameters that returns a tuple of results, or the only one.
        parameters: The parameters, in the order of the formula.
        numbers: The elements that it accepts: of any type, of any type but bool, or floats.
    """

    operands: tuple[str, ...]
    results: int
    formula: Callable[..., Any]
    parameters: tuple[Parameter, ...] = ()
    numbers: Literal["any", "numbers", "floats"] = "numbers"

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of the parameters."""
        return tuple(parameter.name for parameter in self.parameters)


# Bounds are the nearest numbers in f32: the smallest positive one is 2**-149, and the largest below 1 is
# 1 - 2**-24.
_RATE = Parameter("rate", "a positive number", 2.0**-149, _LARGEST_F32)
_MOMENTUM = Parameter("momentum", "at least 0 and below 1", 0, 1 - 2.0**-24)
_ALPHA = Parameter("alpha", "a number from 0 to 1", 0, 1)
_FACTOR = Parameter("factor", "finite in f32", -_LARGEST_F32, _LARGEST_F32)

# The built-in functions by name.
DEFINITIONS: Mapping[str, Definition] = MappingProxyType(
    {
        "zeros": Definition(("x",), 1, _zeros, numbers="any"),
        "add": Definition(("x", "y"), 1, _add),
        "subtract": Definition(("x", "y"), 1, _subtract),
        "scale": Definition(("x",), 1, _scale, (_FACTOR,)),
        "blend": Definition(("x", "y"), 1, _blend, (_ALPHA,), "floats"),
        "sgd": Definition(("w", "g"), 1, _sgd, (_RATE,), "floats"),
        "nesterov": Definition(("w", "m", "g"), 2, _nesterov, (_RATE, _MOMENTUM), "floats"),
        "cast": Definition(("x",), 1, _cast, numbers="any"),
    }
)


class Builtin(msgspec.Struct, frozen=True, gc=False):
    """A built-in function with its parameters, such as `blend(alpha = 0.5)` or `cast(dtype = bf16)`.

    Attributes:
        name: The name of the function.
        factors: The values of the definition's parameters, in order; empty if it has none.
        dtype: The type of a cast's result; None for other functions.
    """

    name: Meaning[BuiltinName]
    factors: Meaning[tuple[float, ...]] = ()
    dtype: Meaning[DType | None] = None

    def __str__(self) -> str:
        pairs = [*zip(self.definition.keys, (f"{x:g}" for x in self.factors), strict=False)]
        pairs += [("dtype", str(self.dtype))] if self.dtype else []
        return f"{self.name}({', '.join(f'{key} = {value}' for key, value in pairs)})" if pairs else self.name

    @property
    def definition(self) -> Definition:
        """The definition of the function. Raises KeyError if there is none."""
        return DEFINITIONS[self.name]

    @property
    def linear(self) -> bool:
        """Whether it commutes with sums over the reals. A cast rounds, or changes how sums wrap around."""
        return self.dtype is None

    def apply(self, operands: Sequence[Any], number: Callable[[float], Any] = float) -> tuple[Any, ...]:
        """The results of the formula.

        Args:
            operands: Arrays, linear forms, or anything else that the formula can compute with.
            number: A conversion of parameters to the type that the formula computes with.
        """
        results: Any = self.definition.formula(*operands, *map(number, self.factors))
        return results if self.definition.results > 1 else (results,)

    def coefficients(self) -> tuple[tuple[Fraction, ...], ...]:
        """For each result of a linear function, the exact coefficient of each operand.

        Parameters are the decimals of the plan: 0.1 is 1/10. The function must be linear.

        >>> Builtin("blend", (0.25,)).coefficients()
        ((Fraction(1, 4), Fraction(3, 4)),)
        """
        from fractions import Fraction  # noqa: PLC0415  slow to import, and checking a plan does not need it

        count = len(self.definition.operands)
        # The formula is evaluated on unit vectors. Only `zeros` returns a number.
        basis = [LinearForm(tuple(Fraction(i == j) for j in range(count))) for i in range(count)]
        results = self.apply(basis, lambda factor: Fraction(repr(factor)))
        zero = (Fraction(0),) * count
        return tuple(form.coefficients if isinstance(form, LinearForm) else zero for form in results)

    def violation(self) -> Violation | None:
        """An unknown name, wrong parameters, or the first one that is out of range; None if all are valid."""
        if self.name not in DEFINITIONS:
            return Violation(f"there is no built-in function `{self.name}`")
        parameters = self.definition.parameters
        if len(self.factors) != len(parameters) or (self.name == "cast") != (self.dtype is not None):
            return Violation(f"`{self}` does not have the parameters of `{self.name}`")
        for index, (parameter, factor) in enumerate(zip(parameters, self.factors, strict=True)):
            if not parameter.least <= factor <= parameter.most:
                message = f"`{parameter.name}` of `{self.name}` is {parameter.range}, found `{factor:g}`"
                return Violation(message, at=index)
        return None

    def results(self, operands: Sequence[tuple[Leaf, ...]]) -> tuple[tuple[Leaf, ...], ...]:
        """The leaves of the results for those of the operands."""
        count = self.definition.results
        if self.dtype is None:
            return tuple(operands[:count])
        return (tuple(Leaf(leaf.path, leaf.shape, self.dtype) for leaf in operands[0]),)

    def misfit(self, operands: Sequence[tuple[str, tuple[Leaf, ...]]]) -> Violation | None:
        """The first rule that the operands' leaves violate; None if there is none.

        Operands must have the same leaves, which may differ in their float types.

        Args:
            operands: The name and the leaves of each operand.

        Returns:
            The violation, with the index of the operand as `at`.
        """
        first, like = operands[0]
        for index, (name, leaves) in enumerate(operands):
            difference = _difference(like, leaves)
            if difference is not None:
                message = f"`{first}` and `{name}` do not fit in `{self.name}`: {difference}"
                note = "it computes each element from the same element of every operand"
                return Violation(message, (note,), index)
        for index, (name, leaves) in enumerate(operands):
            for leaf, leaf_like in zip(leaves, like, strict=True):
                violation = self._wrong_type(leaf, leaf_like, leaf.label(f"{name}.0"))
                if violation is not None:
                    return violation._replace(at=index)
        return None

    def _wrong_type(self, leaf: Leaf, like: Leaf, label: str) -> Violation | None:
        """The rule on types that `leaf` violates; `like` is the same leaf of the first operand."""
        dtype, numbers = leaf.dtype, self.definition.numbers
        if self.dtype is not None:
            return self._wrong_cast(leaf, label)
        if numbers == "any":
            return None
        if dtype is DType.BOOL:
            fix = "convert it first, such as by `cast(dtype = i32)`"
            return Violation(f"{label} is bool, and `{self.name}` computes with numbers", (fix,))
        if numbers == "floats" and not dtype.is_float:
            fix = "convert it first, such as by `cast(dtype = f32)`, or leave it out of the tree"
            return Violation(f"{label} is {dtype}, and `{self.name}` needs floats", (fix,))
        if dtype != like.dtype and not (dtype.is_float and like.dtype.is_float):
            fix = "operands are floats or have one type: convert one of them by a `cast`"
            return Violation(f"{label} is {dtype}, but another operand is {like.dtype}", (fix,))
        if not dtype.is_float and any(factor != int(factor) for factor in self.factors):
            fix = "its product with a fraction is no integer: use a whole number, or convert it first"
            return Violation(f"{label} is {dtype}, and the factor is {self.factors[0]:g}", (fix,))
        return None

    def _wrong_cast(self, leaf: Leaf, label: str) -> Violation | None:
        """The rule of casts that `leaf` violates."""
        assert self.dtype is not None
        if leaf.dtype.is_float and not self.dtype.is_float:
            fix = "declare a fn that rounds it"
            return Violation(f"{label} is {leaf.dtype}, and a cast to {self.dtype} drops fractions", (fix,))
        if leaf.path and not leaf.dtype.is_float:
            fix = "leave it out of the tree, or pass it as an array"
            return Violation(f"{label} is {leaf.dtype}, and a cast of a tree converts floats", (fix,))
        return None


def signature_violation(fn: Any) -> Violation | None:
    """The first contradiction of `fn`, a `Fn` or `FnType`, with its `body`; None without a body."""
    body: Builtin | None = fn.body
    if body is None or body.violation() is not None:
        return body and body.violation()
    definition = body.definition
    has_counts = (len(fn.operands), len(fn.results)) == (len(definition.operands), definition.results)
    if has_counts and fn.where == "device" and fn.elementwise and not fn.random:
        return None
    return Violation(f"`{fn.name}` is declared with other properties than those of `{body}`")


def _difference(first: tuple[Leaf, ...], second: tuple[Leaf, ...]) -> str | None:
    """The first difference in the paths and shapes of two trees, in words; None if there is none."""
    if [leaf.path for leaf in first] != [leaf.path for leaf in second]:
        paths = [{leaf.path for leaf in leaves} for leaves in (first, second)]
        apart = sorted(paths[0] ^ paths[1])[:3]
        return f"only one of them has {listed(apart)}" if apart else "other leaves"
    for leaf, other in zip(first, second, strict=True):
        if leaf.shape != other.shape:
            at = f"`{leaf.path}` is " if leaf.path else ""
            return f"{at}{list(leaf.shape)} and {list(other.shape)}"
    return None


class LinearForm(msgspec.Struct, frozen=True):
    """A sum of operands with coefficients, for the exact evaluation of a formula.

    Attributes:
        coefficients: The coefficient of each operand, a `Fraction`.
    """

    coefficients: tuple[Any, ...]

    def __add__(self, other: LinearForm) -> LinearForm:
        pairs = zip(self.coefficients, other.coefficients, strict=True)
        return LinearForm(tuple(x + y for x, y in pairs))

    def __sub__(self, other: LinearForm) -> LinearForm:
        return self + -1 * other

    def __rmul__(self, factor: Any) -> LinearForm:
        return LinearForm(tuple(factor * x for x in self.coefficients))
