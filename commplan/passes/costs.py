"""What passes ask about time: how long would this collective take, done so?

The answers come from `commplan.simulate`: from measured curves where a calibration has them, else from the
model of the topology. Without a topology nobody answers, and passes go by fixed rules.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from commplan.ir.plan import Algorithm
from commplan.ir.schedule import CollectiveKind, Form


class Ask(NamedTuple):
    """A collective as it might be carried out.

    nbytes: of one rank's operand. chunk: bytes of a message, None where programs are not cut into slices.
    """

    kind: CollectiveKind
    algorithm: Algorithm
    axes: tuple[str, ...]
    nbytes: int
    chunk: int | None = None
    root: int = 0
    form: Form | None = None


class Prediction(NamedTuple):
    """Seconds, and where the number comes from: a measurement with its date, or the model."""

    seconds: float
    source: str


class Costs(Protocol):
    """Whoever can tell times. `measured`: whether a calibration of this machine is behind it."""

    @property
    def measured(self) -> bool: ...

    def predict(self, ask: Ask) -> Prediction | None:
        """None where nothing is known of `ask`: an algorithm that does not exist for it."""
        ...
