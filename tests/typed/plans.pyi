"""Typed faces of plans, written by `commplan stubs`. For type checkers: no such module can be run.

from __future__ import annotations
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import plans

plan: commplan.Plan[plans.Linear] = commplan.load("linear.plan")
"""

from collections.abc import Iterator
from typing import Any, Literal, TypedDict, overload
from commplan.typing import TypedRun
from jax import Array
from jax.typing import ArrayLike


LinearState = TypedDict("LinearState", {"center": Any})


class LinearStartOutputs:
    """What `run.start` returns beside the state."""

    @property
    def center(self) -> Any:
        """tree same"""

    def __getitem__(self, name: Literal["center"], /) -> Any: ...
    def __iter__(self) -> Iterator[str]: ...
    def __len__(self) -> int: ...
    def __contains__(self, name: object, /) -> bool: ...


LinearStartState = TypedDict("LinearStartState", {})


class LinearStart:
    """`at start`."""

    name: str
    def __call__(self, state: LinearStartState, /, *, params: Any) -> tuple[LinearStartOutputs, LinearState]:
        """params: tree per data"""


class LinearStepOutputs:
    """What `run.step` returns beside the state."""

    @property
    def grads(self) -> Any:
        """tree same"""

    def __getitem__(self, name: Literal["grads"], /) -> Any: ...
    def __iter__(self) -> Iterator[str]: ...
    def __len__(self) -> int: ...
    def __contains__(self, name: object, /) -> bool: ...


LinearStepState = TypedDict("LinearStepState", {})


class LinearStep:
    """`each step`."""

    name: str
    def __call__(self, state: LinearStepState, /, *, grads: Any) -> tuple[LinearStepOutputs, LinearState]:
        """grads: tree partial data"""


class LinearEvery4Outputs:
    """What `run.every[4]` returns beside the state."""

    @property
    def mean(self) -> Array:
        """f32 same"""

    def __getitem__(self, name: Literal["mean"], /) -> Array: ...
    def __iter__(self) -> Iterator[str]: ...
    def __len__(self) -> int: ...
    def __contains__(self, name: object, /) -> bool: ...


LinearEvery4State = TypedDict("LinearEvery4State", {})


class LinearEvery4:
    """`every 4 steps`."""

    name: str
    def __call__(self, state: LinearEvery4State, /, *, loss: ArrayLike) -> tuple[LinearEvery4Outputs, LinearState]:
        """loss: f32 per data"""

    @property
    def interval(self) -> int: ...


class LinearEvery16Outputs:
    """What `run.every[16]` returns beside the state."""
    def __iter__(self) -> Iterator[str]: ...
    def __len__(self) -> int: ...
    def __contains__(self, name: object, /) -> bool: ...


LinearEvery16State = TypedDict("LinearEvery16State", {})


class LinearEvery16:
    """`every 16 steps`."""

    name: str
    def __call__(self, state: LinearEvery16State, /, *, params: Any) -> tuple[LinearEvery16Outputs, LinearState]:
        """params: tree per data"""

    @property
    def interval(self) -> int: ...


class LinearEvaluateOutputs:
    """What `run.evaluate` returns beside the state."""

    @property
    def center(self) -> Any:
        """tree same"""

    def __getitem__(self, name: Literal["center"], /) -> Any: ...
    def __iter__(self) -> Iterator[str]: ...
    def __len__(self) -> int: ...
    def __contains__(self, name: object, /) -> bool: ...


LinearEvaluateState = TypedDict("LinearEvaluateState", {"center": Any})


class LinearEvaluate:
    """`phase evaluate`."""

    name: str
    def __call__(self, state: LinearEvaluateState, /) -> tuple[LinearEvaluateOutputs, LinearState]:
        """It takes nothing but the state."""


class LinearEvery:
    """The phases `every N steps`, by N."""

    @overload
    def __getitem__(self, period: Literal[4], /) -> LinearEvery4: ...
    @overload
    def __getitem__(self, period: Literal[16], /) -> LinearEvery16: ...
    def __iter__(self) -> Iterator[int]: ...
    def __len__(self) -> int: ...


class Linear(TypedRun):
    """A run of plan `linear` of linear.plan."""

    start: LinearStart
    step: LinearStep
    evaluate: LinearEvaluate
    every: LinearEvery
    def init(self) -> LinearState: ...  # type: ignore[override]
    def sharding(self, name: Literal["center", "grads", "mean", "params", "loss"]) -> Any: ...  # type: ignore[override]
